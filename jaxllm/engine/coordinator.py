"""DPCoordinator: the load of every engine core, to every front end.

    engine cores --PUSH--> coordinator --PUB--> front ends

It keeps nothing that it could not be told again: if its process dies another one takes its place, and until it has heard of an
engine core it says nothing of it. Requests never pass through it.
"""

import contextlib
import faulthandler
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import zmq

from jaxllm.engine.engine_process import EngineProcess, wait_for_parent

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL_S = 0.1
# Before another coordinator is started in the place of one that died at once.
RESTART_DELAY_S = 1.0


class EngineLoad(NamedTuple):
    """What an engine core says of itself.

    Attributes:
        kv_cache_usage: the share of its blocks in use, in [0, 1].
    """

    engine_index: int
    waiting: int
    running: int
    kv_cache_usage: float


Snapshot = list[EngineLoad | None]  # by engine index; None of those that have said nothing yet

encode_load = msgspec.msgpack.Encoder().encode
_decode_load = msgspec.msgpack.Decoder(EngineLoad).decode
_decode_snapshot = msgspec.msgpack.Decoder(Snapshot).decode


class CoordinatorAddresses(NamedTuple):
    """What the coordinator binds: PULL for `loads`, PUB for `snapshots`."""

    loads: str
    snapshots: str


def connect_to_coordinator(context: zmq.Context, loads: str) -> zmq.Socket:
    """Where an engine core puts its loads. Only the last one waits if nobody takes them, and putting one never blocks."""
    sock = context.socket(zmq.PUSH)
    sock.conflate = True
    sock.linger = 0
    sock.connect(loads)
    return sock


class DPCoordinator:
    """Takes loads, and publishes all of them every PUBLISH_INTERVAL_S seconds if any came."""

    def __init__(self, addresses: CoordinatorAddresses, num_engines: int) -> None:
        self.snapshot: Snapshot = [None] * num_engines
        self._context = zmq.Context()
        self._loads = self._context.socket(zmq.PULL)
        self._loads.bind(addresses.loads)
        # XPUB says when a front end comes, which would else not hear of the engine cores before one of them changes.
        self._snapshots = self._context.socket(zmq.XPUB)
        self._snapshots.linger = 0
        self._snapshots.bind(addresses.snapshots)

    def run(self) -> None:
        """Never returns."""
        poller = zmq.Poller()
        poller.register(self._loads, zmq.POLLIN)
        poller.register(self._snapshots, zmq.POLLIN)
        next_time, is_due = 0.0, False
        while True:
            wait = max(0.0, next_time - time.monotonic()) if is_due else None
            ready = dict(poller.poll(None if wait is None else 1000 * wait))
            if self._loads in ready:
                load = _decode_load(self._loads.recv())
                # There may be more engine cores than there were.
                self.snapshot += [None] * (load.engine_index + 1 - len(self.snapshot))
                self.snapshot[load.engine_index] = load
                is_due = True
            if self._snapshots in ready:
                self._snapshots.recv()
                is_due = True
            if is_due and time.monotonic() >= next_time:
                self._snapshots.send(encode_load(self.snapshot))
                next_time, is_due = time.monotonic() + PUBLISH_INTERVAL_S, False


@dataclass(frozen=True)
class CoordinatorMain:
    """All that a new process needs to become a coordinator.

    Attributes:
        folder: of the sockets; removed if the parent cannot do it any more.
    """

    addresses: CoordinatorAddresses
    num_engines: int
    parent_pid: int
    folder: str

    def __call__(self, link: socket.socket) -> None:
        faulthandler.enable()
        threading.Thread(target=self._end_with_parent, args=(link,), daemon=True, name="parent-watch").start()
        DPCoordinator(self.addresses, self.num_engines).run()

    def _end_with_parent(self, link: socket.socket) -> None:
        wait_for_parent(link, self.parent_pid)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)


class CoordinatorProcess:
    """A coordinator in a process of its own; another one if it dies.

    Args:
        host: the address of this machine at which engine cores of other machines reach it; None if there are none.

    Attributes:
        process: the one that runs now.
    """

    def __init__(self, folder: str, num_engines: int, host: str | None = None) -> None:
        loads = f"ipc://{folder}/loads" if host is None else f"tcp://{host}:{free_ports(host, 1)[0]}"
        self.addresses = CoordinatorAddresses(loads, f"ipc://{folder}/snapshots")
        self._main = CoordinatorMain(self.addresses, num_engines, os.getpid(), folder)
        self._lock = threading.Lock()  # of `process` together with `_closed`
        self._closed = threading.Event()
        self.process = self._start()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="coordinator-watch")
        self._watcher.start()

    def _start(self) -> EngineProcess:
        return EngineProcess(self._main, "coordinator")

    def _watch(self) -> None:
        while True:
            self.process.wait(None)
            with self._lock:
                if self._closed.is_set():
                    return
            logger.error("the coordinator %s; another one is started", self.process.how_it_ended())
            self.process.close()
            self._closed.wait(RESTART_DELAY_S)
            with self._lock:
                if self._closed.is_set():
                    return
                self.process = self._start()

    def close(self) -> None:
        """End it. May be called more than once."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self.process.kill()
        self._watcher.join()
        self.process.close()


def free_ports(host: str, count: int) -> list[int]:
    """Ports of this machine's address `host` that nobody uses now."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind((host, 0))
        return [sock.getsockname()[1] for sock in socks]


class SnapshotListener:
    """A front end's ear for the coordinator: a thread that hands each snapshot to `put`."""

    def __init__(self, address: str, put: Callable[[Snapshot], None]) -> None:
        self._context = zmq.Context()
        self._sock = self._context.socket(zmq.SUB)
        self._sock.conflate = True  # only the last one counts
        self._sock.linger = 0
        self._sock.subscribe(b"")
        self._sock.connect(address)
        self._put = put
        self._wake_up, self._end = os.pipe()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="snapshots")
        self._thread.start()

    def _listen(self) -> None:
        poller = zmq.Poller()
        poller.register(self._sock, zmq.POLLIN)
        poller.register(self._wake_up, zmq.POLLIN)
        while self._wake_up not in (ready := dict(poller.poll())):
            if self._sock in ready:
                self._put(_decode_snapshot(self._sock.recv()))

    def close(self) -> None:
        """May be called once."""
        os.write(self._end, b"\0")
        self._thread.join()
        os.close(self._end)
        os.close(self._wake_up)
        self._context.destroy(linger=0)
