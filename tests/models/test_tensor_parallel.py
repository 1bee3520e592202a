"""The same model on one, two and four (simulated) devices."""

import os
import subprocess
import sys
from pathlib import Path


def test_devices_that_share_the_heads_give_the_same_logits():
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(root), str(here)]),
    }
    script = here / "tensor_parallel_check.py"
    done = subprocess.run([sys.executable, script], env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [
        "1 devices: same logits, 0 all-reduces",
        "2 devices: same logits, 7 all-reduces",
        "3 devices: same logits, 7 all-reduces",
        "4 devices: same logits, 7 all-reduces",
    ]
