"""Engine cores of two "machines" on 127.0.0.1 behind one AsyncLLM: the second is a process of its own, that can be killed."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import select
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
from toy_engine import expected_tokens, make_config
from transformers import PreTrainedTokenizerFast

from jaxllm.config import EngineConfig
from jaxllm.engine import engine_group, engine_hub
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.core_proc import Addresses, EngineCoreMain
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.engine.engine_hub import EngineHub, address_of_this_machine
from jaxllm.engine.errors import EngineDeadError, EngineStartError
from jaxllm.engine.headless import headless_config
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.machine_wire import (
    Beat,
    Connection,
    ConnectionLostError,
    Ended,
    Join,
    Kill,
    Leaving,
    Refused,
    Started,
    ToMachine,
    Welcome,
    comparable,
    differences,
    ranks_text,
    version,
)
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(max_tokens=30)
# Seconds of silence after which a machine is lost.
HANG_S = 3.0

_MACHINE = """
import json, logging, sys
import child_engine
from jaxllm.engine.headless import run_headless
from test_headless import two_machines
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    start, size, executor, config = json.loads(sys.argv[1])
    run_headless(two_machines(**config), range(start, start + size), getattr(child_engine, executor))
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def two_machines(port: int, size: int = 2, size_local: int = 1, **config: Any) -> EngineConfig:
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **config}
    made = make_config(data_parallel_size=size, **config)
    parallel = dataclasses.replace(
        made.parallel, data_parallel_size_local=size_local, data_parallel_rpc_port=port, worker_hang_timeout=HANG_S
    )
    return dataclasses.replace(made, parallel=parallel)


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


def test_no_engine_beside_the_front_end(machine: Callable[..., Machine], front_end: Callable[..., AsyncLLM]) -> None:
    machine(start=0, size=1, size_local=0)
    llm = front_end(size=1, size_local=0)
    run(ask_each(llm, [0]))


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
        start = time.monotonic()
        strike()
        with pytest.raises(EngineDeadError, match=why):
            await collect(begun)
        assert time.monotonic() - start < HANG_S - 1
        assert tokens_of(await hidden) == expected_tokens([7, 8], 20)
        assert client.balancer.available == [0]
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


def test_silent_machine_is_lost(machine: Callable[..., Machine], front_end: Callable[..., AsyncLLM]) -> None:
    there = machine()
    llm = front_end()
    client = client_of(llm)
    [engine] = there.engines()
    there.popen.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: client._links[1].death is not None, "the silence to be noticed")
        assert "has not been heard of for 3 s" in str(client._links[1].death)
    finally:
        there.popen.send_signal(signal.SIGCONT)
    assert there.wait() == 1
    assert not is_alive(engine)
    assert "FrontEndLostError: the front end at 127.0.0.1" in there.said
    run(ask_each(llm, [0]))


_FRONT_END = """
import json, sys, time
from child_engine import ChildExecutor
from jaxllm.engine.async_llm import AsyncLLM
from test_headless import two_machines
if __name__ == "__main__":
    llm = AsyncLLM(two_machines(**json.loads(sys.argv[1])), None, ChildExecutor)
    print("ready", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def front_end_process(port: int, stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "engine")))
    command = [sys.executable, "-c", _FRONT_END, json.dumps({"port": port})]
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr}
    with subprocess.Popen(command, **pipes, text=True, env={**os.environ, "PYTHONPATH": paths}) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_front_end_is_lost(machine: Callable[..., Machine], port: int, blow: signal.Signals) -> None:
    """The machine ends by itself, and its engine core with it."""
    there = machine()
    with front_end_process(port) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        [engine] = there.engines()
        process.send_signal(blow)
        assert there.wait() == 1
        assert not is_alive(engine)
        why = "closed its connection" if blow == signal.SIGKILL else "has not been heard of for 3 s"
        assert f"FrontEndLostError: the front end at 127.0.0.1:{port} {why}" in there.said


class Hub:
    """An EngineHub with four ranks, of which the first is its own, and the orders for the others."""

    def __init__(self, **parallel: Any) -> None:
        config = two_machines(free_port(), 4)
        self.config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **parallel))
        self.hub = EngineHub(self.config)
        self.mains = {
            rank: EngineCoreMain(
                self.config, None, True, (Addresses("tcp://a:1", "tcp://a:2"),), os.getpid(), None, 0, rank, "tcp://a:3"
            )
            for rank in (1, 2, 3)
        }
        self.processes = {rank: self.hub.start(main, "engine-core") for rank, main in self.mains.items()}
        self.hub.open()

    def connect(self) -> Connection:
        parallel = self.config.parallel
        sock = socket.create_connection((parallel.data_parallel_address, parallel.data_parallel_rpc_port))
        return Connection(sock, ToMachine, PATIENCE_S)

    def join(self, start: int, num_engines: int, of_version: str | None = None, **config: str) -> tuple[Connection, Any]:
        """(the machine's side, the first word to it)"""
        connection = self.connect()
        connection.send(Join(of_version or version(), start, num_engines, {**comparable(self.config), **config}))
        return connection, hear(connection)[0]


def hear(connection: Connection) -> list[Any]:
    """The next words, waiting for them."""
    messages: list[Any] = []
    while not messages:
        messages = connection.receive(PATIENCE_S)
    return messages


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    made = Hub(**getattr(request, "param", {}))
    yield made
    for process in made.processes.values():
        process.kill()
        process.close()
    made.hub.close()
    made.hub.close()
    with pytest.raises(ConnectionRefusedError):
        made.connect()


def test_who_is_refused(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    for given, why in (
        ({"of_version": "0.0.1"}, f"it has jaxllm 0.0.1, the front end {version()}"),
        ({"max_num_seqs": "5"}, "its configuration is not the front end's: max_num_seqs 5 there and 4 here"),
        ({"new": "1"}, "its configuration is not the front end's: new 1 there and unknown here"),
        ({"start": 0}, "must lie in [1, 3]; rank 0 belongs to the front end's own machine"),
        ({"num_engines": 3}, "data_parallel_start_rank 2 and data_parallel_size_local 3 must lie in [1, 3]"),
        ({"num_engines": 0}, "data_parallel_size_local 0 must lie in [1, 3]"),
        ({"start": -7}, "must lie in [1, 3]"),
    ):
        connection, word = hub.join(**{"start": 2, "num_engines": 1, **given})  # type: ignore[arg-type]
        assert isinstance(word, Refused), word
        assert why in word.why
        assert f"is refused: {word.why}" in caplog.text
        connection.close()
    # None of them is in anybody's way, nor is whoever speaks another language.
    with socket.create_connection(("127.0.0.1", hub.config.parallel.data_parallel_rpc_port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(100) == b""
    assert "did not join as a machine: it does not speak as jaxllm does" in caplog.text
    connection = hub.connect()
    connection.send(Beat())
    with pytest.raises(ConnectionLostError, match="closed its connection"):
        hear(connection)
    connection.close()
    first, word = hub.join(2, 2)
    assert isinstance(word, Welcome)
    for start, num_engines in ((2, 1), (3, 1), (1, 2), (1, 3)):
        other, word = hub.join(start, num_engines)
        assert "is there already, on the machine at 127.0.0.1" in word.why
        other.close()
    other, word = hub.join(1, 1)
    assert isinstance(word, Welcome)
    other.close()
    first.close()


def test_machine_and_hub(hub: Hub) -> None:
    """What either says, word by word."""
    connection, word = hub.join(1, 2)
    assert isinstance(word, Welcome)
    orders = hear(connection)
    while len(orders) < 2:
        orders += hear(connection)
    assert [(order.rank, order.front_ends, order.coordinator, order.log_stats) for order in orders] == [
        (rank, (Addresses("tcp://a:1", "tcp://a:2"),), "tcp://a:3", True) for rank in (1, 2)
    ]
    first, second, waiting = hub.processes.values()
    connection.send(Started(orders[0].process, 1234))
    connection.send(Beat())
    assert hear(connection) == [Beat()]
    assert (first.pid, second.pid) == (1234, 0)
    # An end that came by itself, one by order, and one of a process that nobody knows.
    connection.send(Ended(99, "never was"))
    connection.send(Ended(orders[0].process, "ended with exit code 7"))
    assert first.wait(PATIENCE_S)
    assert select.select([first], [], [], 0)[0]
    assert first.how_it_ended() == "ended with exit code 7"
    assert not select.select([second], [], [], 0)[0]
    killer = threading.Thread(target=second.kill)
    killer.start()
    assert hear(connection) == [Kill(orders[1].process)]
    connection.send(Ended(orders[1].process, "was killed by SIGKILL"))
    killer.join()
    assert second.how_it_ended() == "was killed by SIGKILL"
    # Another one of the same rank, and the end of one that waits for a machine.
    again = hub.hub.start(hub.mains[2], "engine-core")
    [order] = hear(connection)
    assert (order.rank, order.process) == (2, 4)
    waiting.kill()
    assert waiting.how_it_ended() == "was not started: no machine had come for it"
    connection.send(Leaving("goes home"))
    with pytest.raises(ConnectionLostError):
        hear(connection)
    assert again.how_it_ended().startswith("was lost with its machine, 127.0.0.1:")
    assert again.how_it_ended().endswith(", which goes home")
    again.close()
    connection.close()
    # It is not needed any more.
    connection, word = hub.join(1, 1)
    assert word == Refused("rank 1 was lost, and without data_parallel_restart it is not started again")
    connection.close()


@pytest.mark.parametrize("hub", [{"data_parallel_restart": True, "worker_hang_timeout": 0.5}], indirect=True)
def test_machine_that_comes_back(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, word = hub.join(1, 1)
    assert isinstance(word, Welcome)
    assert hub.processes[1].wait(PATIENCE_S)
    assert "which has not been heard of for" in hub.processes[1].how_it_ended()
    connection.close()
    again = hub.hub.start(hub.mains[1], "engine-core")
    connection, word = hub.join(1, 1)
    assert isinstance(word, Welcome)
    [order] = hear(connection)
    assert order.rank == 1
    # One that does not do as it is told is not waited for.
    monkeypatch.setattr(engine_hub, "KILL_S", 0.1)
    again.kill()
    assert again.how_it_ended() in ("does not end", "closed its side") or "has not been heard of" in again.how_it_ended()
    again.close()
    connection.close()


def test_front_end_that_is_told_to_stop_while_it_waits(port: int, own_temp_folder: Path) -> None:
    with front_end_process(port, stderr=subprocess.PIPE) as process:
        wait_until(lambda: listens(port), "it to listen")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert err.rstrip().endswith("KeyboardInterrupt")


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_engine_that_cannot_start_there(
    machine: Callable[..., Machine], port: int, tokenizer: PreTrainedTokenizerFast, own_temp_folder: Path
) -> None:
    there = machine(executor="BrokenExecutor")
    with pytest.raises(EngineStartError, match="engine core 1's process cannot start: OSError: no device"):
        AsyncLLM(two_machines(port), tokenizer, ChildExecutor)
    assert there.wait() == 0
    assert os.listdir(own_temp_folder) == []


def test_port_that_is_taken(port: int, own_temp_folder: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        with pytest.raises(ValueError, match=f"cannot listen for headless machines at 127.0.0.1:{port} .*in use"):
            AsyncLLM(two_machines(port), None, ChildExecutor)
    assert os.listdir(own_temp_folder) == []
    for name, why in (("0.0.0.0", "must be one address"), ("::1", "must be an IPv4 address"), ("no such host", "must be an")):
        with pytest.raises(ValueError, match=f"data_parallel_address {why}"):
            address_of_this_machine(name)
    assert address_of_this_machine("localhost") == "127.0.0.1"


def test_several_api_servers_are_refused(port: int) -> None:
    with pytest.raises(ValueError, match="engines on headless machines need api_server_count 1, got 2"):
        engine_group.EngineGroup(two_machines(port), ChildExecutor, True, print, num_attached=2)


def test_offline_engine_refuses(port: int) -> None:
    with pytest.raises(ValueError, match="data_parallel_size_local must be 1 here, got 0"):
        LLMEngine(two_machines(port, 1, 0), None, ChildExecutor)


def test_what_is_compared() -> None:
    config = two_machines(1, 4)
    parallel = dataclasses.replace(
        config.parallel,
        data_parallel_size_local=2,
        data_parallel_rpc_port=5,
        data_parallel_address="a",
        data_parallel_restart=True,
    )
    model = dataclasses.replace(config.model, path="elsewhere", model="m")
    same = dataclasses.replace(config, parallel=parallel, model=model, compilation_cache_dir="c", max_num_queued_reqs=4)
    assert differences(comparable(same), comparable(config)) == ""
    model = dataclasses.replace(config.model, dtype="bfloat16", decoder=dataclasses.replace(config.model.decoder, vocab_size=7))
    other = dataclasses.replace(config, model=model, cache=dataclasses.replace(config.cache, block_size=8))
    assert differences(comparable(other), comparable(config)) == (
        "block_size 8 there and 4 here, dtype 'bfloat16' there and 'float32' here, vocab_size 7 there and 320 here"
    )
    assert [ranks_text(ranks) for ranks in ([3], [1, 2], range(3))] == ["rank 3", "ranks 1 and 2", "ranks 0, 1 and 2"]


HEADLESS = {"model": "toy", "data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 2}


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
            "data_parallel_start_rank 3 and data_parallel_size_local 2 must lie in data_parallel_size 4",
        ),
        ({"data_parallel_start_rank": -1}, "data_parallel_start_rank -1"),
        ({"data_parallel_size_local": 0}, "data_parallel_size_local 0 must lie in"),
        ({"data_parallel_start_rank": 4, "data_parallel_size_local": None}, "data_parallel_size_local 0 must lie in"),
    ],
)
def test_mistakes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        headless_config(EngineArgs(**{**HEADLESS, **given}))
