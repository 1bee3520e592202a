"""What every test module shares."""

import ctypes
import gc
import sys
from collections.abc import Iterator

import pytest


def release_memory() -> None:
    """Free the engines that nobody holds any more, and give their memory back to the system.

    An engine's programs and arrays take gigabytes of small pieces, which the C library would keep for itself: the suite would
    grow to more than a small machine has.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others have none
        if trim is not None:
            trim(0)


@pytest.fixture(scope="module", autouse=True)
def _memory_is_released() -> Iterator[None]:
    yield
    release_memory()


@pytest.fixture
def memory_is_released() -> Iterator[None]:
    """After each test, for modules whose every test loads a real model."""
    yield
    release_memory()
