"""The queue in shared memory: every reader gets every message, whatever its size; who is killed is noticed."""

import os
import pickle
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.executor.shm_queue import PeerGoneError, QueueReader, QueueWriter, make_queue, wait_any

CHILD = Path(__file__).parent / "queue_child.py"


@contextmanager
def opened(num_readers: int, capacity: int):
    writer_end, reader_ends = make_queue(num_readers, capacity)
    writer, readers = QueueWriter(writer_end), [QueueReader(end) for end in reader_ends]
    try:
        yield writer, readers
    finally:
        for end in (writer, *readers):
            end.close()


def start_child(what: str, end, fds) -> subprocess.Popen:
    command = [sys.executable, str(CHILD), what, pickle.dumps(end).hex()]
    return subprocess.Popen(
        command, pass_fds=fds, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(CHILD.parents[2])}
    )


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


frames = st.lists(st.binary(max_size=300), max_size=4)


@settings(max_examples=40, deadline=None)
@given(messages=st.lists(frames, max_size=12), num_readers=st.integers(1, 3), capacity=st.integers(1, 200))
def test_every_reader_gets_every_message(messages, num_readers, capacity):
    with opened(num_readers, capacity) as (writer, readers):
        got = [[] for _ in readers]

        def read(reader, into):
            into.extend(reader.get(timeout=20) for _ in messages)

        threads = [threading.Thread(target=read, args=pair) for pair in zip(readers, got, strict=True)]
        for thread in threads:
            thread.start()
        for message in messages:
            writer.put(message, timeout=20)
        for thread in threads:
            thread.join()
        assert got == [messages] * num_readers
        assert [writer.lag(reader) for reader in range(num_readers)] == [0] * num_readers
        assert all(reader.try_get() is None for reader in readers)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=20)), max_size=60))
def test_readers_may_be_apart(steps):
    """One thread: reader 0, reader 1 or the writer moves on. The ring is large enough for what one may be behind."""
    with opened(2, 4096) as (writer, readers):
        sent, taken = [], [0, 0]
        for who, data in steps:
            if who == 2:
                sent.append(data)
                writer.put([data, b"", data], timeout=0)
                continue
            message = readers[who].try_get()
            if taken[who] == len(sent):
                assert message is None
            else:
                data = sent[taken[who]]
                assert message == [data, b"", data]
                taken[who] += 1


def test_arrays_are_sent_from_their_own_memory():
    array = np.arange(1_000_000, dtype=np.int32)
    with opened(1, 4096) as (writer, readers):
        thread = threading.Thread(target=writer.put, args=([b"header", array],))
        thread.start()
        header, data = readers[0].get(timeout=20)
        thread.join()
        assert header == b"header"
        np.testing.assert_array_equal(np.frombuffer(data, np.int32), array)


def test_times():
    with opened(2, 64) as (writer, readers):
        with pytest.raises(TimeoutError, match="no message came"):
            readers[0].get(timeout=0.01)
        writer.put([b"a"])
        assert readers[1].get(timeout=0) == [b"a"]
        with pytest.raises(TimeoutError, match="reader 0 of the queue does not read"):
            writer.put([b"b" * 100], timeout=0.01)


def test_a_message_that_came_in_part_is_kept():
    with opened(1, 64) as (writer, readers):
        thread = threading.Thread(target=writer.put, args=([b"c" * 100],))
        thread.start()
        message = None
        while message is None:
            try:
                message = readers[0].get(timeout=0)
            except TimeoutError:
                time.sleep(0.001)
        thread.join()
        assert message == [b"c" * 100]


def test_heartbeats():
    with opened(2, 64) as (writer, readers):
        assert readers[1].beats == 0
        writer.beat()
        writer.beat()
        assert readers[0].beats == readers[1].beats == 2


def test_waiting_for_several():
    read, write = os.pipe()
    with opened(1, 64) as (first, [one]), opened(1, 64) as (second, [two]):
        start = time.monotonic()
        assert wait_any([one, two], [read], 0.02) == set()
        assert time.monotonic() - start >= 0.02
        os.write(write, b"x")
        assert wait_any([one, two], [read], 20) == {read}
        second.put([b"x"])
        assert wait_any([one, two], [], 20) == set()
        assert one.try_get() is None
        assert two.try_get() == [b"x"]
        # A sleeping reader is woken at once, not by its longest sleep.
        timer = threading.Timer(0.02, first.put, args=([b"y"],))
        timer.start()
        assert one.get(timeout=20) == [b"y"]
        timer.join()
    os.close(read)
    os.close(write)


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="num_readers must be at least 1, got 0"):
        make_queue(0)
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        make_queue(1, 0)


def test_between_processes():
    there, [child_reads] = make_queue(1, 4096)
    child_writes, [back] = make_queue(1, 4096)
    fds = (*child_reads.fds, *child_writes.fds)
    process = start_child("echo", (child_reads, child_writes), fds)
    child_reads.close()
    child_writes.close()
    writer, reader = QueueWriter(there), QueueReader(back)
    for size in (0, 1, 100, 4095, 4096, 4097, 100_000):
        data = bytes(range(256)) * (size // 256 + 1)
        writer.put([data[:size], b"end"], timeout=20)
        assert reader.get(timeout=20) == [data[:size], b"end"]
    kill(process)
    with pytest.raises(PeerGoneError, match="the writer of the queue has ended"):
        reader.get(timeout=20)
    with pytest.raises(PeerGoneError, match="reader 0 of the queue has ended"):
        writer.put([b"x"])
    writer.close()
    reader.close()


def test_a_reader_that_is_killed_does_not_hold_up_the_writer():
    writer_end, [kept, given_away] = make_queue(2, 64)
    process = start_child("read one", given_away, given_away.fds)
    given_away.close()
    writer, reader = QueueWriter(writer_end), QueueReader(kept)
    writer.put([b"x"])
    assert process.stdout.readline() == b"ready\n"
    timer = threading.Timer(0.05, process.kill)
    timer.start()

    def write_until_full() -> None:
        while True:
            writer.put([b"y" * 10], timeout=20)
            assert reader.get(timeout=20)

    # The other process reads no more, so the ring fills up.
    with pytest.raises(PeerGoneError) as raised:
        write_until_full()
    assert raised.value.reader == 1
    timer.join()
    kill(process)
    writer.close()
    reader.close()


def test_what_a_killed_writer_left_is_read_first():
    writer_end, [reader_end] = make_queue(1, 64)
    process = start_child("write part", writer_end, writer_end.fds)
    writer_end.close()
    assert process.stdout.readline() == b"ready\n"
    reader = QueueReader(reader_end)
    kill(process)
    assert reader.get(timeout=20) == [b"whole"]
    with pytest.raises(PeerGoneError, match="the writer of the queue has ended"):
        reader.get(timeout=20)
    reader.close()
