"""What every test module shares.

The tests run on the CPU. What they need of a GPU is compiled for a description of one (marker `aot`).
"""

import gc
import os
import signal
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import psutil
import pytest

from jaxllm.worker.program_cache import trim_heap
from kernels_pallas.aot import unavailable_reason
from kernels_pallas.device import threads_for_interpreter

with threads_for_interpreter():
    jax.devices()

# A shell without job control lets what it starts in the background ignore Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = unavailable_reason()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("aot"):
                item.add_marker(pytest.mark.skip(reason=reason))


_resident_after_release = 0


def release_memory() -> None:
    """Free the engines that nobody holds any more, and give their memory back to the system.

    An engine's programs and arrays take gigabytes of small pieces, which the C library would keep for itself: the suite would
    grow to more than a small machine has. It takes a second, so it waits until there is something to give back.
    """
    global _resident_after_release
    process = psutil.Process()
    if process.memory_info().rss < _resident_after_release + 200 * 2**20:
        return
    gc.collect()
    trim_heap()
    _resident_after_release = process.memory_info().rss


@pytest.fixture(scope="module", autouse=True)
def _memory_is_released() -> Iterator[None]:
    yield
    release_memory()


@pytest.fixture
def memory_is_released() -> Iterator[None]:
    """After each test, for modules whose every test loads a real model."""
    yield
    release_memory()
