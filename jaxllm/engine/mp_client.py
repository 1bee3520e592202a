"""SyncMPClient and AsyncMPClient: an engine core in a process of its own.

A front end binds two sockets in a private folder: requests and calls go out through one, outputs come in through the other. One
thread waits for outputs and for the end of the engine's process, so that its death is noticed at once, whatever else happens.
"""

import asyncio
import atexit
import itertools
import logging
import os
import pickle
import queue
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from jaxllm.config import EngineConfig
from jaxllm.core.types import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from jaxllm.engine.core import PauseMode
from jaxllm.engine.core_client import EngineCoreClient
from jaxllm.engine.core_proc import Addresses, EngineCoreMain, InputType, OutputType
from jaxllm.engine.engine_process import EngineProcess
from jaxllm.engine.errors import EngineDeadError, EngineStartError
from jaxllm.engine.serial import (
    CallFailure,
    Frames,
    decode_outputs,
    decode_value,
    encode_request,
    encode_value,
)
from jaxllm.executor.abstract import Executor

logger = logging.getLogger(__name__)

# Beyond the time to drain, for the workers to free their devices.
EXIT_GRACE_S = 10.0
# What a process sent before it ended may still be on its way through this process's own threads.
LAST_WORDS_MS = 200
_LONGEST_SOCKET_PATH = 100

Put = Callable[[EngineCoreOutputs | EngineDeadError], None]


def _socket_folder() -> str:
    """A folder that only this user can enter, with a path short enough for the name of a socket."""
    folder = tempfile.mkdtemp(prefix="jaxllm-")
    if len(folder) > _LONGEST_SOCKET_PATH - len("/outputs"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="jaxllm-", dir="/tmp")
    return folder


class EngineLink:
    """A started engine core: its process, the sockets, and the thread that receives.

    Args:
        put: gets, from the receiving thread, every EngineCoreOutputs that answers no call, and in the end an EngineDeadError.

    Raises:
        ValueError: as EngineCore does, for a configuration that does not fit.
        EngineStartError: if the process ended before it was ready, with the reason.

    Attributes:
        description: what the engine core says of itself when it is ready.
        death: why nothing more can be sent; None while the engine core lives.
    """

    def __init__(self, config: EngineConfig, executor_class: type[Executor] | None, log_stats: bool, put: Put) -> None:
        _check_importable(executor_class)
        self._put = put
        self.death: EngineDeadError | None = None
        self._lock = threading.Lock()  # of the sending socket, and of `_calls` together with `death`
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._closed = False
        self._pid = os.getpid()
        self._folder = _socket_folder()
        self._context = zmq.Context()
        try:
            addresses = Addresses(f"ipc://{self._folder}/inputs", f"ipc://{self._folder}/outputs")
            self._inputs = self._bind(zmq.ROUTER, addresses.inputs)
            self._outputs = self._bind(zmq.PULL, addresses.outputs)
            level = logging.getLogger().getEffectiveLevel()
            self.process = EngineProcess(
                EngineCoreMain(config, executor_class, log_stats, (addresses,), self._pid, self._folder, level)
            )
            try:
                self._identity, self.description = self._wait_until_ready()
            except BaseException:
                self.process.kill()
                self.process.close()
                raise
        except BaseException:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._receiver = threading.Thread(target=self._receive, daemon=True, name="engine-outputs")
        self._receiver.start()
        # Whatever happens to the client: an exiting interpreter must leave no process behind.
        atexit.register(self.close)

    def _bind(self, kind: int, address: str) -> zmq.Socket:
        sock = self._context.socket(kind)
        # Without bound: nobody blocks because the other is slow. What waits is at most what the requests in flight give.
        sock.sndhwm = sock.rcvhwm = 0
        sock.linger = 0
        sock.bind(address)
        return sock

    def _wait_until_ready(self) -> tuple[bytes, dict[str, Any]]:
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
                raise EngineStartError(f"the engine core's process cannot start: {failure.kind}: {failure.message}")
            raise EngineStartError(f"the engine core's process {self.process.how_it_ended()} before it was ready; see its output")

    def send(self, kind: InputType, frames: Frames) -> None:
        """Does not block. Raises EngineDeadError if there is nobody to send to."""
        with self._lock:
            self.check_alive()
            self._send(kind, frames)

    def _send(self, kind: InputType, frames: Frames) -> None:
        self._inputs.send_multipart([self._identity, kind, *frames], copy=False)

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
            logger.exception("outputs of the engine core cannot be read")
            self.process.kill()
            death = EngineDeadError(f"outputs of the engine core cannot be read: {error!r}")
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
                if self._closed:
                    return EngineDeadError("the engine was shut down")
                return EngineDeadError(f"the engine core's process {self.process.how_it_ended()}")
            kind, *frames = self._outputs.recv_multipart(copy=False)
            if kind.bytes == OutputType.DEAD:
                return EngineDeadError(frames[0].bytes.decode())
            outputs = decode_outputs([frame.buffer for frame in frames])
            if outputs.utility_result is None:
                self._put(outputs)
                continue
            call_id, result = outputs.utility_result
            with self._lock:
                future = self._calls.pop(call_id)
            _settle(future, result)

    def close(self, drain_timeout: float = 0.0) -> None:
        """End the process. May be called more than once, from any thread but the receiving one.

        Args:
            drain_timeout: seconds in which unfinished requests may run to their end; what is left is aborted.
        """
        if os.getpid() != self._pid:
            return  # a fork of the front end has no say in it
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self.death is None:
                self._send(InputType.SHUTDOWN, encode_value(drain_timeout))
        atexit.unregister(self.close)
        try:
            if not self.process.wait(drain_timeout + EXIT_GRACE_S):
                logger.warning("the engine core's process %d does not end; it is killed", self.process.pid)
        finally:  # also when an interrupt comes meanwhile
            if not self.process.has_ended():
                self.process.kill()
            self._receiver.join()
            self.process.close()
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)


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


class MPClient:
    """What both clients have in common.

    Raises:
        As EngineLink.
    """

    def __init__(self, config: EngineConfig, executor_class: type[Executor] | None, log_stats: bool, put: Put) -> None:
        self._link = EngineLink(config, executor_class, log_stats, put)
        # The receiving thread holds the link, not the client: a client that is forgotten ends its process. In a thread of its
        # own, since the collector may find it in any thread, the receiving one included.
        closer = threading.Thread(target=self._link.close, name="engine-close")
        weakref.finalize(self, closer.start).atexit = False

    @property
    def num_gpu_blocks(self) -> int:
        return self._link.description["num_gpu_blocks"]

    @property
    def pid(self) -> int:
        """Of the engine core's process."""
        return self._link.process.pid

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine core is dead; None while it lives."""
        return self._link.death

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. One that the engine core refuses ends with an error."""
        self._link.send(InputType.ADD, encode_request(request))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored. A dead engine core has none."""
        if request_ids and self._link.death is None:
            try:
                self._link.send(InputType.ABORT, encode_value(list(request_ids)))
            except EngineDeadError:
                return  # it has died since

    def shutdown(self, drain_timeout: float = 0.0) -> None:
        """End the engine core and its process. May be called more than once.

        Args:
            drain_timeout: seconds in which unfinished requests may run to their end.
        """
        self._link.close(drain_timeout)


class SyncMPClient(MPClient, EngineCoreClient):
    """For a front end without an event loop. The engine core steps by itself; `get_output` waits for what it gives."""

    def __init__(self, config: EngineConfig, executor_class: type[Executor] | None, log_stats: bool) -> None:
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | EngineDeadError] = queue.SimpleQueue()
        self._unfinished: set[str] = set()
        super().__init__(config, executor_class, log_stats, self._outputs.put)

    def get_output(self) -> EngineCoreOutputs:
        try:
            # Without an unfinished request there may never be another output.
            outputs = self._outputs.get(block=bool(self._unfinished))
        except queue.Empty:
            return EngineCoreOutputs()
        if isinstance(outputs, EngineDeadError):
            self._outputs.put(outputs)  # for the next call
            self._link.check_alive()
            raise AssertionError("an engine core that is dead has a death")
        self._unfinished -= outputs.finished_requests or set()
        return outputs

    def add_request(self, request: EngineCoreRequest) -> None:
        super().add_request(request)
        self._unfinished.add(request.request_id)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self._link.call("reset_prefix_cache", reset_running_requests).result()

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return self._link.call("collective_rpc", method, timeout, tuple(args), dict(kwargs or {})).result()

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        self._link.call("pause", mode, clear_cache).result()

    def resume(self) -> None:
        self._link.call("resume").result()

    def is_paused(self) -> bool:
        return self._link.call("is_paused").result()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        self._link.call("sleep", level, mode).result()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self._link.call("wake_up", _tags(tags)).result()

    def is_sleeping(self) -> bool:
        return self._link.call("is_sleeping").result()

    def get_stats(self) -> SchedulerStats:
        return self._link.call("get_stats").result()

    def check_health(self) -> None:
        self._link.call("check_health").result()


class AsyncMPClient(MPClient):
    """For a front end with an event loop. The methods of SyncMPClient; those that wait are coroutines.

    All of it belongs to one event loop at a time, but for the constructor and `shutdown`.
    """

    def __init__(self, config: EngineConfig, executor_class: type[Executor] | None, log_stats: bool) -> None:
        self._outputs: deque[EngineCoreOutputs | EngineDeadError] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        outputs, this = self._outputs, weakref.ref(self)

        def put(item: EngineCoreOutputs | EngineDeadError) -> None:
            outputs.append(item)
            if (client := this()) is not None:
                client._wake()

        super().__init__(config, executor_class, log_stats, put)

    def _wake(self) -> None:
        """From the receiving thread: let `get_output` look again."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._set_waiter)
        except RuntimeError:
            logger.debug("the event loop is closed; the next one that asks finds the output")

    def _set_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs, waiting for them. For one caller at a time.

        Raises:
            EngineDeadError: once, after the last outputs, and ever after.
        """
        self._loop = asyncio.get_running_loop()
        while not self._outputs:
            self._waiter = self._loop.create_future()
            await self._waiter
        outputs = self._outputs[0]
        if isinstance(outputs, EngineDeadError):
            raise EngineDeadError(str(outputs))
        return self._outputs.popleft()  # type: ignore[return-value]

    async def _call(self, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self._link.call(method, *args))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return await self._call("reset_prefix_cache", reset_running_requests)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return await self._call("collective_rpc", method, timeout, tuple(args), dict(kwargs or {}))

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        await self._call("pause", mode, clear_cache)

    async def resume(self) -> None:
        await self._call("resume")

    async def is_paused(self) -> bool:
        return await self._call("is_paused")

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        await self._call("sleep", level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._call("wake_up", _tags(tags))

    async def is_sleeping(self) -> bool:
        return await self._call("is_sleeping")

    async def get_stats(self) -> SchedulerStats:
        return await self._call("get_stats")

    async def check_health(self) -> None:
        await self._call("check_health")


def _tags(tags: Sequence[str] | None) -> Any:
    return tags if tags is None or isinstance(tags, str) else list(tags)
