"""Two "machines" on 127.0.0.1: the second has workers only, and is a process of its own that can be killed."""

import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from child_engine import is_alive, wait_until
from test_multiproc import MOST_S, PROMPTS, ask, children, mp_config, run, run_until_dead
from toy_engine import expected_tokens
from toy_worker import ToyMultiProcExecutor, ToyWorker

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.executor.nodes import run_node
from jaxllm.executor.worker_group import WorkerGoneError
from jaxllm.parallel_config import ParallelConfig

TESTS = Path(__file__).parents[1]
_NODE = """
import pickle, sys
from toy_worker import ToyWorker
from jaxllm.executor.nodes import run_node
if __name__ == "__main__":
    run_node(pickle.loads(bytes.fromhex(sys.argv[1])), ToyWorker)
"""
_FIRST_NODE = """
import pickle, sys, time
from toy_worker import ToyMultiProcExecutor
from jaxllm.engine.core import EngineCore
if __name__ == "__main__":
    core = EngineCore(pickle.loads(bytes.fromhex(sys.argv[1])), ToyMultiProcExecutor, log_stats=False)
    print("ready", flush=True)
    time.sleep(60)
"""


def free_ports() -> int:
    """The first of three ports that nobody uses now."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                for other in (port + 1, port + 2):
                    with socket.socket() as sock:
                        sock.bind(("127.0.0.1", other))
            except (OSError, OverflowError):
                continue
            return port


def configs(num_workers: int = 4, **config) -> list[EngineConfig]:
    """Of node 0 and node 1."""
    parallel = {"nnodes": 2, "master_port": free_ports(), "worker_hang_timeout": 4.0}
    first = mp_config(num_workers, parallel=parallel, async_scheduling=True, **config)
    return [first, dataclasses.replace(first, parallel=dataclasses.replace(first.parallel, node_rank=1))]


@contextmanager
def script(code: str, config: EngineConfig) -> Iterator[subprocess.Popen]:
    paths = [TESTS.parent, TESTS / "engine", TESTS / "executor"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", code, pickle.dumps(config).hex()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=environment, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def node(config: EngineConfig) -> AbstractContextManager[subprocess.Popen]:
    return script(_NODE, config)


def test_four_workers_on_two_machines():
    here, there = configs()
    with node(there) as process:
        core = EngineCore(here, ToyMultiProcExecutor, log_stats=False)
        # The worker with the least memory is on the other machine.
        assert core.kv_cache_config.num_blocks == 129 - 3
        assert core.collective_rpc("rank") == [0, 1, 2, 3]
        ask(core)
        assert run(core) == {str(i): expected_tokens(prompt, 9) for i, prompt in enumerate(PROMPTS)}
        core.check_health()
        core.shutdown()
        assert process.wait(MOST_S) == 0


@pytest.mark.parametrize("victim", ["worker", "machine", "stopped machine"])
def test_what_happens_there_is_noticed_here(victim: str):
    here, there = configs(2)
    with node(there) as process:
        core = EngineCore(here, ToyMultiProcExecutor, log_stats=False)
        [worker] = children(process.pid)
        ask(core, max_tokens=40)
        core.step()
        if victim == "worker":
            os.kill(worker, signal.SIGKILL)
            why = f"node 1: worker 1 (pid {worker}) was killed by SIGKILL"
        elif victim == "machine":
            process.kill()
            why = "node 1 has not been heard of for"
        else:
            process.send_signal(signal.SIGSTOP)
            why = "node 1 has not been heard of for"
        assert why in run_until_dead(core)
        core.shutdown()
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_alive(worker), "the end of the other machine's worker")


def test_node_0_is_missed():
    """Its end without a farewell ends the workers of the other machines too."""
    here, there = configs(2)
    before = children(os.getpid())
    with script(_FIRST_NODE, here) as process:
        assert process.stdout is not None
        killer = threading.Thread(target=lambda: (process.stdout.readline(), process.kill()))
        killer.start()
        with pytest.raises(WorkerGoneError, match="node 0 has not been heard of for"):
            run_node(there, ToyWorker)
        killer.join()
    assert children(os.getpid()) == before


def test_another_configuration_is_refused():
    here, there = configs(2)
    there = dataclasses.replace(there, model=dataclasses.replace(there.model, seed=5))
    with node(there) as process:
        with pytest.raises(ValueError, match="node 1 has another configuration than node 0"):
            EngineCore(here, ToyMultiProcExecutor, log_stats=False)
        assert process.stderr is not None
        assert "ValueError: node 1 has another configuration than node 0" in process.stderr.read()


def test_the_engine_runs_on_node_0():
    _, there = configs(2)
    start = time.monotonic()
    with pytest.raises(ValueError, match="node_rank is 1: the engine runs on node 0"):
        EngineCore(there, ToyMultiProcExecutor, log_stats=False)
    assert time.monotonic() - start < MOST_S


def test_a_port_in_use():
    here, _ = configs(2)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", here.parallel.master_port))
        sock.listen()
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{here.parallel.master_port}"):
            EngineCore(here, ToyMultiProcExecutor, log_stats=False)


def test_configuration():
    assert EngineArgs(nnodes=2, tensor_parallel_size=4)._executor_backend() == "mp"
    assert EngineArgs()._executor_backend() == "uni"
    assert ParallelConfig(8, distributed_executor_backend="mp", devices_per_worker=2, nnodes=2).num_local_workers == 2
    for wrong, message in (
        ({"nnodes": 3}, "nnodes 3 must divide the number of workers, 4"),
        ({"nnodes": 2, "node_rank": 2}, "node_rank must be below nnodes 2, got 2"),
        ({"nnodes": 2, "master_port": 65534}, "master_port must be at most 65533, got 65534"),
        ({"nnodes": 2, "distributed_executor_backend": "uni"}, "nnodes 2 needs distributed_executor_backend 'mp'"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelConfig(4, **{"distributed_executor_backend": "mp", **wrong})
