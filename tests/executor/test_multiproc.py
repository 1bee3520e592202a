"""MultiProcExecutor with workers that have no jax: steps, calls, and every way in which a worker can go wrong."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from child_engine import is_alive, wait_until
from toy_engine import expected_tokens, make_config
from toy_worker import RefusingExecutor, ToyMultiProcExecutor

from jaxllm.config import EngineConfig
from jaxllm.core.types import EngineCoreRequest
from jaxllm.engine.core import EngineCore
from jaxllm.engine.errors import EngineDeadError
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.executor.abstract import Executor
from jaxllm.executor.multiproc import MultiProcExecutor
from jaxllm.executor.uniproc import UniProcExecutor
from jaxllm.executor.worker_group import WorkerGoneError
from jaxllm.parallel_config import ParallelConfig
from jaxllm.sampling_params import SamplingParams

TESTS = Path(__file__).parents[1]
MOST_S = 10.0  # until the engine is dead
PROMPTS = [[7, 8, 9] * i + [10 + i] for i in range(8)]


def mp_config(num_workers: int = 2, *, parallel: dict[str, Any] | None = None, **config: Any) -> EngineConfig:
    parallel_config = ParallelConfig(num_workers, distributed_executor_backend="mp", **(parallel or {}))
    return dataclasses.replace(make_config(**config), parallel=parallel_config)


MakeCore = Callable[..., EngineCore]


@pytest.fixture
def make_core() -> Iterator[MakeCore]:
    cores: list[EngineCore] = []

    def make(num_workers: int = 2, **kwargs: Any) -> EngineCore:
        cores.append(EngineCore(mp_config(num_workers, **kwargs), ToyMultiProcExecutor, log_stats=False))
        return cores[-1]

    yield make
    for core in cores:
        pids = core.executor.worker_pids  # type: ignore[attr-defined]
        core.shutdown()
        core.shutdown()
        assert not any(map(is_alive, pids))


def ask(core: EngineCore, max_tokens: int = 9) -> None:
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=max_tokens, detokenize=False, logprobs=index % 3 or None)
        core.add_request(core.make_request(EngineCoreRequest(str(index), prompt, params)))


def run(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_work():
        for outputs in core.step().values():
            for output in outputs.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def run_for(core: EngineCore, seconds: float) -> None:
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        if not core.has_work():
            ask(core, max_tokens=40)
        core.step()


def run_until_dead(core: EngineCore) -> str:
    """Steps until the engine dies; returns why, and checks that it did not take long."""
    start = time.monotonic()
    with pytest.raises(EngineDeadError) as caught:
        run_for(core, 2 * MOST_S)
    assert time.monotonic() - start < MOST_S
    return str(caught.value)


def executor_of(core: EngineCore) -> ToyMultiProcExecutor:
    assert isinstance(core.executor, ToyMultiProcExecutor)
    return core.executor


@pytest.mark.parametrize(("num_blocks", "async_scheduling"), [(21, True), (129, False)])
def test_tokens(make_core: MakeCore, async_scheduling: bool, num_blocks: int):
    """Those of the model, with few blocks (so with preemptions) and with many."""
    core = make_core(2, async_scheduling=async_scheduling, num_blocks=num_blocks)
    ask(core)
    assert run(core) == {str(i): expected_tokens(prompt, 9) for i, prompt in enumerate(PROMPTS)}
    core.check_health()


def test_start(make_core: MakeCore):
    """Every worker starts by itself; the one with the least memory says how many blocks there are."""
    core = make_core(3, num_blocks=50)
    assert core.kv_cache_config.num_blocks == 48
    log = ["init_device", "load_model", "init_kv_cache 48", "compile_first", "compile_and_warm_up"]
    assert core.collective_rpc("get_log") == [log] * 3
    assert Executor.get_class(core.config) is MultiProcExecutor
    assert Executor.get_class(make_config()) is UniProcExecutor


def test_calls(make_core: MakeCore):
    executor = executor_of(make_core(3))
    assert executor.collective_rpc("rank") == [0, 1, 2]
    assert executor.collective_rpc("echo", (1, "b"), {"c": [2]}) == [((1, "b"), {"c": [2]})] * 3
    with pytest.raises(ZeroDivisionError, match="by request"):
        executor.collective_rpc("fail", (1,))
    with pytest.raises(AttributeError, match="no_such_method"):
        executor.collective_rpc("no_such_method")
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        executor.collective_rpc("make_unsendable")
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        executor.collective_rpc("echo", (object(),))
    # An answer that comes too late is nobody's.
    with pytest.raises(TimeoutError, match=r"no answer from worker 1 \(pid \d+\) within 0.2 s"):
        executor.collective_rpc("pause", (1, 0.6), timeout=0.2)
    assert executor.collective_rpc("rank", timeout=20) == [0, 1, 2]
    executor.check_health()


def test_a_call_between_two_steps(make_core: MakeCore):
    core = make_core(2, async_scheduling=True)
    ask(core)
    for _ in range(3):
        core.step()
    assert core.executor.collective_rpc("rank") == [0, 1]  # while a step is in flight
    tokens = run(core)
    assert tokens["0"][-4:] == expected_tokens(PROMPTS[0], 9)[-4:]


@pytest.mark.parametrize(("rank", "async_scheduling"), [(0, True), (1, False)])
def test_a_killed_worker_ends_the_engine(make_core: MakeCore, rank: int, async_scheduling: bool):
    core = make_core(2, async_scheduling=async_scheduling)
    ask(core, max_tokens=40)
    core.step()
    pid = executor_of(core).worker_pids[rank]
    os.kill(pid, signal.SIGKILL)
    assert f"worker {rank} (pid {pid}) was killed by SIGKILL" in run_until_dead(core)
    with pytest.raises(WorkerGoneError, match=f"worker {rank}"):
        core.executor.check_health()


def test_last_words(make_core: MakeCore, capfd: pytest.CaptureFixture[str]):
    core = make_core(2)
    with pytest.raises(WorkerGoneError, match=r"worker 1 \(pid \d+\) ended with exit code 7; its last words: .*farewell"):
        core.executor.collective_rpc("say_and_exit", (1,))
    assert "all is lost\nfarewell\n" in capfd.readouterr().err


def test_a_stopped_worker_ends_the_engine(make_core: MakeCore):
    """It is alive, so nobody is told; but its heart does not beat."""
    rank = 1
    core = make_core(2, async_scheduling=True, parallel={"worker_hang_timeout": 2.0})
    ask(core, max_tokens=40)
    core.step()
    pid = executor_of(core).worker_pids[rank]
    os.kill(pid, signal.SIGSTOP)
    assert f"worker {rank} (pid {pid}) has not moved for 2 s" in run_until_dead(core)


def test_a_step_that_takes_too_long_ends_the_engine(make_core: MakeCore):
    core = make_core(2, parallel={"execute_model_timeout": 0.5})
    core.collective_rpc("set_step_time", args=(3.0,))
    ask(core)
    assert "a step has taken more than 0.5 s (execute_model_timeout); worker 0" in run_until_dead(core)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_step_ends_the_engine(make_core: MakeCore, rank: int):
    """Also when it is not the worker that answers."""
    core = make_core(2, async_scheduling=True)
    core.collective_rpc("fail_in", args=(3, rank))
    ask(core, max_tokens=40)
    why = run_until_dead(core)
    assert f"worker {rank} (pid " in why
    assert "MemoryError: no memory left (toy_worker.py:" in why


def test_a_start_that_fails():
    """The caller's mistake is the caller's, though another worker waits for the one that noticed."""
    start = time.monotonic()
    with pytest.raises(ValueError, match="model is too large"):
        EngineCore(mp_config(2), RefusingExecutor, log_stats=False)
    assert time.monotonic() - start < MOST_S


def test_an_idle_engine_notices():
    """In a process of its own, with nobody asking for anything."""
    engine = LLMEngine(mp_config(2), None, ToyMultiProcExecutor, multiprocess=True)
    client = engine.engine_core
    pids = children(client.pid)  # type: ignore[attr-defined]
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: client.dead_error is not None, "the engine's death")  # type: ignore[attr-defined]
    assert f"(pid {pids[1]}) was killed by SIGKILL" in str(client.dead_error)  # type: ignore[attr-defined]
    wait_until(lambda: not any(map(is_alive, pids)), "the workers' end")
    engine.shutdown()


def children(pid: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


_FRONT_END = """
import json, sys, time
from test_multiproc import children, mp_config
from toy_worker import ToyMultiProcExecutor
from jaxllm.engine.llm_engine import LLMEngine
if __name__ == "__main__":
    engine = LLMEngine(mp_config(2), None, ToyMultiProcExecutor, multiprocess={multiprocess})
    core = engine.engine_core
    pids = [core.pid, *children(core.pid)] if {multiprocess} else core.engine_core.executor.worker_pids
    print(json.dumps(pids), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("multiprocess", [False, True])
def test_no_orphan_when_the_front_end_is_killed(multiprocess: bool, tmp_path: Path):
    script = tmp_path / "front_end.py"
    script.write_text(_FRONT_END.replace("{multiprocess}", str(multiprocess)))
    paths = [TESTS.parent, TESTS / "engine", TESTS / "executor"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        assert len(pids) == 2 + multiprocess
        assert all(map(is_alive, pids))
        process.kill()
    wait_until(lambda: not any(map(is_alive, pids)), "the end of all processes")


def test_no_orphan_when_the_engine_core_is_killed():
    engine = LLMEngine(mp_config(2), None, ToyMultiProcExecutor, multiprocess=True)
    client = engine.engine_core
    pids = children(client.pid)  # type: ignore[attr-defined]
    os.kill(client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    wait_until(lambda: not any(map(is_alive, pids)), "the workers' end")
    wait_until(lambda: client.dead_error is not None, "the engine's death")  # type: ignore[attr-defined]
    engine.shutdown()


def test_configuration():
    assert ParallelConfig(4, distributed_executor_backend="mp", devices_per_worker=2).num_workers == 2
    for wrong, message in (
        ({"distributed_executor_backend": "tpu"}, "distributed_executor_backend must be one of"),
        ({"devices_per_worker": 2}, "devices_per_worker needs distributed_executor_backend 'mp'"),
        ({"distributed_executor_backend": "mp", "devices_per_worker": 3}, "devices_per_worker 3 does not divide"),
        ({"execute_model_timeout": 0.0}, "execute_model_timeout must be above 0, got 0.0"),
        ({"worker_hang_timeout": -1.0}, "worker_hang_timeout must be above 0, got -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelConfig(4, **wrong)
