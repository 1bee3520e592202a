"""WorkerGroup: the worker processes of one machine, and the thread that watches over them."""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from jaxllm.config import EngineConfig
from jaxllm.executor.child_process import ChildProcess
from jaxllm.executor.shm_queue import Frames, PeerGoneError, QueueReader, QueueWriter, make_queue, wait_any
from jaxllm.executor.worker_main import MakeWorker, WorkerMain
from jaxllm.worker.place import WorkerPlace

logger = logging.getLogger(__name__)

ANSWERS_CAPACITY = 2**20
WATCH_S = 1.0
END_GRACE_S = 5.0


class WorkerGoneError(RuntimeError):
    """A worker has ended, or moves no more."""


class WorkerGroup:
    """Starts workers, tells all of them the same, and takes their answers.

    Args:
        make_worker: called in each of the new processes.
        places: of the workers.
        hang_timeout: seconds without a heartbeat after which a worker counts as hung, once `is_serving` is set.

    Attributes:
        is_serving: whether hung workers are looked for. Not during the start, where libraries are loaded that stop everything.
        failure: what happened to a worker; None while all is well.
        on_failure: called once, from the watching thread.
    """

    def __init__(self, make_worker: MakeWorker, config: EngineConfig, places: list[WorkerPlace], hang_timeout: float) -> None:
        self.places = places
        self.is_serving = False
        self.failure: WorkerGoneError | None = None
        self.on_failure: Callable[[WorkerGoneError], None] = lambda error: None
        self._hang_timeout = hang_timeout
        self._is_ending = False
        self._lock = threading.Lock()  # of `failure`
        writer_end, reader_ends = make_queue(len(places))
        self._commands = QueueWriter(writer_end)
        self._answers: list[QueueReader] = []
        self._processes: list[ChildProcess] = []
        level = logging.getLogger().getEffectiveLevel()
        for place, commands in zip(places, reader_ends, strict=True):
            answers, [reader_end] = make_queue(1, ANSWERS_CAPACITY)
            main = WorkerMain(make_worker, config, place, commands, answers, os.getpid(), level)
            process = ChildProcess(main, f"worker-{place.rank}", fds=(*commands.fds, *answers.fds), keep_last_words=True)
            commands.close()
            answers.close()
            self._answers.append(QueueReader(reader_end))
            self._processes.append(process)
        self._stop, self._stopped = socket.socketpair()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="worker-watch")
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def fds(self) -> list[int]:
        """Readable when a worker has ended."""
        return [process.fileno() for process in self._processes]

    def tell(self, frames: Frames, timeout: float) -> None:
        """Send a command to every worker.

        Raises:
            WorkerGoneError: if one has ended, or takes no commands for `timeout` seconds.
        """
        self.check()
        try:
            self._commands.put(frames, timeout)
        except PeerGoneError as error:
            raise self._note_ended(error.reader) from None
        except TimeoutError:
            slowest = max(range(len(self.places)), key=self._commands.lag)
            raise self._note(slowest, f"has taken no commands for {timeout:.0f} s") from None

    def hear(self, timeout: float) -> list[tuple[int, list[bytearray]]]:
        """Wait for answers, and return those that are there, with the index of the worker. It may also return none.

        Raises:
            WorkerGoneError: if a worker has ended or hangs.
        """
        heard = self._take()
        if not heard:
            ended = wait_any(self._answers, self.fds(), timeout)
            heard = self._take()
            if not heard:
                for index, process in enumerate(self._processes):
                    if process.fileno() in ended:
                        raise self._note_ended(index)
                self.check()
        return heard

    def _take(self) -> list[tuple[int, list[bytearray]]]:
        heard = []
        for index, reader in enumerate(self._answers):
            try:
                while (frames := reader.try_get()) is not None:
                    heard.append((index, frames))
            except PeerGoneError:
                if not heard:
                    raise self._note_ended(index) from None
        return heard

    def check(self) -> None:
        """Raise WorkerGoneError if a worker has ended or hangs."""
        if self.failure is not None:
            raise WorkerGoneError(str(self.failure))

    def wait_for_death(self, timeout: float) -> None:
        """Wait a little for the end of a worker: one that has lost another may say so before that other's end is seen.

        Raises:
            WorkerGoneError: if there is one.
        """
        poll = select.poll()
        for fd in self.fds():
            poll.register(fd, select.POLLIN)
        if ready := poll.poll(timeout * 1000):
            raise self._note_ended(self.fds().index(ready[0][0]))

    def name(self, index: int) -> str:
        """Of a worker, for people."""
        return f"worker {self.places[index].rank} (pid {self._processes[index].pid})"

    def _note_ended(self, index: int | None) -> WorkerGoneError:
        assert index is not None
        how = self._processes[index].how_it_ended()
        return self._note(index, how)

    def _note(self, index: int, what: str) -> WorkerGoneError:
        with self._lock:
            if self.failure is None:
                last_words = self._processes[index].last_words()
                said = f"; its last words: {last_words}" if last_words else ""
                self.failure = WorkerGoneError(f"{self.name(index)} {what}{said}")
            return WorkerGoneError(str(self.failure))

    def _watch(self) -> None:
        """The watching thread: until a worker ends or hangs, or the group ends."""
        poll = select.poll()
        for fd in (*self.fds(), self._stopped.fileno()):
            poll.register(fd, select.POLLIN)
        seen = [0] * len(self.places)
        # Counted in looks, not in time: if this process was stopped too, a worker had no chance to move.
        missed = [0] * len(self.places)
        while True:
            ready = {fd for fd, _ in poll.poll(WATCH_S * 1000)}
            if self._is_ending:
                return
            for index, process in enumerate(self._processes):
                beats = self._answers[index].beats
                missed[index] = missed[index] + 1 if beats == seen[index] and self.is_serving else 0
                seen[index] = beats
                if process.fileno() in ready:
                    self._note_ended(index)
                elif missed[index] * WATCH_S >= self._hang_timeout:
                    self._note(index, f"has not moved for {self._hang_timeout:g} s")
            if self.failure is not None:
                logger.error("%s", self.failure)
                self.on_failure(self.failure)
                return

    def end(self, farewell: Frames) -> None:
        """End all workers: by asking them if all is well, else at once. May be called more than once."""
        if self._is_ending:
            return
        self._is_ending = True
        self._stop.close()
        if threading.current_thread() is not self._watcher:  # the collector runs in any thread
            self._watcher.join()
        self._stopped.close()
        deadline = time.monotonic()
        if self.failure is None:
            try:
                self._commands.put(farewell, END_GRACE_S)
                deadline += END_GRACE_S
            except (PeerGoneError, TimeoutError):
                logger.warning("not all workers can be asked to end")
        for process in self._processes:
            process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if not process.has_ended():
                process.kill()
            process.close()
        for end in (self._commands, *self._answers):
            end.close()
