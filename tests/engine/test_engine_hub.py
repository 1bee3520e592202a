"""The front end's side of headless machines, which are whatever a test says here; no process is started."""

import dataclasses
import os
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from child_engine import PATIENCE_S
from two_machines import free_port, two_machines

from jaxllm.engine import engine_hub
from jaxllm.engine.core_proc import Addresses, EngineCoreMain
from jaxllm.engine.engine_hub import EngineHub, address_of_this_machine
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

pytestmark = pytest.mark.timeout(60)


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

    def connect(self) -> "Peer":
        parallel = self.config.parallel
        return Peer(socket.create_connection((parallel.data_parallel_address, parallel.data_parallel_rpc_port)))

    def join(self, start: int, num_engines: int, of_version: str | None = None, **config: str) -> "tuple[Peer, Any]":
        """(the machine's side, the first word to it)"""
        peer = self.connect()
        peer.send(Join(of_version or version(), start, num_engines, {**comparable(self.config), **config}))
        return peer, peer.hear()


class Peer(Connection):
    """A machine that says what a test wants."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, ToMachine, PATIENCE_S)
        self.heard: list[Any] = []

    def hear(self) -> Any:
        """The next word, waiting for it."""
        while not self.heard:
            self.heard += self.receive(PATIENCE_S)
        return self.heard.pop(0)


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
        ({"start": 0}, "must lie in [1, 3]; the front end's own machine has rank 0"),
        ({"num_engines": 3}, "data_parallel_start_rank 2 and data_parallel_size_local 3 must lie in [1, 3]"),
        ({"num_engines": 0}, "data_parallel_size_local 0 must lie in [1, 3]"),
        ({"start": -7}, "must lie in [1, 3]"),
        ({"num_engines": 2**63 - 1}, "must lie in [1, 3]"),
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
        connection.hear()
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
    orders = [connection.hear(), connection.hear()]
    assert [(order.rank, order.front_ends, order.coordinator, order.log_stats) for order in orders] == [
        (rank, (Addresses("tcp://a:1", "tcp://a:2"),), "tcp://a:3", True) for rank in (1, 2)
    ]
    first, second, waiting = hub.processes.values()
    connection.send(Started(orders[0].process, 1234))
    connection.send(Beat())
    assert connection.hear() == Beat()
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
    assert connection.hear() == Kill(orders[1].process)
    connection.send(Ended(orders[1].process, "was killed by SIGKILL"))
    killer.join()
    assert second.how_it_ended() == "was killed by SIGKILL"
    # Another one of the same rank, and the end of one that waits for a machine.
    again = hub.hub.start(hub.mains[2], "engine-core")
    order = connection.hear()
    assert (order.rank, order.process) == (2, 4)
    waiting.kill()
    assert waiting.how_it_ended() == "was not started: no machine had come for it"
    connection.send(Leaving("goes home"))
    with pytest.raises(ConnectionLostError):
        connection.hear()
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
    order = connection.hear()
    assert order.rank == 1
    # One that does not do as it is told is not waited for.
    monkeypatch.setattr(engine_hub, "KILL_S", 0.1)
    again.kill()
    assert again.how_it_ended() in ("does not end", "closed its side") or "has not been heard of" in again.how_it_ended()
    again.close()
    connection.close()


def test_port_that_is_taken() -> None:
    port = free_port()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        with pytest.raises(ValueError, match=f"cannot listen for headless machines at 127.0.0.1:{port} .*in use"):
            EngineHub(two_machines(port))
    for name, why in (("0.0.0.0", "must be one address"), ("::1", "must be an IPv4 address"), ("no such host", "must be an")):
        with pytest.raises(ValueError, match=f"data_parallel_address {why}"):
            address_of_this_machine(name)
    assert address_of_this_machine("localhost") == "127.0.0.1"


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
    many = {f"field_{i}": "x" * 200 for i in range(10)}
    assert differences(many, {}).startswith(f"field_0 {'x' * 100}… there and unknown here, field_1")
    assert differences(many, {}).endswith(", and 2 more")
    assert [ranks_text(ranks) for ranks in ([3], [1, 2], range(3))] == ["rank 3", "ranks 1 and 2", "ranks 0, 1 and 2"]
