"""The engine's share of a GPU's memory, by what jax was told to set aside."""

import pytest

from jaxllm.worker.device_memory import set_memory_aside, usable_bytes
from kernels_pallas.aot import TARGETS

TOTAL = TARGETS["h200"].memory_bytes


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        # Set first, so that what the test leaves behind is taken back.
        monkeypatch.setenv(name, "")
    return monkeypatch


@pytest.mark.parametrize(("share", "fraction"), [(0.92, 0.96), (0.5, 0.75), (1.0, 1.0)])
def test_the_engine_gets_its_share_of_the_whole_device(share: float, fraction: float):
    set_memory_aside(share)
    # What the plan of a device that is not here counts with.
    assert usable_bytes(share, int(fraction * TOTAL)) == pytest.approx(share * TOTAL, rel=1e-6)


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_what_the_user_sets_aside_stands(name: str, environment: pytest.MonkeyPatch):
    environment.setenv(name, "0.8")
    set_memory_aside(0.92)
    # The share is more than there is; half of the device is less.
    assert usable_bytes(0.92, int(0.8 * TOTAL)) == int(0.8 * TOTAL)
    assert usable_bytes(0.5, int(0.8 * TOTAL)) == pytest.approx(0.5 * TOTAL, rel=1e-6)


def test_jax_that_nobody_told_anything_has_three_quarters():
    assert usable_bytes(0.92, 750) == 750
    assert usable_bytes(0.6, 750) == 600
