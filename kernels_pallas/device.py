"""The GPU that is being lowered for: the one here, or one that is known by name alone. And the CPU that stands in for one."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax

# Of devices that programs are compiled for but that are not here: name, compute capability, cores (streaming multiprocessors).
_KNOWN = (
    (re.compile(r"\bG?H(20|100|200|800)\b"), (9, 0), 132),
    (re.compile(r"\bA[18]00\b"), (8, 0), 108),
    (re.compile(r"\bL40S?\b"), (8, 9), 142),
    (re.compile(r"\bL4\b"), (8, 9), 58),
    (re.compile(r"\bG?B200\b"), (10, 0), 148),
)


def compute_capability() -> tuple[int, int] | None:
    """Of the NVIDIA GPU that is lowered for: (major, minor); None if it is none, or unknown."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return next((capability for name, capability, _ in _KNOWN if name.search(device.device_kind)), None)
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(jax.devices()[0], "compute_capability", "")))
    return None if found is None else (int(found.group(1)), int(found.group(2)))


def num_cores() -> int:
    """Streaming multiprocessors of the GPU that is lowered for; those of an A100 if it is unknown."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return next((cores for name, _, cores in _KNOWN if name.search(device.device_kind)), 108)
    return int(getattr(jax.devices()[0], "core_count", 108))


def shared_memory() -> int:
    """Bytes of shared memory that a block may ask for, by compute capability (CUDA programming guide); the least if unknown."""
    kib = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
    return 1024 * kib.get(compute_capability() or (0, 0), 99)


# The kernel's loop and its warpgroups, of which a kernel here has up to three, and some to spare.
_INTERPRETER_THREADS = 8


@contextmanager
def threads_for_interpreter() -> Iterator[None]:
    """If jax starts its CPU in this context, it has enough threads for the interpreter, also on a machine of few cores.

    XLA:CPU has one thread a core (NPROC, where it is set), in which parts of an interpreted kernel may run, and wait for
    barriers there. Where all wait, what they wait for would never run.
    """
    given = os.environ.get("NPROC")
    cores = int(given) if given else len(os.sched_getaffinity(0))
    os.environ["NPROC"] = str(max(cores, _INTERPRETER_THREADS))
    try:
        yield
    finally:
        if given is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = given
