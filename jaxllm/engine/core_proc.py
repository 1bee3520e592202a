"""EngineCoreProc: an engine core in a process of its own.

    input thread            main thread                          output thread
    receive, decode,    →   inputs → EngineCore → outputs    →   encode, send
    hash blocks

The main thread steps as long as there is work and looks at its inputs between two steps. What takes time and is no step happens
in the two other threads. Aborts do not wait for the end of a step: the input thread hands them to the engine core at once.
"""

import enum
import faulthandler
import gc
import logging
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import zmq

from jaxllm.config import EngineConfig
from jaxllm.core.request import Request
from jaxllm.core.types import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from jaxllm.engine.coordinator import EngineLoad, connect_to_coordinator, encode_load
from jaxllm.engine.core import EngineCore
from jaxllm.engine.engine_process import wait_for_parent
from jaxllm.engine.errors import EngineDeadError
from jaxllm.engine.serial import (
    CallFailure,
    Frames,
    decode_request,
    decode_value,
    encode_outputs,
    encode_value,
)
from jaxllm.executor.abstract import Executor

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s [engine core{}]: %(message)s"
LINGER_MS = 5000
EXIT_PARENT_GONE = 3

# The methods of EngineCore that a front end may call.
CALLS = frozenset(
    (
        *("reset_prefix_cache", "collective_rpc", "check_health", "get_stats"),
        *("pause", "resume", "is_paused", "sleep", "wake_up", "is_sleeping", "abort_front_end"),
    )
)


class InputType(bytes, enum.Enum):
    """The first frame of what a front end sends."""

    ADD = b"\x00"
    ABORT = b"\x01"
    CALL = b"\x02"
    SHUTDOWN = b"\x03"
    HELLO = b"\x04"


class OutputType(bytes, enum.Enum):
    """The first frame of what the engine core sends."""

    OUTPUTS = b"\x00"
    DEAD = b"\x01"
    READY = b"\x02"
    START_FAILED = b"\x03"


def engine_identity(engine_index: int) -> bytes:
    """By which a front end's ROUTER knows an engine core."""
    return b"engine-core-%d" % engine_index


class Addresses(NamedTuple):
    """Where a front end takes and gives. It binds both: ROUTER for `inputs`, PULL for `outputs`."""

    inputs: str
    outputs: str


@dataclass(frozen=True)
class EngineCoreMain:
    """All that a new process needs to become an engine core. Pickled on its way there.

    Attributes:
        executor_class: None for `Executor.get_class(config)`, which only the new process may ask: it imports jax.
        front_ends: by client index.
        folder: of the sockets; removed if the parent cannot do it any more. None if they are on TCP.
        log_level: of the new process's root logger.
        engine_index: which of several engine cores it is.
        coordinator: where the coordinator takes the loads of engine cores; None to tell nobody.
    """

    config: EngineConfig
    executor_class: type[Executor] | None
    log_stats: bool
    front_ends: tuple[Addresses, ...]
    parent_pid: int
    folder: str | None
    log_level: int
    engine_index: int = 0
    coordinator: str | None = None

    def __call__(self, link: socket.socket) -> None:
        faulthandler.enable()
        which = "" if self.coordinator is None else f" {self.engine_index}"
        logging.basicConfig(level=self.log_level, format=LOG_FORMAT.format(which))
        threading.Thread(target=self._end_with_parent, args=(link,), daemon=True, name="parent-watch").start()
        self._run()

    def run_core(self) -> None:
        """The same in a process that somebody else watches over."""
        logging.basicConfig(level=self.log_level, format=LOG_FORMAT.format(f" {self.engine_index}"), force=True)
        self._run()

    def _run(self) -> None:
        try:
            core = EngineCore(self.config, self.executor_class or Executor.get_class(self.config), self.log_stats)
        except BaseException as error:
            logger.exception("the engine core cannot start")
            send_to_all(self.front_ends, OutputType.START_FAILED, encode_value(CallFailure.of(error)))
            raise SystemExit(1) from None
        # What exists now lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        EngineCoreProc(core, self.front_ends, self.engine_index, self.coordinator).run()

    def _end_with_parent(self, link: socket.socket) -> None:
        wait_for_parent(link, self.parent_pid)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(EXIT_PARENT_GONE)


def send_to_all(front_ends: Sequence[Addresses], kind: OutputType, frames: Frames) -> None:
    """Send from the address that takes a front end's inputs, and wait until it is gone."""
    with zmq.Context() as context:
        # The last one has started this process, and ends it when it knows.
        for front_end in reversed(front_ends):
            with context.socket(zmq.PUSH) as sock:
                sock.linger = LINGER_MS
                sock.connect(front_end.outputs)
                sock.send_multipart([kind, *frames])


class EngineCoreProc:
    """Runs an engine core for its front ends until one of them shuts it down or it fails.

    Args:
        front_ends: by client index.
        engine_index, coordinator: as in EngineCoreMain.
    """

    def __init__(
        self, core: EngineCore, front_ends: Sequence[Addresses], engine_index: int = 0, coordinator: str | None = None
    ) -> None:
        self.core = core
        self.front_ends = front_ends
        self.engine_index = engine_index
        self.coordinator = coordinator
        self._last_load: EngineLoad | None = None
        self.inputs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.outputs: queue.SimpleQueue[tuple[int, EngineCoreOutputs | BaseException] | EngineLoad | None] = queue.SimpleQueue()
        self._answers: list[tuple[int, EngineCoreOutputs]] = []
        self._deadline: float | None = None  # of a shutdown, time.monotonic()

    def run(self) -> None:
        """Raises SystemExit(1) if the engine core fails; the front ends have been told why."""
        sender = threading.Thread(target=_or_die(self._send_outputs), daemon=True, name="output")
        sender.start()
        threading.Thread(target=_or_die(self._receive_inputs), daemon=True, name="input").start()
        self.core.executor.on_failure(lambda error: self.inputs.put(partial(self.core.fail, error)))
        if self.coordinator is not None:
            self._tell_load()
        try:
            while not self._is_over():
                self._take_inputs()
                self._step()
        except BaseException as error:
            logger.exception("the engine core has failed")
            for index in range(len(self.front_ends)):
                self.outputs.put((index, error))
            raise SystemExit(1) from None
        finally:
            self.outputs.put(None)
            sender.join()
            self.core.shutdown()

    # Main thread

    def _is_over(self) -> bool:
        """Whether a shutdown is complete: everything has ended, or was ended when the time was up."""
        if self._deadline is None:
            return False
        # Paused, the requests would never end.
        if time.monotonic() >= self._deadline or not self.core.has_work():
            self.core.abort_all()
            self._put(self.core.take_undelivered())
            return True
        return False

    def _take_inputs(self) -> None:
        """All that have come; waits for one if there is nothing else to do."""
        while True:
            try:
                action = self.inputs.get(block=not self.core.has_work() and self._deadline is None)
            except queue.Empty:
                return
            action()
            self._put(self.core.take_undelivered())
            self.core.check_alive()

    def _step(self) -> None:
        self._put(self.core.step())

    def _put(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for item in outputs.items():
            self.outputs.put(item)
        # After the outputs: whoever waits for a pause has got everything that came before it.
        answers, self._answers = self._answers, []
        for item in answers:
            self.outputs.put(item)
        if (events := self.core.take_kv_events()) is not None:
            for index in range(len(self.front_ends)):
                self.outputs.put((index, EngineCoreOutputs(kv_events=events)))
        if self.coordinator is not None:
            self._tell_load()

    def _tell_load(self) -> None:
        """If it has changed, which most steps do not."""
        stats = self.core.get_stats()
        load = EngineLoad(self.engine_index, stats.num_waiting_reqs, stats.num_running_reqs, stats.kv_cache_usage)
        if load != self._last_load:
            self._last_load = load
            self.outputs.put(load)

    def _add(self, request: Request) -> None:
        if self._deadline is not None:
            self._end(request.client_index, request.request_id, FinishReason.ABORT)
            return
        try:
            self.core.add_request(request)
        except ValueError as error:
            self._refuse(request.client_index, request.request_id, error)

    def _refuse(self, client_index: int, request_id: str, error: Exception) -> None:
        logger.error("request %s is refused", request_id, exc_info=error)
        self._end(client_index, request_id, FinishReason.ERROR, str(error))

    def _end(self, client_index: int, request_id: str, reason: FinishReason, why: str | None = None) -> None:
        output = EngineCoreOutput(request_id, [], finish_reason=reason, stop_reason=why)
        self.outputs.put((client_index, EngineCoreOutputs([output], finished_requests={request_id})))

    def _call(self, client_index: int, call_id: int, method: str, args: Sequence[Any]) -> None:
        def answer(result: Any) -> None:
            self._answers.append((client_index, EngineCoreOutputs(utility_result=(call_id, result))))

        def answer_later(done: Future[None]) -> None:
            error = done.exception()
            answer(None if error is None else CallFailure.of(error))

        try:
            if method not in CALLS:
                raise ValueError(f"the engine core has no call {method!r}")
            result = getattr(self.core, method)(*args)
        except Exception as error:
            answer(CallFailure.of(error))
            return
        if isinstance(result, Future):
            result.add_done_callback(answer_later)
        else:
            answer(result)

    def _shut_down(self, drain_timeout: float) -> None:
        self._deadline = time.monotonic() + drain_timeout

    # Input thread

    def _receive_inputs(self) -> None:
        context = zmq.Context()
        poller = zmq.Poller()
        client_index: dict[zmq.Socket, int] = {}
        ready = [OutputType.READY, *encode_value(self._description())]
        for index, front_end in enumerate(self.front_ends):
            sock = context.socket(zmq.DEALER)
            sock.identity = engine_identity(self.engine_index)
            sock.connect(front_end.inputs)
            # From now on the front end can address this engine core.
            sock.send_multipart(ready)
            poller.register(sock, zmq.POLLIN)
            client_index[sock] = index
        while True:
            for sock, _ in poller.poll():
                kind, *frames = sock.recv_multipart(copy=False)
                if kind.bytes == InputType.HELLO:  # of a front end that came later than this engine core
                    sock.send_multipart(ready)
                    continue
                self._receive(client_index[sock], InputType(kind.bytes), [frame.buffer for frame in frames])

    def _description(self) -> dict[str, int]:
        return {"num_gpu_blocks": self.core.kv_cache_config.num_blocks, "pid": os.getpid()}

    def _receive(self, index: int, kind: InputType, frames: Frames) -> None:
        if kind is InputType.ADD:
            self._receive_request(index, decode_request(frames))
        elif kind is InputType.ABORT:
            request_ids = decode_value(frames)
            # At once, for the step that runs; and in turn, for a request that is still in the queue of inputs.
            self.core.queue_aborts(request_ids)
            self.inputs.put(lambda: self.core.abort_requests(request_ids))
        elif kind is InputType.CALL:
            call_id, method, args = decode_value(frames)
            self.inputs.put(lambda: self._call(index, call_id, method, args))
        else:
            drain_timeout = decode_value(frames)
            self.inputs.put(lambda: self._shut_down(drain_timeout))

    def _receive_request(self, index: int, request: EngineCoreRequest) -> None:
        request.client_index = index
        try:
            made = self.core.make_request(request)
        except Exception as error:  # the others go on, whatever is wrong with this one
            self._refuse(index, request.request_id, error)
            return
        self.inputs.put(lambda: self._add(made))

    # Output thread

    def _send_outputs(self) -> None:
        with zmq.Context() as context:
            socks = []
            for front_end in self.front_ends:
                sock = context.socket(zmq.PUSH)
                sock.linger = LINGER_MS
                sock.sndhwm = 0  # a front end that is slow must not stop the others
                sock.connect(front_end.outputs)
                socks.append(sock)
            coordinator = None if self.coordinator is None else connect_to_coordinator(context, self.coordinator)
            while (item := self.outputs.get()) is not None:
                if isinstance(item, EngineLoad):
                    coordinator.send(encode_load(item))
                    continue
                index, outputs = item
                if isinstance(outputs, BaseException):
                    reason = str(outputs) if isinstance(outputs, EngineDeadError) else repr(outputs)
                    frames: list[Any] = [OutputType.DEAD, reason.encode()]
                else:
                    frames = [OutputType.OUTPUTS, *_encode(outputs)]
                socks[index].send_multipart(frames, copy=False)
            for sock in socks:
                sock.close()
            if coordinator is not None:
                coordinator.close()


def _encode(outputs: EngineCoreOutputs) -> Frames:
    try:
        return encode_outputs(outputs)
    except TypeError as error:
        if outputs.utility_result is None:
            raise
        # A method of the workers has returned what cannot be sent.
        return encode_outputs(EngineCoreOutputs(utility_result=(outputs.utility_result[0], CallFailure.of(error))))


def _or_die(function: Callable[[], None]) -> Callable[[], None]:
    """For a thread without which the process is deaf or mute: its failure ends the process."""

    def run() -> None:
        try:
            function()
        except BaseException:
            logger.exception("thread %s of the engine core has failed", threading.current_thread().name)
            os._exit(1)

    return run
