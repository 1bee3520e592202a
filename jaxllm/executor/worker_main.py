"""WorkerMain: a worker in a process of its own. It does what it is told, in the order in which it is told.

All workers are told the same, and their programs exchange data: so they start and read the same steps in the same order, and
nobody needs to agree on anything else. Only one of them answers to a step; to a call, all do.
"""

import faulthandler
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.executor.child_process import wait_for_parent
from jaxllm.executor.shm_queue import PeerGoneError, QueueEnd, QueueReader, QueueWriter
from jaxllm.executor.wire import Kind, Message, WorkerFailure, decode_message, encode_message
from jaxllm.worker.place import WorkerPlace

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s [worker {}]: %(message)s"
BEAT_S = 0.5
EXIT_PARENT_GONE = 3


MakeWorker = Callable[[EngineConfig, WorkerPlace], Any]


def make_worker(config: EngineConfig, place: WorkerPlace) -> Any:
    """The worker that drives devices. Imported here, so that a worker's process has a pulse before it has jax."""
    from jaxllm.worker.worker import Worker

    return Worker(config, place)


@dataclass(frozen=True)
class WorkerMain:
    """All that a new process needs to become a worker. Pickled on its way there.

    Attributes:
        make_worker: can be pickled.
        commands: reader's end of the queue of what to do.
        answers: writer's end of its own queue.
        log_level: of the new process's root logger.
    """

    make_worker: MakeWorker
    config: EngineConfig
    place: WorkerPlace
    commands: QueueEnd
    answers: QueueEnd
    parent_pid: int
    log_level: int

    def __call__(self, link: socket.socket) -> None:
        # What libraries print is nothing that the command's own output may have in it.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        faulthandler.enable()
        logging.basicConfig(level=self.log_level, format=LOG_FORMAT.format(self.place.rank))
        threading.Thread(target=self._end_with_parent, args=(link,), daemon=True, name="parent-watch").start()
        commands, answers = QueueReader(self.commands), QueueWriter(self.answers)
        threading.Thread(target=_beat, args=(answers,), daemon=True, name="heartbeat").start()
        try:
            answers_steps = self.place.rank == self.config.parallel.output_rank
            CommandLoop(self.make_worker(self.config, self.place), answers_steps, commands, answers).run()
        except PeerGoneError:
            os._exit(EXIT_PARENT_GONE)
        except BaseException:
            logger.exception("worker %d has failed", self.place.rank)
            _exit(1)
        # Not by way of jax's own end, which waits for the other workers.
        _exit(0)

    def _end_with_parent(self, link: socket.socket) -> None:
        wait_for_parent(link, self.parent_pid)
        os._exit(EXIT_PARENT_GONE)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _beat(answers: QueueWriter) -> None:
    while True:
        answers.beat()
        time.sleep(BEAT_S)


class CommandLoop:
    """
    Args:
        worker: whose methods are called; its steps are started with `start_model`.
        answers_steps: whether this worker is the one that answers to steps.
    """

    def __init__(self, worker: Any, answers_steps: bool, commands: QueueReader, answers: QueueWriter) -> None:
        self._worker, self._answers_steps = worker, answers_steps
        self._commands, self._answers = commands, answers
        self._steps: dict[int, Any] = {}
        self._is_serving = False

    def run(self) -> None:
        """Until it is told to end.

        Raises:
            PeerGoneError: if there is nobody to tell it anything any more.
        """
        while (command := decode_message(self._commands.get())).kind is not Kind.END:
            try:
                answer = self._obey(command)
            except Exception as error:
                # Who calls a method is told; of a step, only that the engine is dead.
                level = logging.DEBUG if command.kind is Kind.CALL else logging.ERROR
                logger.log(level, "%s failed", _what(command), exc_info=error)
                answer = Message(Kind.FAILURE, command.number, WorkerFailure.of(error))
            if answer is not None:
                self._answer(answer)
        self._worker.shutdown()

    def _obey(self, command: Message) -> Message | None:
        if command.kind is Kind.START:
            if not self._is_serving:
                # What exists now lives as long as the process: the collector need not look at it again.
                gc.collect()
                gc.freeze()
                self._is_serving = True
            self._steps[command.number] = self._worker.start_model(command.body)
            return None
        if command.kind is Kind.FINISH:
            # By every worker: log probabilities of prompts are computed here, by all devices.
            output = self._steps.pop(command.number).result()
            return Message(Kind.OUTPUT, command.number, output) if self._answers_steps else None
        method, args, kwargs = command.body
        return Message(Kind.RESULT, command.number, self._call(method, args, kwargs))

    def _call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(self._worker, method)(*args, **kwargs)

    def _answer(self, answer: Message) -> None:
        try:
            frames = encode_message(answer)
        except TypeError as error:  # a method has returned what cannot be sent
            frames = encode_message(Message(Kind.FAILURE, answer.number, WorkerFailure.of(error)))
        self._answers.put(frames)


def _what(command: Message) -> str:
    return f"{command.body[0]}()" if command.kind is Kind.CALL else f"step {command.number}"
