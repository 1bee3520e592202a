"""Picks an implementation of an operation.

A named implementation is an order: it works or raises. "auto" may choose; `log_choice` says once in the log what and why.
"""

import functools
import logging
from collections.abc import Mapping

import jax

logger = logging.getLogger(__name__)


def target_platform() -> str:
    """The platform that is being lowered for: that of the mesh in force if its devices are known, else the default backend's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def choose(operation: str, implementation: str, refusals: Mapping[str, str | None]) -> str:
    """The name of the implementation to run.

    Args:
        implementation: "auto" or a name.
        refusals: name -> why it cannot be used, None if it can; best first.

    Raises:
        ValueError: if `implementation` is unknown, or neither it nor, for "auto", any other can be used.
    """
    if implementation != "auto":
        if implementation not in refusals:
            raise ValueError(
                f"implementation of {operation} must be one of {', '.join(['auto', *refusals])}, got {implementation!r}"
            )
        if refusals[implementation] is not None:
            raise ValueError(f"implementation {implementation!r} of {operation} cannot be used: {refusals[implementation]}")
        return implementation
    for name, refusal in refusals.items():
        if refusal is None:
            return name
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise ValueError(f"no implementation of {operation} can be used here ({reasons})")


def log_choice(operation: str, chosen: str, refusals: Mapping[str, str | None]) -> None:
    """Say once which implementation runs, and why none that is better."""
    passed = list(refusals)[: list(refusals).index(chosen)]
    _log_once(
        operation, chosen, target_platform(), "; ".join(f"not {name}: {refusals[name]}" for name in passed if refusals[name])
    )


@functools.cache
def _log_once(operation: str, name: str, platform: str, reason: str) -> None:
    logger.info("%s: %s on %s%s", operation, name, platform, f" ({reason})" if reason else "")
