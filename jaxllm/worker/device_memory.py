"""How much of a GPU's memory jax sets aside when it starts, and how much of that is for weights, temporaries and KV cache.

XLA takes a fraction of the device for itself, three quarters if nobody says otherwise, and tells only that much. The engine asks
for more: all of its share, and half of what the share leaves, so that gaps between buffers have room. The other half stays with
the driver, its libraries and the programs.
"""

import os

# The variable that jax reads, and the one that it read before; a value that somebody has given stands.
_VARIABLE, _OLD_VARIABLE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_BY_DEFAULT = 0.75


def set_memory_aside(share: float) -> None:
    """Let jax, when it starts in this process, take enough of each GPU for `share` of it. No effect where jax runs already."""
    if not os.environ.get(_VARIABLE) and not os.environ.get(_OLD_VARIABLE):
        os.environ[_VARIABLE] = f"{(1 + share) / 2:.4f}"


def usable_bytes(share: float, limit: int) -> int:
    """Bytes of a GPU that `share` of its memory is, at most what jax has set aside.

    Args:
        limit: bytes that jax has set aside on it.
    """
    fraction = float(os.environ.get(_VARIABLE) or os.environ.get(_OLD_VARIABLE) or _BY_DEFAULT)
    return int(min(share / fraction, 1.0) * limit)
