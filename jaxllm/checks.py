"""Checks of values, for errors that name the field and the value."""

from typing import Any, get_args


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ValueError naming the field, the value and what is allowed."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
