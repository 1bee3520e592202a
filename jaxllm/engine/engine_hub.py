"""EngineHub: where headless machines join a front end, which runs engine cores there as if they were its own.

    front end                                        headless machine
    EngineHub          ◄──── one TCP connection ───► run_headless (headless.py)
      RemoteEngineProcess    start, kill, ended        EngineProcess
    EngineLink         ◄──── ZeroMQ over TCP ──────► EngineCoreProc

A machine joins with the ranks of its engine cores. Those that are started before it has come wait for it. Requests and outputs
pass between EngineLink and engine core as on one machine.
"""

import atexit
import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig
from jaxllm.engine.machine_wire import (
    BEAT_S,
    Beat,
    Connection,
    ConnectionLostError,
    End,
    Ended,
    FromMachine,
    Join,
    Kill,
    Leaving,
    Message,
    Refused,
    Start,
    Started,
    Welcome,
    comparable,
    differences,
    ranks_text,
    version,
)

if TYPE_CHECKING:
    from jaxllm.engine.core_proc import EngineCoreMain

logger = logging.getLogger(__name__)

# Between two lines of the log that say who is missing; twice as many each time, up to the second figure.
FIRST_REMINDER_S, LAST_REMINDER_S = 10.0, 300.0
KILL_S = 5.0
GOODBYE_S = 3.0
_BACKLOG = 128


def address_of_this_machine(name: str) -> str:
    """
    Raises:
        ValueError: naming it, if other machines could not connect there.
    """
    try:
        host = str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ValueError(f"data_parallel_address must be an IPv4 address or a host's name, got {name!r}: {error}") from error
    if host == "0.0.0.0":
        raise ValueError(f"data_parallel_address must be one address at which the other machines find this one, got {name!r}")
    return host


class RemoteEngineProcess:
    """What an EngineProcess is, of an engine core on a headless machine. Made by an EngineHub.

    Attributes:
        pid: on its machine; 0 until it was started.
    """

    def __init__(self, hub: "EngineHub", order: Start) -> None:
        self._hub = hub
        self.order = order
        self.pid = 0
        self._how = "has not ended"
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._link, self._other_end = socket.socketpair()

    def note_end(self, how: str) -> None:
        """The first that says how it ended is right."""
        with self._lock:
            if not self._ended.is_set():
                self._how = how
                self._other_end.close()
                self._ended.set()

    def fileno(self) -> int:
        """Becomes readable when the process has ended, or was lost with its machine."""
        return self._link.fileno()

    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds for the end, or for ever. Returns whether it came."""
        return self._ended.wait(timeout)

    def how_it_ended(self) -> str:
        return self._how if self._ended.wait(5.0) else "closed its side"

    def kill(self) -> None:
        """End it, whatever it does. A machine that does not do it in time is no more heard about it."""
        self._hub.kill(self)
        if not self._ended.wait(KILL_S):
            self.note_end("does not end")

    def close(self) -> None:
        """Give up this end; the process must have ended."""
        self._link.close()


class _Machine:
    def __init__(self, connection: Connection, ranks: range, where: str) -> None:
        self.connection = connection
        self.ranks = ranks
        self.where = where
        self.processes: dict[int, RemoteEngineProcess] = {}

    def start(self, process: RemoteEngineProcess) -> None:
        self.processes[process.order.process] = process
        self.connection.send(process.order)

    def __str__(self) -> str:
        return f"the machine at {self.where} ({ranks_text(self.ranks)})"


class EngineHub:
    """Listens at `data_parallel_address` and `data_parallel_rpc_port`, from `open` on.

    Raises:
        ValueError: if it cannot listen there.

    Attributes:
        host: the address, as engine cores are told it.
    """

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        self._config = config
        self._ranks = range(parallel.num_local_engines, parallel.data_parallel_size)
        self._timeout = parallel.worker_hang_timeout
        self.host = address_of_this_machine(parallel.data_parallel_address)
        self._where = f"{self.host}:{parallel.data_parallel_rpc_port}"
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # of the two tables, and of the order of what machines are told
        self._machines: dict[int, _Machine] = {}  # by rank
        self._waiting: dict[int, RemoteEngineProcess] = {}  # by rank, for their machine
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._listener = socket.socket()
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((self.host, parallel.data_parallel_rpc_port))
            self._listener.listen(_BACKLOG)
            self._listener.settimeout(BEAT_S)
        except OSError as error:
            self._listener.close()
            raise ValueError(
                f"cannot listen for headless machines at {self._where} (data_parallel_address, data_parallel_rpc_port): "
                f"{error.strerror}"
            ) from error
        self._acceptor = threading.Thread(target=self._accept, daemon=True, name="machines")
        self._pid = os.getpid()
        # After the engine cores, which are started later: an exiting interpreter says goodbye, too.
        atexit.register(self.close)

    def open(self) -> None:
        """Let machines in. After the first `start` of every rank, so that all are wanted that come."""
        self._acceptor.start()

    def start(self, main: "EngineCoreMain", name: str) -> RemoteEngineProcess:
        """Start an engine core on the machine that has its rank, once that is there."""
        assert main.coordinator is not None, name
        order = Start(next(self._ids), main.engine_index, main.front_ends, main.coordinator, main.log_stats)
        process = RemoteEngineProcess(self, order)
        with self._lock:
            machine = self._machines.get(order.rank)
            if machine is None:
                self._waiting[order.rank] = process
            else:
                machine.start(process)
        return process

    def kill(self, process: RemoteEngineProcess) -> None:
        """Have it ended, without waiting for that."""
        rank = process.order.rank
        with self._lock:
            if self._waiting.get(rank) is process:
                del self._waiting[rank]
                process.note_end("was not started: no machine had come for it")
            elif (machine := self._machines.get(rank)) is not None:
                machine.connection.send(Kill(process.order.process))

    def _accept(self) -> None:
        pause, next_reminder = FIRST_REMINDER_S, time.monotonic()
        while not self._closing.is_set():
            with self._lock:
                missing = sorted(self._waiting)
            if not missing:
                pause, next_reminder = FIRST_REMINDER_S, time.monotonic() + BEAT_S
            elif time.monotonic() >= next_reminder:
                logger.info("waiting for headless machines with %s to join at %s", ranks_text(missing), self._where)
                next_reminder, pause = time.monotonic() + pause, min(2 * pause, LAST_REMINDER_S)
            try:
                sock, (host, port) = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                logger.error("a headless machine cannot connect: %s", error)
                self._closing.wait(BEAT_S)
                continue
            where = f"{host}:{port}"
            thread = threading.Thread(target=self._serve, args=(sock, where), daemon=True, name=f"machine-{where}")
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            thread.start()

    def _serve(self, sock: socket.socket, where: str) -> None:
        """The thread of one machine, from when it connects until it is lost."""
        with contextlib.closing(Connection(sock, FromMachine, self._timeout)) as connection:
            try:
                machine = self._wait_for_join(connection, where)
            except ConnectionLostError as error:
                logger.warning("%s did not join as a machine: it %s", where, error)
                return
            try:
                while machine is not None:
                    for message in connection.receive(BEAT_S):
                        self._hear(machine, message)
            except ConnectionLostError as error:
                assert machine is not None
                self._lose(machine, str(error))

    def _wait_for_join(self, connection: Connection, where: str) -> _Machine | None:
        while not self._closing.is_set():
            for message in connection.receive(BEAT_S):
                if not isinstance(message, Join):
                    raise ConnectionLostError("did not say who it is")
                return self._let_in(connection, message, where)
        return None

    def _let_in(self, connection: Connection, join: Join, where: str) -> _Machine | None:
        """None if it is refused."""
        with self._lock:
            why = self._why_not(join)
            if why is not None:
                logger.error("the machine at %s is refused: %s", where, why)
                connection.send(Refused(why))
                return None
            ranks = range(join.start_rank, join.start_rank + join.num_engines)
            machine = _Machine(connection, ranks, where)
            self._machines.update(dict.fromkeys(ranks, machine))
            logger.info("%s has joined", machine)
            connection.send(Welcome())
            for rank in ranks:
                if (process := self._waiting.pop(rank, None)) is not None:
                    machine.start(process)
        return machine

    def _why_not(self, join: Join) -> str | None:
        if self._closing.is_set():
            return "the front end ends"
        if join.version != version():
            return f"it has jaxllm {join.version}, the front end {version()}"
        if different := differences(join.config, comparable(self._config)):
            return f"its configuration is not the front end's: {different}"
        first, stop = self._ranks.start, self._ranks.stop
        if join.num_engines < 1 or join.start_rank < first or join.start_rank + join.num_engines > stop:
            own = f"; the front end's own machine has {ranks_text(range(first))}" if first else ""
            return (
                f"data_parallel_start_rank {join.start_rank} and data_parallel_size_local {join.num_engines} must lie in "
                f"[{first}, {stop - 1}]{own}"
            )
        for rank in range(join.start_rank, join.start_rank + join.num_engines):
            if (owner := self._machines.get(rank)) is not None:
                return f"rank {rank} is there already, on {owner}"
            if rank not in self._waiting and not self._config.parallel.data_parallel_restart:
                return f"rank {rank} was lost, and without data_parallel_restart it is not started again"
        return None

    def _hear(self, machine: _Machine, message: Message) -> None:
        if isinstance(message, Beat):
            machine.connection.send(message)
        elif isinstance(message, Started):
            if (process := machine.processes.get(message.process)) is not None:
                process.pid = message.pid
        elif isinstance(message, Ended):
            if (process := machine.processes.pop(message.process, None)) is not None:
                process.note_end(message.how)
        elif isinstance(message, Leaving):
            raise ConnectionLostError(message.why)

    def _lose(self, machine: _Machine, why: str) -> None:
        with self._lock:
            for rank in machine.ranks:
                del self._machines[rank]
            lost = list(machine.processes.values())
        if not self._closing.is_set():
            logger.error("%s is lost: it %s", machine, why)
        for process in lost:
            process.note_end(f"was lost with its machine, {machine.where}, which {why}")

    def close(self) -> None:
        """Let the machines go, whose engine cores have ended. May be called more than once."""
        if os.getpid() != self._pid:
            return  # a fork of the front end has no say in it
        atexit.unregister(self.close)
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            machines = set(self._machines.values())
            for machine in machines:
                machine.connection.send(End())
        if self._acceptor.ident is not None:
            self._acceptor.join()
        self._listener.close()
        deadline = time.monotonic() + GOODBYE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for machine in machines:
            machine.connection.cut()
        for thread in self._threads:
            thread.join()
