"""Several API servers before the same engines, each in a process of its own: one Python process does not parse, tokenize and
stream for more requests than one core can.

The first process listens, starts the engines and the servers, and ends them; it serves nothing itself. All servers accept from
its socket. One that dies is started again: only its own connections are lost.
"""

import asyncio
import faulthandler
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvloop

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_group import EngineGroup, FrontEnd
from jaxllm.engine.engine_process import EngineProcess
from jaxllm.engine.errors import EngineDeadError, EngineStartError
from jaxllm.executor.abstract import Executor
from jaxllm.serve.args import ServeArgs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_PARENT_GONE = 3
POLL_MS = 200
STOP_GRACE_S = 30.0  # beyond --shutdown-timeout
# A server that dies sooner than this after its start, so many times in a row, is a fault that another start does not mend.
EARLY_DEATH_S = 10.0
MAX_EARLY_DEATHS = 3
_READY, _STOP = b"r", b"s"


@dataclass(frozen=True)
class EngineParts:
    """What it takes to start engines and the servers before them. All of it can be pickled."""

    config: EngineConfig
    load_tokenizer: "Callable[[], PreTrainedTokenizerFast | None]"
    executor_class: type[Executor] | None = None


@dataclass(frozen=True)
class ApiServerMain:
    """All that a new process needs to become an API server.

    Attributes:
        listener: the file descriptor of the socket to accept from.
    """

    args: ServeArgs
    parts: EngineParts
    front_end: FrontEnd
    listener: int

    def __call__(self, link: socket.socket) -> None:
        from jaxllm.engine.async_llm import AsyncLLM
        from jaxllm.serve.cli import set_up_logging
        from jaxllm.serve.context import Context
        from jaxllm.serve.server import ApiServer
        from jaxllm.serve.shared_metrics import SharedMetrics

        faulthandler.enable()
        set_up_logging(self.args, f" [API server {self.front_end.client_index}]")
        stops = _Stops(link)
        engine = AsyncLLM(self.parts.config, self.parts.load_tokenizer(), front_end=self.front_end)
        context = Context(engine, engine.config, engine.tokenizer, self.args)
        context.shared_metrics = SharedMetrics(self.front_end.folder, self.front_end.client_index, self.front_end.client_count)
        sock = socket.socket(fileno=self.listener)

        async def serve() -> int:
            server = ApiServer(context, sock)
            stops.go_to(asyncio.get_running_loop(), server.stop)
            running = asyncio.create_task(server.run())
            while not (server.is_started or running.done()):
                await asyncio.sleep(0.01)
            link.sendall(_READY)
            return await running

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(serve())
        engine.shutdown()
        raise SystemExit(code)


class _Stops:
    """Hears from the first process: that the server is to stop, and that it is gone itself."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._where: tuple[asyncio.AbstractEventLoop, Callable[[], None]] | None = None
        threading.Thread(target=self._hear, daemon=True, name="parent-watch").start()

    def go_to(self, loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
        self._where = loop, stop

    def _hear(self) -> None:
        while data := self._link.recv(1):
            assert data == _STOP, data
            if self._where is None:
                os._exit(0)  # it has not begun to serve
            self._where[0].call_soon_threadsafe(self._where[1])
        os._exit(EXIT_PARENT_GONE)


class _Server:
    """The process of one API server, and of its successors."""

    def __init__(self, main: ApiServerMain) -> None:
        self.main = main
        self.num_early_deaths = 0
        self.start()

    @property
    def index(self) -> int:
        return self.main.front_end.client_index

    def start(self) -> None:
        self.started = time.monotonic()
        self.is_ready = False
        self.process = EngineProcess(self.main, f"api-server-{self.index}", pass_fds=[self.main.listener])

    def has_ended(self) -> bool:
        """Takes in that it is ready, too."""
        if not select.select([self.process], [], [], 0)[0]:
            return False
        if self.process.hear() == _READY:
            self.is_ready = True
            return False
        return True


class Launcher:
    """The first process.

    Args:
        sock: bound; the servers listen on it.

    Raises:
        ValueError, EngineStartError: as EngineGroup; nothing is left running then.
    """

    def __init__(self, args: ServeArgs, parts: EngineParts, sock: socket.socket) -> None:
        self._args = args
        self.num_stops = 0
        self.last_signal = 0
        self._group = EngineGroup(parts.config, parts.executor_class, parts.config.log_stats, _ignore, args.api_server_count)
        self._servers: list[_Server] = []
        try:
            for index in range(args.api_server_count):
                self._servers.append(_Server(ApiServerMain(args, parts, self._group.front_end(index), sock.fileno())))
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Until the engines are there and every server serves.

        Raises:
            ValueError, EngineStartError: if one does not come; nothing is left running then.
        """
        try:
            self._group.wait_until_ready()
            while not all(server.is_ready for server in self._servers):
                for server in self._servers:
                    if server.has_ended():
                        how = server.process.how_it_ended()
                        raise EngineStartError(f"API server {server.index} {how} before it was ready; see its output")
                time.sleep(0.02)
        except BaseException:
            self.close()
            raise

    def run(self) -> int:
        """Until it is told to stop, or the engines die. Returns the exit code."""
        wake_up, end = os.pipe()
        os.set_blocking(end, False)

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.num_stops += 1
            self.last_signal = number
            os.write(end, b"\0")

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._watch(wake_up)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake_up)
            os.close(end)

    def _watch(self, wake_up: int) -> int:
        while not self.num_stops:
            select.select([wake_up, *(server.process for server in self._servers)], [], [], POLL_MS / 1000)
            died = self._group.dead_error
            if died is not None:
                logger.error("the engines have died: %s", died)
                break
            for server in self._servers:
                if server.has_ended() and not self._replace(server):
                    return EXIT_FAILED
        return self._stop(wake_up)

    def _replace(self, server: _Server) -> bool:
        """Start a server again that has died. False if that has failed too often."""
        how = server.process.how_it_ended()
        is_early = time.monotonic() - server.started < EARLY_DEATH_S
        server.num_early_deaths = server.num_early_deaths + 1 if is_early else 0
        server.process.close()
        for link in self._group.links:
            try:
                link.call("abort_front_end", server.index)
            except EngineDeadError:
                continue  # it has ended them in its own way
        if server.num_early_deaths >= MAX_EARLY_DEATHS:
            logger.error("API server %d %s, %d times in a row", server.index, how, server.num_early_deaths)
            return False
        logger.error("API server %d %s; it is started again", server.index, how)
        server.start()
        return True

    def _stop(self, wake_up: int) -> int:
        """Let the servers drain, and take further signals meanwhile."""
        died = self._group.dead_error is not None
        told = 0
        deadline = time.monotonic() + self._args.shutdown_timeout + STOP_GRACE_S
        while time.monotonic() < deadline and not all(server.has_ended() for server in self._servers):
            # Those that see for themselves that the engines are dead say so to their clients first.
            while told < self.num_stops:
                told += 1
                for server in self._servers:
                    server.process.tell(_STOP)
            select.select([wake_up], [], [], POLL_MS / 1000 if told >= self.num_stops else 0)
        if died:
            return EXIT_FAILED
        return 128 + self.last_signal if self.num_stops > 1 else 0

    def close(self) -> None:
        """End everything. May be called more than once."""
        for server in self._servers:
            if not server.process.has_ended():
                server.process.kill()
            server.process.close()
        self._group.close()


def _ignore(item: Any) -> None:
    """The first process has no requests, so that nothing comes but deaths, of which the group knows."""
