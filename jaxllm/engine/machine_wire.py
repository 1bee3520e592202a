"""What the front end and a headless machine say to each other: small records of msgpack over one TCP connection.

The connection is the bond between the two. When it ends, or nothing has come through it for a while, the other side counts as
lost, and it never comes back: who wants to go on makes a new one. Nothing here is pickled, so what arrives runs no code.
"""

import contextlib
import dataclasses
import importlib.metadata
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.engine.core_proc import Addresses

# A machine says that it lives so often, and the front end answers each time.
BEAT_S = 0.5
_MOST_BYTES = 1 << 20
_CLOSE_S = 1.0
# Of what differs between two machines, for people.
_MOST_NAMED, _MOST_CHARACTERS = 8, 100
# Folders and the number of engine cores may be each machine's own.
_OWN_FIELDS = frozenset(
    (
        *("model", "path", "tokenizer", "generation_defaults", "decoder"),
        *("data_parallel_size_local", "data_parallel_restart", "data_parallel_address", "data_parallel_rpc_port"),
        *("nnodes", "node_rank", "master_addr", "master_port"),
    )
)


class Message(msgspec.Struct, frozen=True):
    """Of either side."""


class Join(Message, frozen=True, tag="join"):
    """A machine's first word.

    Attributes:
        config: see `comparable`.
    """

    version: str
    start_rank: int
    num_engines: int
    config: dict[str, str]


class Beat(Message, frozen=True, tag="beat"):
    pass


class Started(Message, frozen=True, tag="started"):
    process: int
    pid: int


class Ended(Message, frozen=True, tag="ended"):
    process: int
    how: str


class Leaving(Message, frozen=True, tag="leaving"):
    """A machine's last word."""

    why: str


class Welcome(Message, frozen=True, tag="welcome"):
    pass


class Refused(Message, frozen=True, tag="refused"):
    why: str


class Start(Message, frozen=True, tag="start"):
    """Start an engine core.

    Attributes:
        process: by which both sides know its process; never used twice.
        rank, front_ends, coordinator, log_stats: see EngineCoreMain.
    """

    process: int
    rank: int
    front_ends: tuple[Addresses, ...]
    coordinator: str
    log_stats: bool


class Kill(Message, frozen=True, tag="kill"):
    process: int


class End(Message, frozen=True, tag="end"):
    """The front end's last word."""


FromMachine = Join | Beat | Started | Ended | Leaving
ToMachine = Welcome | Refused | Beat | Start | Kill | End


class ConnectionLostError(Exception):
    """Says why, as the end of a sentence about the other side."""


class Connection:
    """One side of the bond.

    Args:
        sock: connected; the connection's from now on.
        incoming: the union of what the other side may say.
        timeout: seconds of silence after which it counts as lost.
    """

    def __init__(self, sock: socket.socket, incoming: Any, timeout: float) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._timeout = timeout
        self._last_heard = time.monotonic()
        self._buffer = bytearray()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Readable when something has come."""
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Never waits, and never fails: `receive` says that the other side is lost."""
        body = msgspec.msgpack.encode(message)
        data = len(body).to_bytes(4, "big") + body
        with self._lock:
            # Messages are few and small: what finds no room is for somebody who has not read for long.
            with contextlib.suppress(OSError):
                if self._sock.send(data) == len(data):
                    return
            self.cut()

    def cut(self) -> None:
        """End it; whoever waits in `receive` hears of it."""
        with contextlib.suppress(OSError):  # it has ended
            self._sock.shutdown(socket.SHUT_RDWR)

    def receive(self, timeout: float) -> list[Any]:
        """What has come, waiting for it at most `timeout` seconds.

        Raises:
            ConnectionLostError: if there is nobody to hear any more.
        """
        ends = select.poll()
        ends.register(self._sock, select.POLLIN)
        if ends.poll(1000 * timeout):
            try:
                data = self._sock.recv(65536)
            except BlockingIOError:
                data = None
            except OSError as error:
                raise ConnectionLostError(f"closed its connection ({error.strerror})") from error
            if data == b"":
                raise ConnectionLostError("closed its connection")
            if data:
                self._last_heard = time.monotonic()
                self._buffer += data
        elif (silence := time.monotonic() - self._last_heard) > self._timeout:
            raise ConnectionLostError(f"has not been heard of for {silence:.0f} s")
        return self._take()

    def _take(self) -> list[Any]:
        messages = []
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > _MOST_BYTES:
                raise ConnectionLostError("does not speak as jaxllm does")
            if len(self._buffer) < 4 + length:
                break
            try:
                messages.append(self._decode(bytes(self._buffer[4 : 4 + length])))
            except msgspec.MsgspecError as error:
                raise ConnectionLostError(f"does not speak as this jaxllm does: {error}") from error
            del self._buffer[: 4 + length]
        return messages

    def close(self) -> None:
        """End it once the other side has read what was sent, or has had a second for it."""
        with contextlib.closing(self._sock), contextlib.suppress(OSError):  # it has ended
            self._sock.shutdown(socket.SHUT_WR)
            # To close a socket with something unread takes back what the other side has not read yet.
            deadline = time.monotonic() + _CLOSE_S
            while (left := deadline - time.monotonic()) > 0:
                if select.select([self._sock], [], [], left)[0] and not self._sock.recv(65536):
                    break


def version() -> str:
    """Of jaxllm; "unknown" if it is not installed."""
    try:
        return importlib.metadata.version("jaxllm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def comparable(config: EngineConfig) -> dict[str, str]:
    """What must be the same on all machines, by the names of fields: an answer must not depend on which engine gives it."""
    found = {name: repr(getattr(config, name)) for name in ("attention_backend", "matmul_backend")}
    for section in (config.model.decoder, config.model, config.cache, config.scheduler, config.parallel):
        for one in dataclasses.fields(section):
            if one.name not in _OWN_FIELDS:
                found[one.name] = repr(getattr(section, one.name))
    return found


def differences(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """For people; "" if there are none."""
    names = [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)]
    said = [f"{_short(name)} {_short(theirs.get(name))} there and {_short(ours.get(name))} here" for name in names[:_MOST_NAMED]]
    return ", ".join(said) + (f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")


def _short(text: str | None) -> str:
    if text is None:
        return "unknown"
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "…"


def ranks_text(ranks: Sequence[int]) -> str:
    """As in "ranks 2, 3 and 5"."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
