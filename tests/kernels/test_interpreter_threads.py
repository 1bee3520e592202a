"""XLA:CPU as the interpreter needs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_COUNT_THREADS = """
import jax
from kernels_pallas.device import threads_for_interpreter
with threads_for_interpreter():
    jax.devices()
names = [path.read_text().strip() for path in __import__("pathlib").Path("/proc/self/task").glob("*/comm")]
print(sum(name == "tf_XLAEigen" for name in names))
"""


@pytest.mark.parametrize(("nproc", "threads"), [(None, max(8, len(os.sched_getaffinity(0)))), ("2", 8), ("11", 11)])
def test_there_are_enough_threads_even_on_few_cores(nproc, threads):
    """With one a core, the threads of a kernel that wait for each other could take them all."""
    environment = {key: value for key, value in os.environ.items() if key not in ("NPROC", "XLA_FLAGS")}
    if nproc is not None:
        environment["NPROC"] = nproc
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _COUNT_THREADS]
    run = subprocess.run(command, env=environment, cwd=root, check=True, capture_output=True, text=True)
    assert int(run.stdout) == threads


def test_the_environment_is_left_as_it_was(monkeypatch):
    from kernels_pallas.device import threads_for_interpreter

    monkeypatch.delenv("NPROC", raising=False)
    with threads_for_interpreter():
        assert int(os.environ["NPROC"]) >= 8
    assert "NPROC" not in os.environ
    monkeypatch.setenv("NPROC", "3")
    with threads_for_interpreter():
        assert os.environ["NPROC"] == "8"
    assert os.environ["NPROC"] == "3"
