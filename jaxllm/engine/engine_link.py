"""EngineLink: a front end's side of an engine core in a process of its own.

It binds two sockets in a private folder: requests and calls go out through one, outputs come in through the other. One thread
waits for outputs and for the end of the engine's process, so that its death is noticed at once, whatever else happens.
"""

import asyncio
import atexit
import itertools
import logging
import os
import pickle
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from jaxllm.config import EngineConfig
from jaxllm.core.types import EngineCoreOutputs
from jaxllm.engine.core_proc import Addresses, EngineCoreMain, InputType, OutputType
from jaxllm.engine.engine_hub import EngineHub, RemoteEngineProcess
from jaxllm.engine.engine_process import EngineProcess
from jaxllm.engine.errors import EngineDeadError, EngineStartError
from jaxllm.engine.ray_process import RayEngineProcess, RayPlacement
from jaxllm.engine.serial import CallFailure, Frames, decode_outputs, decode_value, encode_value
from jaxllm.executor.abstract import Executor

logger = logging.getLogger(__name__)

# Beyond the time to drain, for the workers to free their devices.
EXIT_GRACE_S = 10.0
# What a process sent before it ended may still be on its way through this process's own threads.
LAST_WORDS_MS = 200
_LONGEST_SOCKET_PATH = 100

Put = Callable[[EngineCoreOutputs | EngineDeadError], None]


def socket_folder() -> str:
    """A folder that only this user can enter, with a path short enough for the name of a socket."""
    folder = tempfile.mkdtemp(prefix="jaxllm-")
    if len(folder) > _LONGEST_SOCKET_PATH - len("/outputs"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="jaxllm-", dir="/tmp")
    return folder


class EngineLink:
    """A started engine core: its process, the sockets, and the thread that receives. `wait_until_ready` comes first.

    Args:
        put: gets, from the receiving thread, every EngineCoreOutputs that answers no call, and in the end an EngineDeadError.
        engine_index, coordinator: for one of several; see EngineCoreMain.
        environment: variables of the process.
        placement: to start it elsewhere, as a Ray actor or on a headless machine; its sockets are then on TCP.
        other_front_ends: that the engine core serves too, by client index; this one comes after them.

    Raises:
        ValueError: if the executor class cannot be found by another process.

    Attributes:
        description: what the engine core says of itself when it is ready.
        death: why nothing more can be sent; None while the engine core lives.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
        put: Put,
        *,
        engine_index: int = 0,
        coordinator: str | None = None,
        environment: Mapping[str, str] | None = None,
        placement: RayPlacement | EngineHub | None = None,
        other_front_ends: Sequence[Addresses] = (),
    ) -> None:
        _check_importable(executor_class)
        self._prepare(put, "the engine core" if coordinator is None else f"engine core {engine_index}")
        self._folder = socket_folder()
        try:
            addresses = Addresses(f"ipc://{self._folder}/inputs", f"ipc://{self._folder}/outputs")
            if placement is not None:
                addresses = Addresses(*[f"tcp://{placement.host}:*"] * 2)
            self._bind_both(addresses)
            addresses = Addresses(*(sock.getsockopt_string(zmq.LAST_ENDPOINT) for sock in (self._inputs, self._outputs)))
            level = logging.getLogger().getEffectiveLevel()
            front_ends = (*other_front_ends, addresses)
            main = EngineCoreMain(
                config, executor_class, log_stats, front_ends, self._pid, self._folder, level, engine_index, coordinator
            )
            name = "engine-core" if coordinator is None else f"engine-core-{engine_index}"
            self.process: EngineProcess | RayEngineProcess | RemoteEngineProcess = (
                EngineProcess(main, name, environment) if placement is None else placement.start(main, name)
            )
        except BaseException:
            self._clean_up()
            raise
        # Whatever happens to the client: an exiting interpreter must leave no process behind.
        atexit.register(self.close)

    def _prepare(self, put: Put, owner: str) -> None:
        self._put = put
        self._owner = owner
        self.description: dict[str, Any] = {}
        self.death: EngineDeadError | None = None
        self._lock = threading.Lock()  # of the sending socket, and of `_calls` together with `death`
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._closed = self._is_asked_to_end = False
        self._identity = b""
        self._receiver: threading.Thread | None = None
        self._pid = os.getpid()
        self._context = zmq.Context()

    def _bind_both(self, addresses: Addresses) -> None:
        self._inputs = self._bind(zmq.ROUTER, addresses.inputs)
        self._outputs = self._bind(zmq.PULL, addresses.outputs)

    def _clean_up(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _bind(self, kind: int, address: str) -> zmq.Socket:
        sock = self._context.socket(kind)
        # Without bound: nobody blocks because the other is slow. What waits is at most what the requests in flight give.
        sock.sndhwm = sock.rcvhwm = 0
        sock.linger = 0
        sock.bind(address)
        return sock

    def wait_until_ready(self) -> None:
        """If the engine core does not become ready, its process is ended.

        Raises:
            ValueError: as EngineCore does, for a configuration that does not fit.
            EngineStartError: if the process ended before it was ready, with the reason.
        """
        try:
            self._identity, self.description = self._receive_ready()
        except BaseException:
            self.close()
            raise
        self._receiver = threading.Thread(target=self._receive, daemon=True, name="engine-outputs")
        self._receiver.start()

    def _receive_ready(self) -> tuple[bytes, dict[str, Any]]:
        poller = zmq.Poller()
        for end in (self._inputs, self._outputs, self.process.fileno()):
            poller.register(end, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._inputs in ready:
                identity, kind, *frames = self._inputs.recv_multipart()
                assert kind == OutputType.READY, kind
                return identity, decode_value(frames)
            if self._outputs in ready or self._outputs.poll(LAST_WORDS_MS):
                kind, *frames = self._outputs.recv_multipart()
                assert kind == OutputType.START_FAILED, kind
                failure = decode_value(frames)
                if isinstance(failure.to_exception(), ValueError):
                    raise failure.to_exception()
                raise EngineStartError(f"{self._process_name} cannot start: {failure.kind}: {failure.message}")
            raise EngineStartError(f"{self._process_name} {self.process.how_it_ended()} before it was ready; see its output")

    @property
    def _process_name(self) -> str:
        return f"{self._owner}'s process"

    def send(self, kind: InputType, frames: Frames) -> None:
        """Does not block. Raises EngineDeadError if there is nobody to send to."""
        with self._lock:
            self.check_alive()
            self._send(kind, frames)

    def _send(self, kind: InputType, frames: Frames) -> None:
        self._inputs.send_multipart([self._identity, kind, *frames], copy=False)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored. A dead engine core has none."""
        if self.death is None:
            try:
                self.send(InputType.ABORT, encode_value(list(request_ids)))
            except EngineDeadError:
                return  # it has died since

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the engine core, in turn with what was sent before.

        Returns:
            Its result, or what it raised, or EngineDeadError.

        Raises:
            TypeError: if an argument cannot be sent.
            EngineDeadError: if there is nobody to call.
        """
        call_id = next(self._call_ids)
        frames = encode_value((call_id, method, args))
        future: Future[Any] = Future()
        with self._lock:
            self.check_alive()
            self._calls[call_id] = future
            self._send(InputType.CALL, frames)
        return future

    def check_alive(self) -> None:
        if self.death is not None:
            # A new one each time: a traceback grows on whatever is raised.
            raise EngineDeadError(str(self.death))

    def _receive(self) -> None:
        """The receiving thread: until the process ends or says that its engine core has."""
        try:
            death = self._receive_until_death()
        except Exception as error:
            logger.exception("outputs of %s cannot be read", self._owner)
            self.process.kill()
            death = EngineDeadError(f"outputs of {self._owner} cannot be read: {error!r}")
        with self._lock:
            self.death = death
            calls, self._calls = self._calls, {}
        for future in calls.values():
            _settle(future, CallFailure.of(death))
        self._put(death)

    def _receive_until_death(self) -> EngineDeadError:
        poller = zmq.Poller()
        poller.register(self._outputs, zmq.POLLIN)
        poller.register(self.process.fileno(), zmq.POLLIN)
        while True:
            if self._outputs not in dict(poller.poll()) and not self._outputs.poll(LAST_WORDS_MS):
                if self._is_asked_to_end:
                    return EngineDeadError("the engine was shut down")
                return EngineDeadError(f"{self._process_name} {self.process.how_it_ended()}")
            kind, *frames = self._outputs.recv_multipart(copy=False)
            if kind.bytes == OutputType.START_FAILED:
                continue  # said of one before this
            if kind.bytes == OutputType.DEAD:
                if len(frames) > 1 and int(frames[1].bytes) != self.description["pid"]:
                    continue  # likewise
                return EngineDeadError(frames[0].bytes.decode())
            outputs = decode_outputs([frame.buffer for frame in frames])
            if outputs.utility_result is None:
                self._put(outputs)
                continue
            call_id, result = outputs.utility_result
            with self._lock:
                future = self._calls.pop(call_id)
            _settle(future, result)

    def ask_to_end(self, drain_timeout: float = 0.0) -> None:
        """Begin what `close` does, and do not wait. For the first of several that end."""
        with self._lock:
            if self._is_asked_to_end:
                return
            self._is_asked_to_end = True
            if self.death is None and self._receiver is not None:
                self._send(InputType.SHUTDOWN, encode_value(drain_timeout))

    def close(self, drain_timeout: float = 0.0) -> None:
        """End the process; one that is not ready yet is killed.

        May be called more than once, from any thread but the receiving one.

        Args:
            drain_timeout: seconds in which unfinished requests may run to their end; what is left is aborted.
        """
        if os.getpid() != self._pid:
            return  # a fork of the front end has no say in it
        self.ask_to_end(drain_timeout)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        try:
            if self._receiver is not None and not self.process.wait(drain_timeout + EXIT_GRACE_S):
                logger.warning("%s %d does not end; it is killed", self._process_name, self.process.pid)
        finally:  # also when an interrupt comes meanwhile
            if not self.process.has_ended():
                self.process.kill()
            if self._receiver is not None:
                self._receiver.join()
            self.process.close()
            self._clean_up()


def _check_importable(executor_class: type[Executor] | None) -> None:
    if executor_class is None:
        return
    try:
        pickle.dumps(executor_class)
        importable = executor_class.__module__ != "__main__"
    except (pickle.PicklingError, AttributeError):
        importable = False
    if not importable:
        raise ValueError(f"executor_class must be importable by another process, got {executor_class!r} of no module")


def _settle(future: Future[Any], result: Any) -> None:
    """Give a call its result, unless whoever waited for it has given up."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(result, CallFailure):
        future.set_exception(result.to_exception())
    else:
        future.set_result(result)


class Mailbox[T]:
    """What other threads have put there for an event loop. Which one that is may change."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """From any thread."""
        self.items.append(item)
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._set_waiter)
        except RuntimeError:
            logger.debug("the event loop is closed; the next one that asks finds the output")

    def _set_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def first(self) -> T:
        """The oldest item, which stays, waiting for one. For one caller at a time."""
        self._loop = asyncio.get_running_loop()
        while not self.items:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self.items[0]
