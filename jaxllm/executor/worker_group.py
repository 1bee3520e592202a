"""WorkerGroup: the worker processes of one machine, and the thread that watches over them."""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.executor.child_process import ChildProcess
from jaxllm.executor.shm_queue import Frames, PeerGoneError, QueueReader, QueueWriter, make_queue, wait_any
from jaxllm.executor.wire import FAREWELL
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
        hang_timeout: seconds without a heartbeat after which a worker counts as hung, after `start_serving`.

    Attributes:
        failure: what happened to a worker; None while all is well.
        on_failure: called once, from any thread.
    """

    def __init__(self, make_worker: MakeWorker, config: EngineConfig, places: list[WorkerPlace], hang_timeout: float) -> None:
        self.places = places
        self._is_serving = False
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
    def num_workers(self) -> int:
        return len(self.places)

    def start_serving(self) -> None:
        """Look for hung workers from now on. Not during the start, where libraries are loaded that stop everything."""
        self._is_serving = True

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
            raise self.fail_of(slowest, f"has taken no commands for {timeout:.0f} s") from None

    def hear(self, timeout: float, fds: Iterable[int] = ()) -> list[tuple[int, list[Any]]]:
        """Wait for answers, and return those that are there, with the index of the worker. It may also return none.

        Args:
            fds: do not wait once one of these is readable.

        Raises:
            WorkerGoneError: if a worker has ended or hangs.
        """
        heard = self._take()
        if not heard:
            ended = wait_any(self._answers, [*self.fds(), *fds], timeout)
            heard = self._take()
            if not heard:
                for index, process in enumerate(self._processes):
                    if process.fileno() in ended:
                        raise self._note_ended(index)
                self.check()
        return heard

    def _take(self) -> list[tuple[int, list[Any]]]:
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
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if ready := poll.poll(50):
                raise self._note_ended(self.fds().index(ready[0][0]))
            self.check()

    def name(self, index: int) -> str:
        """Of a worker, for people."""
        return f"worker {self.places[index].rank} (pid {self._processes[index].pid})"

    def _note_ended(self, index: int | None) -> WorkerGoneError:
        assert index is not None
        how = self._processes[index].how_it_ended()
        return self.fail_of(index, how)

    def fail_of(self, index: int, what: str) -> WorkerGoneError:
        """As `fail`, for what has happened to a worker of this machine."""
        last_words = self._processes[index].last_words()
        said = f"; its last words: {last_words}" if last_words else ""
        return self.fail(f"{self.name(index)} {what}{said}")

    def fail(self, why: str) -> WorkerGoneError:
        """Note what has happened, if it is the first such thing. Returns what to raise."""
        with self._lock:
            is_first = self.failure is None
            if is_first:
                self.failure = WorkerGoneError(why)
        if is_first:
            logger.error("%s", why)
            self.on_failure(WorkerGoneError(why))
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
                missed[index] = missed[index] + 1 if beats == seen[index] and self._is_serving else 0
                seen[index] = beats
                if process.fileno() in ready:
                    self._note_ended(index)
                elif missed[index] * WATCH_S >= self._hang_timeout:
                    self.fail_of(index, f"has not moved for {self._hang_timeout:g} s")
            if self.failure is not None:
                return

    def end(self, at_once: bool = False) -> None:
        """End all workers: by asking them, or `at_once`, as also after a failure. May be called more than once."""
        if self._is_ending:
            return
        self._is_ending = True
        self._stop.close()
        if threading.current_thread() is not self._watcher:  # the collector runs in any thread
            self._watcher.join()
        self._stopped.close()
        deadline = time.monotonic()
        if self.failure is None and not at_once:
            try:
                self._commands.put(FAREWELL, END_GRACE_S)
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
