"""Servers that a benchmark starts and ends itself."""

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from jaxllm.bench.client import NoServerError, OpenAIClient

_POLL_SECONDS = 0.2
# What a server gets to end by itself, and after that to be gone.
_TERM_SECONDS, _KILL_SECONDS = 30.0, 10.0
_LOG_LINES = 20


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@asynccontextmanager
async def running_server(command: Sequence[str], client: OpenAIClient, timeout: float) -> AsyncIterator[None]:
    """Start a server, wait until it answers, and end it and all its children after the block.

    Args:
        client: asks the address that the server is to listen on.
        timeout: seconds until it must answer.

    Raises:
        ValueError: with the end of its log, if it cannot be started, exits, or does not answer in time.
    """
    with tempfile.TemporaryFile("w+") as log:
        try:
            # A session of its own, so that one signal reaches its children too, and Ctrl-C reaches it through us only.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise ValueError(f"cannot start {' '.join(command)}: {error.strerror}") from error
        try:
            give_up = time.monotonic() + timeout
            while not await _answers(client):
                if process.poll() is not None:
                    raise ValueError(f"{' '.join(command)} ended with exit code {process.returncode}:\n{_tail(log)}")
                if time.monotonic() > give_up:
                    raise ValueError(f"{' '.join(command)} does not answer after {timeout:g} s:\n{_tail(log)}")
                await asyncio.sleep(_POLL_SECONDS)
            yield
        finally:
            await asyncio.to_thread(_end, process)


async def _answers(client: OpenAIClient) -> bool:
    try:
        await client.models()
    except NoServerError:
        return False
    return True


def _tail(log: "tempfile._TemporaryFileWrapper[str]") -> str:
    log.seek(0)
    return "\n".join(log.read().splitlines()[-_LOG_LINES:])


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        # Its children are in the same group; whatever it left behind is ended by the next signal.
    process.wait()
