"""Each barrier, fence and wait of the Mosaic decode kernel, and of the producer of 8-bit caches, is needed: without it the
interpreter reports something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mosaic_mutant import ROOT, synchronisations

SYNCHRONISATIONS = [found for found in synchronisations() if found[0] in ("kernel_mosaic_decode", "kernel_mosaic_fp8")]


def run_without(module: str, line: int) -> int:
    """The exit status of a run with that line taken out."""
    script = Path(__file__).with_name("mosaic_mutant.py")
    paths = os.pathsep.join([str(ROOT), str(script.parent)])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    return subprocess.run([sys.executable, str(script), module, str(line)], env=env, timeout=400, check=False).returncode


def test_all_are_found():
    assert len(SYNCHRONISATIONS) == 3 + 4


@pytest.mark.slow
def test_whole_kernels_pass():
    assert run_without("none", 0) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("module", "line"), SYNCHRONISATIONS)
def test_without_one(module, line):
    assert run_without(module, line) == 3
