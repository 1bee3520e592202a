"""Workers on several machines: the machine of node rank 0 runs the engine, on the others the workers are alone.

    node 0                                       node k
    commands (PUB, master_port + 1)           →  subscribes; tells its own workers through their queue
    ROUTER (master_port)                      ←  who it is, answers, heartbeats, a worker's end
                                              →  where to find the others, heartbeats

Nothing is sent before every node has subscribed, so none misses a command. Frames cross as they are. Whoever can reach the ports
can take part: they belong on a network of the machines' own.
"""

import dataclasses
import hashlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import msgspec
import zmq

from jaxllm.config import EngineConfig
from jaxllm.executor.shm_queue import Frames
from jaxllm.executor.worker_group import WorkerGoneError, WorkerGroup
from jaxllm.executor.worker_main import MakeWorker, make_worker
from jaxllm.parallel_config import ParallelConfig
from jaxllm.worker.place import WorkerPlace

logger = logging.getLogger(__name__)

BEAT_S = 0.5
# What a node says to node 0: itself, that it has subscribed, that it lives, an answer, and that a worker has ended.
HELLO, READY, BEAT, ANSWER, GONE = b"hello", b"ready", b"beat", b"answer", b"gone"
# What node 0 says to it.
WELCOME, REFUSED = b"welcome", b"refused"
# The topics of what it publishes.
_PROBE, _COMMAND, _SERVING, _END = b"p", b"c", b"s", b"e"


def local_places(parallel: ParallelConfig, coordinator: str) -> list[WorkerPlace]:
    """Of the workers of this machine."""
    first = parallel.node_rank * parallel.num_local_workers
    return [
        WorkerPlace(first + i, i, parallel.num_workers, parallel.devices_per_worker, coordinator)
        for i in range(parallel.num_local_workers)
    ]


def _digest(config: EngineConfig) -> str:
    """Of what must be the same on all machines. Folders need not be."""
    model, parallel = config.model, dataclasses.replace(config.parallel, node_rank=0, master_addr="")
    of_model = (model.decoder, model.dtype, model.max_model_len, model.max_logprobs, model.logprobs_mode, model.seed)
    sizes = (config.cudagraph_capture_sizes, config.compile_sizes, config.attention_backend, config.matmul_backend)
    return hashlib.sha256(repr((of_model, config.cache, config.scheduler, parallel, sizes)).encode()).hexdigest()


class NodesGroup(WorkerGroup):
    """On node 0: the workers of all machines as one group, by rank. Waits until all machines are there.

    Raises:
        ValueError: if another machine has another configuration.
        OSError: if the ports are in use.
    """

    def __init__(self, make_worker: MakeWorker, config: EngineConfig) -> None:
        parallel = config.parallel
        self._parallel = parallel
        self._digest = _digest(config)
        self._coordinator = f"{parallel.master_addr}:{parallel.master_port + 2}"
        self._heard: queue.SimpleQueue[tuple[int, list[bytes]]] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._over = threading.Event()
        self._context = zmq.Context()
        try:
            self._router, self._publisher = self._context.socket(zmq.ROUTER), self._context.socket(zmq.PUB)
            for sock, port in ((self._router, parallel.master_port), (self._publisher, parallel.master_port + 1)):
                sock.linger = 1000
                sock.sndhwm = sock.rcvhwm = 0  # nothing is dropped
                _bind(sock, parallel.master_addr, port)
            # The workers' heartbeats, and those of machines, start with the workers: a machine may come long after this one.
            self._wait_for_nodes()
        except BaseException:
            self._close()
            raise
        super().__init__(make_worker, config, local_places(parallel, self._coordinator), parallel.worker_hang_timeout)
        self._thread = threading.Thread(target=self._receive, daemon=True, name="nodes")
        self._thread.start()

    @property
    def num_workers(self) -> int:
        return self._parallel.num_workers

    def name(self, index: int) -> str:
        if index < len(self.places):
            return super().name(index)
        return f"worker {index} of node {index // self._parallel.num_local_workers}"

    def _wait_for_nodes(self) -> None:
        """Until every machine has said who it is and has received something that was published."""
        others = set(range(1, self._parallel.nnodes))
        ready: set[int] = set()
        self._identities: dict[bytes, int] = {}
        if others:
            logger.info("waiting for %d more machines at port %d", len(others), self._parallel.master_port)
        while ready != others:
            self._publisher.send_multipart([_PROBE])
            while self._router.poll(50):
                identity, kind, *frames = self._router.recv_multipart()
                if kind == HELLO:
                    self._greet(identity, *msgspec.msgpack.decode(frames[0]))
                elif kind == READY and identity in self._identities:
                    ready.add(self._identities[identity])

    def _greet(self, identity: bytes, node_rank: int, digest: str) -> None:
        why = None
        if digest != self._digest:
            why = f"node {node_rank} has another configuration than node 0: all arguments but node_rank must be the same"
        elif not 0 < node_rank < self._parallel.nnodes or node_rank in self._identities.values():
            why = f"there is a node {node_rank} already"
        if why is not None:
            self._router.send_multipart([identity, REFUSED, why.encode()])
            raise ValueError(why)
        self._identities[identity] = node_rank
        self._router.send_multipart([identity, WELCOME, self._coordinator.encode()])

    def _receive(self) -> None:
        """The thread that has the ROUTER, from when all machines are there."""
        last = dict.fromkeys(self._identities, time.monotonic())
        beaten = 0.0
        while not self._over.is_set():
            now = time.monotonic()
            if now - beaten >= BEAT_S:
                beaten = now
                for identity, seen in last.items():
                    self._router.send_multipart([identity, BEAT])
                    if now - seen > self._parallel.worker_hang_timeout:
                        self.fail(f"node {self._identities[identity]} has not been heard of for {now - seen:.0f} s")
                        _wake(self._ring)
            if self._router.poll(1000 * BEAT_S):
                identity, kind, *frames = self._router.recv_multipart()
                if identity not in last:
                    continue
                last[identity] = time.monotonic()
                if kind == ANSWER:
                    rank, *answer = frames
                    self._heard.put((int.from_bytes(rank, "little"), answer))
                    _wake(self._ring)
                elif kind == GONE:
                    self.fail(f"node {self._identities[identity]}: {frames[0].decode()}")
                    _wake(self._ring)

    def start_serving(self) -> None:
        super().start_serving()
        self._publisher.send_multipart([_SERVING])

    def tell(self, frames: Frames, timeout: float) -> None:
        self.check()
        self._publisher.send_multipart([_COMMAND, *frames], copy=True)
        super().tell(frames, timeout)

    def hear(self, timeout: float, fds: Iterable[int] = ()) -> list[tuple[int, Any]]:
        if (heard := self._from_others()) or (heard := super().hear(timeout, [*fds, self._bell.fileno()])):
            return heard
        return self._from_others()

    def _from_others(self) -> list[tuple[int, Any]]:
        try:
            while self._bell.recv(4096):
                pass
        except BlockingIOError:
            pass
        heard = []
        while not self._heard.empty():
            heard.append(self._heard.get())
        return heard

    def end(self, at_once: bool = False) -> None:
        if self._over.is_set():
            return
        self._over.set()
        self._publisher.send_multipart([_END + b"!" if at_once or self.failure is not None else _END])
        super().end(at_once)
        self._thread.join()
        self._close()

    def _close(self) -> None:
        self._context.destroy(linger=1000)
        self._bell.close()
        self._ring.close()


def _bind(sock: zmq.Socket, address: str, port: int) -> None:
    try:
        sock.bind(f"tcp://{address}:{port}")
    except zmq.ZMQError as error:
        raise OSError(f"cannot listen at {address}:{port}: {error}") from error


def _wake(sock: socket.socket) -> None:
    try:
        sock.send(b"\0")
    except BlockingIOError:
        return  # it is awake


def run_node(config: EngineConfig, make_worker: MakeWorker = make_worker) -> None:
    """On a machine of node rank 1 or more: run its workers until node 0 ends.

    Raises:
        ValueError: if node 0 has another configuration.
        WorkerGoneError: if a worker ends or hangs, or node 0 is not heard of any more.
    """
    parallel = config.parallel
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        dealer = stack.enter_context(context.socket(zmq.DEALER))
        commands = stack.enter_context(context.socket(zmq.SUB))
        for sock, port in ((dealer, parallel.master_port), (commands, parallel.master_port + 1)):
            sock.linger = 1000
            sock.sndhwm = sock.rcvhwm = 0
            sock.connect(f"tcp://{parallel.master_addr}:{port}")
        commands.subscribe(b"")
        coordinator = _join(dealer, commands, config)
        group = WorkerGroup(make_worker, config, local_places(parallel, coordinator), parallel.worker_hang_timeout)
        _Node(group, dealer, commands, parallel).run()


def _join(dealer: zmq.Socket, commands: zmq.Socket, config: EngineConfig) -> str:
    """Returns where the workers find each other."""
    parallel = config.parallel
    logger.info("waiting for node 0 at %s:%d", parallel.master_addr, parallel.master_port)
    dealer.send_multipart([HELLO, msgspec.msgpack.encode((parallel.node_rank, _digest(config)))])
    kind, text = dealer.recv_multipart()
    if kind == REFUSED:
        raise ValueError(text.decode())
    commands.recv_multipart()  # a probe: from now on nothing is missed
    dealer.send_multipart([READY])
    return text.decode()


class _Node:
    """Between node 0 and the workers of this machine."""

    def __init__(self, group: WorkerGroup, dealer: zmq.Socket, commands: zmq.Socket, parallel: ParallelConfig) -> None:
        self._group, self._dealer, self._commands, self._parallel = group, dealer, commands, parallel
        self._last_heard = self._last_beat = time.monotonic()

    def run(self) -> None:
        fds = [sock.getsockopt(zmq.FD) for sock in (self._dealer, self._commands)]
        first = self._group.places[0].rank
        try:
            # All that has come is taken before waiting: these descriptors tell of a change only.
            while self._take_commands() and self._take_beats():
                for index, frames in self._group.hear(BEAT_S, fds):
                    self._dealer.send_multipart([ANSWER, (first + index).to_bytes(4, "little"), *frames])
        except WorkerGoneError as error:
            self._dealer.send_multipart([GONE, str(error).encode()])
            raise
        finally:
            self._group.end()

    def _take_commands(self) -> bool:
        """False when node 0 has ended."""
        while self._commands.poll(0):
            topic, *frames = self._commands.recv_multipart()
            if topic == _COMMAND:
                self._group.tell(frames, self._parallel.execute_model_timeout)
            elif topic == _SERVING:
                self._group.start_serving()
            elif topic.startswith(_END):
                if topic != _END:
                    raise self._group.fail("node 0 has failed")
                return False
        return True

    def _take_beats(self) -> bool:
        now = time.monotonic()
        while self._dealer.poll(0):
            self._dealer.recv_multipart()
            self._last_heard = now
        if now - self._last_beat >= BEAT_S:
            self._last_beat = now
            self._dealer.send_multipart([BEAT])
        if now - self._last_heard > self._parallel.worker_hang_timeout:
            raise self._group.fail(f"node 0 has not been heard of for {now - self._last_heard:.0f} s")
        return True
