"""Engine cores of two "machines" on 127.0.0.1 behind one AsyncLLM: the second is a process of its own, that can be killed."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_streams import collect, run, set_step_time, stream, tokens_of
from child_engine import PATIENCE_S, ChildExecutor, is_alive, wait_until
from test_data_parallel import client_of, pids_of, until
from toy_engine import expected_tokens
from transformers import PreTrainedTokenizerFast
from two_machines import free_port, two_machines

from jaxllm.engine import engine_group
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.engine.errors import EngineDeadError, EngineStartError, FrontEndLostError
from jaxllm.engine.headless import headless_ranks, run_headless
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(max_tokens=30)
_MACHINE = """
import json, logging, sys
import child_engine
from jaxllm.engine.headless import run_headless
from two_machines import two_machines
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    start, size, executor, config = json.loads(sys.argv[1])
    run_headless(two_machines(**config), range(start, start + size), getattr(child_engine, executor))
"""


class Machine:
    """A headless machine: a process that serves the front end at `port`."""

    def __init__(self, port: int, start: int = 1, num_engines: int = 1, executor: str = "ChildExecutor", **config: Any) -> None:
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "engine")))
        given = json.dumps((start, num_engines, executor, {"port": port, **config}))
        self.popen = subprocess.Popen(
            [sys.executable, "-c", _MACHINE, given],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.said += line
        self.popen.stderr.close()

    def engines(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.popen.pid).children()]

    def wait(self) -> int:
        """For its end. Returns the exit code."""
        code = self.popen.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code


@pytest.fixture(scope="module", autouse=True)
def own_temp_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nobody else's sockets are in it. Its path is short enough for them."""
    tmp_path_factory.getbasetemp()  # not inside
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def machine(port: int) -> Iterator[Callable[..., Machine]]:
    """Machines of a test's own. Each must end by itself at the latest when the front end has."""
    made: list[Machine] = []

    def make_one(**kwargs: Any) -> Machine:
        made.append(Machine(port, **kwargs))
        return made[-1]

    yield make_one
    try:
        for one in made:
            one.wait()
    finally:
        for one in made:
            one.popen.kill()


@pytest.fixture
def front_end(
    port: int, machine: None, tokenizer: PreTrainedTokenizerFast, own_temp_folder: Path
) -> Iterator[Callable[..., AsyncLLM]]:
    """Front ends of a test's own. Nothing of theirs may be left, on either machine."""
    made: list[tuple[AsyncLLM, list[int]]] = []

    def make_one(**config: Any) -> AsyncLLM:
        llm = AsyncLLM(two_machines(port, **config), tokenizer, ChildExecutor)
        made.append((llm, pids_of(llm)))
        return llm

    yield make_one
    for llm, pids in made:
        pids += pids_of(llm)
        llm.shutdown()
        wait_until(lambda pids=pids: not any(map(is_alive, pids)), "all processes to end")
    assert os.listdir(own_temp_folder) == []


async def ask_each(llm: AsyncLLM, ranks: list[int]) -> None:
    for rank in ranks:
        found = await collect(llm.generate([5, rank], PARAMS, "r", data_parallel_rank=rank))
        assert tokens_of(found)[-30:] == expected_tokens([5, rank], 30)


def test_engines_of_both_machines_answer(
    machine: Callable[..., Machine], front_end: Callable[..., AsyncLLM], caplog: pytest.LogCaptureFixture
) -> None:
    """Two here, two there, from two more machines of different size, whatever comes first."""
    early = machine(start=1, num_engines=2, size=4)
    with caplog.at_level(logging.INFO):
        late = threading.Timer(1.0, lambda: machine(start=3, num_engines=1, size=4))
        late.start()
        llm = front_end(size=4)
    assert "waiting for headless machines with ranks 1, 2 and 3 to join at 127.0.0.1" in caplog.text
    client = client_of(llm)
    assert len(set(client.pids)) == 4
    assert sorted(client.pids[1:3]) == sorted(early.engines())

    async def main() -> None:
        await ask_each(llm, [0, 1, 2, 3])
        outputs = await asyncio.gather(*(collect(stream(llm, [6, i], str(i), max_tokens=6)) for i in range(40)))
        assert [tokens_of(found) for found in outputs] == [expected_tokens([6, i], 6) for i in range(40)]
        counted = {metric.labels["engine"]: metric.value for metric in llm.get_metrics() if metric.name == "jaxllm:prompt_tokens"}  # type: ignore[union-attr]
        assert set(counted) == {"0", "1", "2", "3"}
        assert min(counted.values()) > 0
        # Calls go to all, and the coordinator hears of all.
        assert await llm.collective_rpc("echo", args=(1,)) == [((1,), {})] * 4
        await until(lambda: None not in client._group.last_snapshot, "the loads")

    run(main())
    llm.shutdown()
    assert early.wait() == 0
    assert "needs this machine no more" in early.said


def test_remote_engine_dies(
    machine: Callable[..., Machine], front_end: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests move, and it comes back; so does one whose whole machine goes and comes."""
    monkeypatch.setattr(engine_group, "FIRST_RESTART_DELAY_S", 0.05)
    there = machine()
    llm = front_end(data_parallel_restart=True)
    client = client_of(llm)

    async def lose(strike: Callable[[], None], why: str) -> None:
        await set_step_time(llm, 0.02)
        begun = llm.generate([5], SamplingParams(max_tokens=50), "begun", data_parallel_rank=1)
        await anext(begun)
        params = SamplingParams(max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY)
        hidden = asyncio.create_task(collect(llm.generate([7, 8], params, "hidden", data_parallel_rank=1)))
        await until(lambda: client.num_unfinished(1) == 2, "both requests")
        strike()
        with pytest.raises(EngineDeadError, match=why):
            await collect(begun)
        assert client.balancer.available == [0]
        assert tokens_of(await hidden) == expected_tokens([7, 8], 20)
        await set_step_time(llm, 0.0)

    async def main() -> None:
        first = client.pids[1]
        await lose(lambda: os.kill(first, signal.SIGKILL), "engine core 1's process was killed by SIGKILL")
        await until(lambda: client.balancer.available == [0, 1], "its return")
        assert there.engines() == [client.pids[1]]
        assert client.pids[1] != first
        await ask_each(llm, [1])

        orphan = client.pids[1]
        await lose(lambda: there.popen.kill(), r"was lost with its machine, 127.0.0.1:\d+, which closed its connection")
        await until(lambda: not is_alive(orphan), "the machine's engine core to end with it")
        await ask_each(llm, [0])
        again = machine()
        await until(lambda: client.balancer.available == [0, 1], "the return of the machine's engine core")
        assert again.engines() == [client.pids[1]]
        await ask_each(llm, [1])

        await lose(lambda: again.popen.send_signal(signal.SIGINT), "which was told to stop")
        assert again.wait() == 0
        # The end does not wait for a machine that is not there.
        start = time.monotonic()
        llm.shutdown()
        assert time.monotonic() - start < 5

    run(main())


@pytest.mark.slow
def test_silent_machine_is_lost(machine: Callable[..., Machine], front_end: Callable[..., AsyncLLM]) -> None:
    there = machine()
    llm = front_end()
    client = client_of(llm)
    [engine] = there.engines()
    there.popen.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: client._links[1].death is not None, "the silence to be noticed")
        assert "has not been heard of for" in str(client._links[1].death)
    finally:
        there.popen.send_signal(signal.SIGCONT)
    assert there.wait() == 1
    assert not is_alive(engine)
    assert "FrontEndLostError: the front end at 127.0.0.1" in there.said
    run(ask_each(llm, [0]))


_FRONT_END = """
import asyncio, json, logging, sys, time
from async_streams import collect, stream, tokens_of
from child_engine import ChildExecutor
from jaxllm.engine.async_llm import AsyncLLM
from two_machines import two_machines
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    llm = AsyncLLM(two_machines(**json.loads(sys.argv[1])), None, ChildExecutor)
    print(tokens_of(asyncio.run(collect(stream(llm, [5], max_tokens=6, detokenize=False)))), flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def front_end_process(port: int, stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A front end without an engine core of its own machine."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "engine")))
    command = [sys.executable, "-c", _FRONT_END, json.dumps({"port": port, "size": 1, "size_local": 0})]
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr}
    with subprocess.Popen(command, **pipes, text=True, env={**os.environ, "PYTHONPATH": paths}) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_front_end_is_lost(machine: Callable[..., Machine], port: int, blow: signal.Signals) -> None:
    """The machine ends by itself, and its engine core with it."""
    there = machine(start=0, size=1, size_local=0)
    with front_end_process(port) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == expected_tokens([5], 6)
        [engine] = there.engines()
        process.send_signal(blow)
        assert there.wait() == 1
        assert not is_alive(engine)
        why = "closed its connection" if blow == signal.SIGKILL else "has not been heard of for"
        assert f"FrontEndLostError: the front end at 127.0.0.1:{port} {why}" in there.said


def test_silent_front_end() -> None:
    config = two_machines(free_port())
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, worker_hang_timeout=0.5))
    with socket.create_server(("127.0.0.1", config.parallel.data_parallel_rpc_port)) as listener:
        silent: list[socket.socket] = []
        threading.Thread(target=lambda: silent.append(listener.accept()[0])).start()
        with pytest.raises(FrontEndLostError, match=r"the front end at 127.0.0.1:.* has not been heard of for"):
            run_headless(config, range(1, 2))
        silent[0].close()


def test_front_end_that_is_told_to_stop_while_it_waits(port: int) -> None:
    with front_end_process(port, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = iter(process.stderr)
        assert any(f"waiting for headless machines with rank 0 to join at 127.0.0.1:{port}" in line for line in said)
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt\n" in said
        assert process.wait(PATIENCE_S) == -signal.SIGINT


def test_engine_that_cannot_start_there(
    machine: Callable[..., Machine], port: int, tokenizer: PreTrainedTokenizerFast, own_temp_folder: Path
) -> None:
    there = machine(executor="BrokenExecutor", start=0, size=1, size_local=0)
    with pytest.raises(EngineStartError, match="engine core 0's process cannot start: OSError: no device"):
        AsyncLLM(two_machines(port, 1, 0), tokenizer, ChildExecutor)
    assert there.wait() == 0
    assert os.listdir(own_temp_folder) == []


def test_front_end_beside_the_first(
    port: int,
    machine: Callable[..., Machine],
    tokenizer: PreTrainedTokenizerFast,
    own_temp_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As API servers are: it hears of the other machine's engine core's end, and finds the next one."""
    monkeypatch.setattr(engine_group, "FIRST_RESTART_DELAY_S", 0.05)
    there = machine()
    config = two_machines(port, data_parallel_restart=True)
    group = engine_group.EngineGroup(config, ChildExecutor, True, lambda item: None, num_attached=2)
    try:
        group.wait_until_ready()
        llms = [AsyncLLM(config, tokenizer, front_end=group.front_end(index)) for index in range(2)]

        async def main() -> None:
            for _ in range(2):
                for llm in llms:
                    await ask_each(llm, [0, 1])
                await set_step_time(llms[0], 0.02)
                params = SamplingParams(max_tokens=50)
                begun = [llm.generate([5], params, f"begun{i}", data_parallel_rank=1) for i, llm in enumerate(llms)]
                for one in begun:
                    await anext(one)
                [engine] = there.engines()
                os.kill(engine, signal.SIGKILL)
                for one in begun:
                    with pytest.raises(EngineDeadError, match="engine core 1's process was killed by SIGKILL"):
                        await collect(one)
                for llm in llms:
                    await until(lambda llm=llm: client_of(llm).balancer.available == [0, 1], "its return")
            # The group hears of it in a thread of its own, which may come after the front ends.
            await until(lambda: group.links[1].process.pid == client_of(llms[0]).pids[1], "its return to the group")
            assert client_of(llms[0]).pids == client_of(llms[1]).pids == [link.process.pid for link in group.links]
            assert client_of(llms[0]).pids[1:] == there.engines()
            for llm in llms:
                await ask_each(llm, [0, 1])

        run(main())
        for llm in llms:
            llm.shutdown()
    finally:
        group.close()
    assert os.listdir(own_temp_folder) == []


def test_offline_engine_refuses(port: int) -> None:
    with pytest.raises(ValueError, match="data_parallel_size_local must be 1 here, got 0"):
        LLMEngine(two_machines(port, 1, 0), None, ChildExecutor)


HEADLESS = {"model": "toy", "data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 2}


def test_ranks() -> None:
    assert headless_ranks(EngineArgs(**HEADLESS)) == range(2, 4)
    assert headless_ranks(EngineArgs(model="toy", data_parallel_size=4)) == range(4)
    assert headless_ranks(EngineArgs(model="toy", data_parallel_size=4, data_parallel_start_rank=1)) == range(1, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_parallel_hybrid_lb": True}, "headless excludes data_parallel_hybrid_lb"),
        ({"data_parallel_external_lb": True}, "headless excludes data_parallel_external_lb"),
        ({"data_parallel_rank": 1}, "headless excludes data_parallel_rank"),
        ({"data_parallel_backend": "ray"}, "headless excludes data_parallel_backend 'ray'"),
        ({"nnodes": 2}, "headless with nnodes 2 is for node_rank 1 and above"),
        (
            {"data_parallel_start_rank": 3},
            "start_rank 3 and data_parallel_size_local 2 must lie in data_parallel_size 4",
        ),
        ({"data_parallel_start_rank": -1}, "data_parallel_start_rank -1"),
        ({"data_parallel_size_local": 0}, "data_parallel_size_local 0 must lie in"),
        ({"data_parallel_start_rank": 4, "data_parallel_size_local": None}, "data_parallel_size_local 0 must lie in"),
    ],
)
def test_wrong_ranks(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        headless_ranks(EngineArgs(**{**HEADLESS, **given}))
