from pathlib import Path

from weight_files import run_python


def test_eight_devices(tmp_path):
    """In a process of its own: the number of devices is fixed when JAX starts."""
    script = Path(__file__).with_name("eight_devices.py")
    done = run_python("-W", "error", script, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert done.stdout.endswith("all is well\n"), done.stdout + done.stderr
