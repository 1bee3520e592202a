"""One of several front ends of engine cores that another process has started: what EngineLink and EngineGroup are for that one.

Such a front end may come and go while the engine cores run: it says hello until they answer. It starts and ends no process.
"""

import contextlib
import os
import select
from typing import Any

import zmq

from jaxllm.config import EngineConfig
from jaxllm.engine.coordinator import SnapshotListener
from jaxllm.engine.core_proc import InputType, OutputType, engine_identity
from jaxllm.engine.engine_group import EngineGroup, FrontEnd, PutItem
from jaxllm.engine.engine_link import EngineLink, Put
from jaxllm.engine.errors import EngineStartError
from jaxllm.engine.serial import decode_value

HELLO_INTERVAL_MS = 50


class _Engine:
    """The process of an engine core, as far as one sees it that is not its parent."""

    def __init__(self) -> None:
        self.pid = 0
        self._pidfd = -1
        self._poll = select.epoll()
        self._wake_up, self._end = os.pipe()
        self._poll.register(self._wake_up, select.EPOLLIN)

    def watch(self) -> None:
        # If it has ended already there is no such process, which is as good as a sign of its end.
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(self.pid)
            self._poll.register(self._pidfd, select.EPOLLIN)
            return
        self.stop_watching()

    def stop_watching(self) -> None:
        """Let whoever waits for `fileno` go on."""
        os.write(self._end, b"\0")

    def fileno(self) -> int:
        """Becomes readable when the process has ended, or `stop_watching` was called."""
        return self._poll.fileno()

    def how_it_ended(self) -> str:
        return "ended"

    def kill(self) -> None:
        """Another process decides about that."""

    def close(self) -> None:
        self._poll.close()
        for fd in (self._wake_up, self._end, self._pidfd):
            if fd >= 0:
                os.close(fd)


class AttachedLink(EngineLink):
    """An EngineLink to an engine core that another process has started, or will."""

    def __init__(self, front_end: FrontEnd, engine_index: int, put: Put) -> None:
        self._prepare(put, f"engine core {engine_index}")
        self._is_here = engine_index not in front_end.remote
        self._identity = engine_identity(engine_index)
        self.process: Any = _Engine()
        self._bind_both(front_end.addresses(engine_index))

    def _receive_ready(self) -> tuple[bytes, dict[str, Any]]:
        self._inputs.router_mandatory = True  # so that one sees whether it is there
        while not self._is_asked_to_end:
            with contextlib.suppress(zmq.ZMQError):
                self._inputs.send_multipart([self._identity, InputType.HELLO])
            if self._inputs.poll(HELLO_INTERVAL_MS):
                identity, kind, *frames = self._inputs.recv_multipart()
                assert kind == OutputType.READY, kind
                self._inputs.router_mandatory = False  # what it does not get is given back when its death is noticed
                description = decode_value(frames)
                self.process.pid = description["pid"]
                if self._is_here:  # of another machine's end the process that started it tells
                    self.process.watch()
                return identity, description
        raise EngineStartError("the front end ends")

    def ask_to_end(self, drain_timeout: float = 0.0) -> None:
        """Begin what `close` does, and do not wait."""
        with self._lock:
            self._is_asked_to_end = True

    def close(self, drain_timeout: float = 0.0) -> None:
        """Hear and say no more. May be called more than once, from any thread but the receiving one."""
        self.ask_to_end()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._receiver is not None:
            self.process.stop_watching()
            self._receiver.join()
        self.process.close()
        self._context.destroy(linger=0)


class AttachedGroup(EngineGroup):
    """An EngineGroup that another process has started. It waits for the engine cores for as long as this process lives."""

    def __init__(self, config: EngineConfig, front_end: FrontEnd, put: PutItem) -> None:
        self._front_end = front_end
        self._prepare(config, put)
        self._listener = SnapshotListener(front_end.snapshots, self._take_snapshot)
        self.links = [self.start_link(index) for index in range(self.num_engines)]

    def _make_link(self, index: int, put: Put) -> EngineLink:
        return AttachedLink(self._front_end, index, put)

    def _restart(self, index: int) -> None:
        """Wait for it to be started again."""
        dead = self.links[index]
        dead.close()  # the sockets will have the same addresses
        with self._lock:
            if self._closed.is_set():
                return
            link = self._starting[index] = self.start_link(index)
        try:
            link.wait_until_ready()
        except EngineStartError:
            return  # this front end ends
        finally:
            with self._lock:
                del self._starting[index]
        self._replace(index, link)

    def close(self, drain_timeout: float = 0.0) -> None:
        """Let go of the engine cores. May be called more than once."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            for link in self._starting.values():
                link.ask_to_end()
        for thread in self._restarts:
            thread.join()
        for link in self.links:
            link.close()
        self._listener.close()
