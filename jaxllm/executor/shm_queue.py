"""A broadcast queue in shared memory: one writer, any number of readers, every reader gets every message.

    ring        bytes of the messages, one after another, from `position % capacity` on
    cells       how far the writer and each reader are, who sleeps, and the writer's heartbeat

Nobody takes a lock. The writer alone moves its position, each reader alone its own; a message is in the ring before the writer's
position says so, and stays until every reader's position is past it. A message larger than the ring goes through it in pieces.

Whoever has nothing to do sleeps on a pair of sockets that joins the writer with each reader. A byte on it wakes the other end, if
a flag says that it sleeps; and when either process ends, however it ends, the other end is readable and closed.

The memory has no name: it goes to other processes as an inherited file descriptor and is gone with the last of them.
"""

import mmap
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Buffer = bytes | bytearray | memoryview
Frames = Sequence[Buffer]

DEFAULT_CAPACITY = 4 * 2**20

# Cells are 8-byte words, each in a cache line of its own: what one process writes often does not slow down the others' words.
_CELL = 8
_POSITION, _WRITER_SLEEPS, _BEATS, _FIRST_READER = range(4)
# If a processor held back the flag of one that falls asleep just as the other looks at it, nobody would be woken: look again.
_LONGEST_SLEEP_S = 0.2


class PeerGoneError(Exception):
    """The process at the other end has ended.

    Attributes:
        reader: which reader it was; None if it was the writer.
    """

    def __init__(self, reader: int | None = None) -> None:
        super().__init__("the writer of the queue has ended" if reader is None else f"reader {reader} of the queue has ended")
        self.reader = reader


@dataclass(frozen=True)
class QueueEnd:
    """What a process needs to become the writer or a reader: inherited file descriptors. It can be pickled.

    Attributes:
        memory: of the shared memory.
        links: sockets to the readers; of a reader, the one to the writer.
        reader: which reader; None for the writer.
    """

    memory: int
    links: tuple[int, ...]
    num_readers: int
    capacity: int
    reader: int | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        """What a new process must inherit."""
        return (self.memory, *self.links)

    def close(self) -> None:
        """Give up an end that went to another process."""
        for fd in self.fds:
            os.close(fd)


def make_queue(num_readers: int, capacity: int = DEFAULT_CAPACITY) -> tuple[QueueEnd, list[QueueEnd]]:
    """A new queue: the writer's end and the readers'. Each end goes to one process, and is closed in this one if that is another.

    Args:
        capacity: bytes of the ring.

    Raises:
        ValueError: if a number is below 1.
    """
    for name, value in (("num_readers", num_readers), ("capacity", capacity)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("jaxllm-queue")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, _cell_bytes(num_readers) + capacity)
    pairs = [socket.socketpair() for _ in range(num_readers)]
    writer = QueueEnd(memory, tuple(ours.detach() for ours, _ in pairs), num_readers, capacity)
    readers = [
        QueueEnd(os.dup(memory), (theirs.detach(),), num_readers, capacity, reader) for reader, (_, theirs) in enumerate(pairs)
    ]
    return writer, readers


def _cell_bytes(num_readers: int) -> int:
    return 64 * (_FIRST_READER + 2 * num_readers)


class _Mapped:
    """The memory of a queue in this process."""

    def __init__(self, end: QueueEnd) -> None:
        size = _cell_bytes(end.num_readers)
        self._capacity, self._num_readers = end.capacity, end.num_readers
        self._mmap = mmap.mmap(end.memory, size + end.capacity)
        os.close(end.memory)
        self._view = memoryview(self._mmap)
        # One store or load of a machine word each: nobody sees half of a number.
        self._cells = self._view[:size].cast("Q")
        self._ring = self._view[size:]
        self._links = [socket.socket(fileno=fd) for fd in end.links]
        for link in self._links:
            link.setblocking(False)
        self._fence = threading.Lock()

    def _order(self) -> None:
        """A memory fence: what was written before is seen by others before what is written after. Taking a lock is one."""
        with self._fence:
            pass

    def _position_cell(self, reader: int) -> int:
        return _CELL * (_FIRST_READER + 2 * reader)

    def _sleep_cell(self, reader: int) -> int:
        return _CELL * (_FIRST_READER + 2 * reader + 1)

    def close(self) -> None:
        """Give up this end. The other processes notice."""
        for link in self._links:
            link.close()
        self._cells.release()
        self._ring.release()
        self._view.release()
        self._mmap.close()


def _ring_bell(link: socket.socket) -> bool:
    """Wake the other end; False if it is gone."""
    try:
        link.send(b"\0")
    except BlockingIOError:
        return True  # it has bells enough
    except OSError:
        return False
    return True


def _silence(link: socket.socket) -> bool:
    """Take the bells; False if the other end is gone."""
    try:
        return bool(link.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


class QueueWriter(_Mapped):
    """The writer's end. One thread at a time, but for `beat`."""

    def __init__(self, end: QueueEnd) -> None:
        assert end.reader is None
        super().__init__(end)
        self._written = 0  # what is in the ring, published or not
        self._beats = 0

    def beat(self) -> None:
        """Show the readers that this process runs."""
        self._beats += 1
        self._cells[_CELL * _BEATS] = self._beats

    def lag(self, reader: int) -> int:
        """Bytes that a reader has not taken yet."""
        return self._written - self._cells[self._position_cell(reader)]

    def put(self, frames: Frames, timeout: float | None = None) -> None:
        """Send a message to every reader. Waits only while the ring is full.

        Raises:
            PeerGoneError: if a reader has ended. The others may have the message in part: the queue is of no use any more.
            TimeoutError: if a reader took nothing for so long; likewise.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        views = [memoryview(frame).cast("B") for frame in frames]
        self._write(memoryview(struct.pack(f"<I{len(views)}Q", len(views), *map(len, views))), deadline)
        for view in views:
            self._write(view, deadline)
        self._publish()
        self._check_readers()

    def _check_readers(self) -> None:
        for reader, link in enumerate(self._links):
            if not _silence(link):
                raise PeerGoneError(reader)

    def _write(self, data: memoryview, deadline: float | None) -> None:
        done = 0
        while done < len(data):
            start = self._written % self._capacity
            size = min(len(data) - done, self._free(), self._capacity - start)
            if size == 0:
                self._publish()
                self._wait_for_space(deadline)
                continue
            self._ring[start : start + size] = data[done : done + size]
            self._written += size
            done += size

    def _free(self) -> int:
        return self._capacity - max(map(self.lag, range(self._num_readers)))

    def _publish(self) -> None:
        self._order()
        self._cells[_CELL * _POSITION] = self._written
        self._order()
        for reader, link in enumerate(self._links):
            cell = self._sleep_cell(reader)
            if self._cells[cell]:
                self._cells[cell] = 0
                if not _ring_bell(link):
                    raise PeerGoneError(reader)

    def _wait_for_space(self, deadline: float | None) -> None:
        poll = select.poll()
        for link in self._links:
            poll.register(link, select.POLLIN)
        while self._free() == 0:
            left = _LONGEST_SLEEP_S if deadline is None else min(_LONGEST_SLEEP_S, deadline - time.monotonic())
            if left <= 0:
                slowest = max(range(self._num_readers), key=self.lag)
                raise TimeoutError(f"reader {slowest} of the queue does not read")
            self._cells[_CELL * _WRITER_SLEEPS] = 1
            self._order()
            if self._free() == 0:
                poll.poll(left * 1000)
            self._cells[_CELL * _WRITER_SLEEPS] = 0
            self._check_readers()


class QueueReader(_Mapped):
    """A reader's end. One thread at a time."""

    def __init__(self, end: QueueEnd) -> None:
        assert end.reader is not None
        super().__init__(end)
        self._own_position = self._position_cell(end.reader)
        self._own_sleep = self._sleep_cell(end.reader)
        self._read = 0
        self._gone = False
        self._start_message()

    def _start_message(self) -> None:
        """Expect the number of frames, which their sizes follow, which they follow."""
        self._frames: list[bytearray] = []
        self._sizes: list[int] | None = None
        self._num_frames: int | None = None
        self._target, self._filled = bytearray(4), 0

    @property
    def beats(self) -> int:
        """How often the writer has shown that it runs."""
        return self._cells[_CELL * _BEATS]

    def fileno(self) -> int:
        """Readable when there may be something to read; see `wait_any`."""
        return self._links[0].fileno()

    def get(self, timeout: float | None = None) -> list[bytearray]:
        """The next message.

        Raises:
            PeerGoneError: if the writer has ended, once all that it had written is read.
            TimeoutError: if the message was not there in time. What has come of it is kept.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self.try_get()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("no message came")
            wait_any([self], (), left)
        return message

    def try_get(self) -> list[bytearray] | None:
        """The next message if all of it is there.

        Raises:
            PeerGoneError: as `get`.
        """
        gone = self._gone  # as of before looking: what was written is there then
        while self._fill():
            if self._num_frames is None:
                (self._num_frames,) = struct.unpack("<I", self._target)
                self._target, self._filled = bytearray(8 * self._num_frames), 0
            elif self._sizes is None:
                self._sizes = list(struct.unpack(f"<{self._num_frames}Q", self._target))
                self._next_frame()
            else:
                self._frames.append(self._target)
                self._next_frame()
            if self._sizes is not None and len(self._frames) == self._num_frames:
                frames = self._frames
                self._start_message()
                return frames
        if gone:
            raise PeerGoneError
        return None

    def _next_frame(self) -> None:
        assert self._sizes is not None
        if len(self._frames) < len(self._sizes):
            self._target, self._filled = bytearray(self._sizes[len(self._frames)]), 0

    def _fill(self) -> bool:
        """Take what is there of the part that is expected; whether that is all of it."""
        while self._filled < len(self._target):
            available = self._cells[_CELL * _POSITION] - self._read
            self._order()
            start = self._read % self._capacity
            size = min(len(self._target) - self._filled, available, self._capacity - start)
            if size == 0:
                return False
            self._target[self._filled : self._filled + size] = self._ring[start : start + size]
            self._filled += size
            self._read += size
            self._order()
            self._cells[self._own_position] = self._read
            self._order()
            if self._cells[_CELL * _WRITER_SLEEPS]:
                _ring_bell(self._links[0])
        return True

    def fall_asleep(self) -> bool:
        """Ask to be woken; False if there is something to read, or no writer any more."""
        if self._gone:
            return False
        self._cells[self._own_sleep] = 1
        self._order()
        return self._cells[_CELL * _POSITION] == self._read

    def wake(self) -> None:
        """After waiting: take the bells, and notice that the writer has ended."""
        self._cells[self._own_sleep] = 0
        if not _silence(self._links[0]):
            self._gone = True


def wait_any(readers: Iterable[QueueReader], fds: Iterable[int], timeout: float | None) -> set[int]:
    """Wait until a queue may have something, or a file descriptor is readable. It may also return for nothing.

    Args:
        timeout: seconds; None for no limit.

    Returns:
        The file descriptors that are readable.
    """
    readers, fds = list(readers), set(fds)
    poll = select.poll()
    for end in (*readers, *fds):
        poll.register(end, select.POLLIN)
    left = _LONGEST_SLEEP_S if timeout is None else max(0.0, min(_LONGEST_SLEEP_S, timeout))
    asleep = [reader.fall_asleep() for reader in readers]
    if not all(asleep):
        left = 0.0
    ready = {fd for fd, _ in poll.poll(left * 1000)}
    for reader in readers:
        reader.wake()
    return ready & fds
