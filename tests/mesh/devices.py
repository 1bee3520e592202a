"""How many devices a test needs."""

import jax
import pytest


def need_devices(count: int) -> None:
    """Skip the test if there are fewer; on a CPU more can be simulated, so there it fails."""
    devices = jax.local_devices()
    if len(devices) < count:
        message = f"needs {count} devices, there are {len(devices)}"
        if devices[0].platform == "cpu":
            pytest.fail(f"{message}: set XLA_FLAGS=--xla_force_host_platform_device_count={count}")
        pytest.skip(message)
