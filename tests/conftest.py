"""The tests run on the CPU. What they need of a GPU is compiled for a description of one (marker `aot`)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest

from kernels_pallas.aot import unavailable_reason


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = unavailable_reason()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("aot"):
                item.add_marker(pytest.mark.skip(reason=reason))
