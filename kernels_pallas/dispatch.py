"""Picks an implementation of an operation.

A named implementation is an order: it works or raises. "auto" may choose, and says once in the log what it chose and why.
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


def choose(operation: str, implementation: str, available: Mapping[str, tuple[str, ...]]) -> str:
    """The name of the implementation to run.

    Args:
        implementation: "auto" or a name.
        available: name -> platforms that it runs on ("cpu", "gpu", …; empty for all), best first.

    Raises:
        ValueError: if `implementation` is unknown or does not run on `target_platform()`.
    """
    platform = target_platform()
    if implementation != "auto":
        if implementation not in available:
            raise ValueError(
                f"implementation of {operation} must be one of {', '.join(['auto', *available])}, got {implementation!r}"
            )
        platforms = available[implementation]
        if platforms and platform not in platforms:
            raise ValueError(
                f"implementation {implementation!r} of {operation} runs on {', '.join(platforms)}, not on {platform}"
            )
        return implementation
    for name, platforms in available.items():
        if not platforms or platform in platforms:
            passed = list(available)[: list(available).index(name)]
            _log_once(operation, name, platform, ", ".join(f"{other} runs on {'/'.join(available[other])}" for other in passed))
            return name
    raise ValueError(f"no implementation of {operation} runs on {platform}")


@functools.cache
def _log_once(operation: str, name: str, platform: str, reason: str) -> None:
    logger.info("%s: %s on %s%s", operation, name, platform, f" ({reason})" if reason else "")
