"""The life of the HTTP server: from an engine that runs to an exit code."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn

from jaxllm.serve.app import build_app
from jaxllm.serve.args import ServeArgs
from jaxllm.serve.context import Context
from jaxllm.serve.metrics import StatsLogger, all_metrics

logger = logging.getLogger(__name__)

EXIT_ENGINE_DIED = 1
KEEP_ALIVE_SECONDS = 75  # longer than most clients keep idle connections, so that none is closed under a request
FLUSH_SECONDS = 5.0  # for clients to read the ends of their streams when the server stops
DEAD_SECONDS = 1.0  # for which a server whose engine died still answers, with errors
POLL_SECONDS = 0.05
QUIET_PATHS = ("/health", "/metrics", "/ping", "/load")
BACKLOG = 2048


class _UvicornServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are handled here, not by uvicorn


class _QuietAccessLog(logging.Filter):
    """Leaves out what is called every second."""

    def filter(self, record: logging.LogRecord) -> bool:
        path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
        return str(path).partition("?")[0] not in QUIET_PATHS


def bind(args: ServeArgs) -> socket.socket:
    """The socket to listen on, taken before anything slow begins.

    Raises:
        ValueError: if it cannot be had, saying why.
    """
    where = args.uds or f"{args.host or '0.0.0.0'}:{args.port}"
    if args.uds is not None:
        family, address = socket.AF_UNIX, args.uds
    else:
        family = socket.AF_INET6 if args.host is not None and ":" in args.host else socket.AF_INET
        address = (args.host or "0.0.0.0", args.port)  # type: ignore[assignment]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if args.uds is None:
            # A port that nobody listens on may be taken again at once. One that somebody does is refused all the same.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"cannot listen on {where}: {reason}") from error
    return sock


def address_of(sock: socket.socket, args: ServeArgs) -> str:
    """What a client on this machine calls the server."""
    if args.uds is not None:
        return f"unix:{args.uds}"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if args.ssl_certfile else 'http'}://{host}:{port}"


class ApiServer:
    """Serves until it is told to stop or the engine dies.

    Args:
        sock: bound, and closed in the end.
    """

    def __init__(self, context: Context, sock: socket.socket) -> None:
        args = context.args
        self.context = context
        self.sock = sock
        self.num_stops = 0
        self.stop_event = asyncio.Event()
        config = uvicorn.Config(
            build_app(context),
            log_config=None,
            access_log=not args.disable_uvicorn_access_log,
            lifespan="off",
            ws="none",
            server_header=False,
            root_path=args.root_path,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            backlog=BACKLOG,
        )
        self.uvicorn = _UvicornServer(config)
        logging.getLogger("uvicorn.access").addFilter(_QuietAccessLog())

    def stop(self) -> None:
        """Stop accepting and drain. Called again: stop at once."""
        self.num_stops += 1
        self.stop_event.set()

    async def run(self) -> int:
        """Serve.

        Returns:
            0 if it was told to stop, EXIT_ENGINE_DIED if the engine died.
        """
        listener = asyncio.create_task(self.uvicorn.serve([self.sock]))
        stats = None if not self.context.config.log_stats else asyncio.create_task(StatsLogger(self.context).run())
        publisher = None
        if (shared := self.context.shared_metrics) is not None:
            publisher = asyncio.create_task(shared.run(lambda: all_metrics(self.context)))
        tasks = [task for task in (listener, stats, publisher) if task is not None]
        try:
            await self._wait_until_over(listener)
            died = self.context.engine.dead_error
            if died is not None:
                logger.error("the engine has died: %s", died)
                await self._wait(DEAD_SECONDS)
            elif not self.num_stops:
                await listener  # uvicorn itself failed, and raises
                raise RuntimeError("the HTTP server ended by itself")
            await self._drain(listener)
            return EXIT_ENGINE_DIED if died is not None else 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def is_started(self) -> bool:
        """Whether it accepts connections."""
        return self.uvicorn.started

    async def _wait_until_over(self, listener: asyncio.Task[None]) -> None:
        while not (self.num_stops or self.context.engine.errored or listener.done()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop_event.wait(), POLL_SECONDS)

    async def _wait(self, seconds: float) -> None:
        """Wait, unless told to stop meanwhile."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop_event.wait(), seconds)

    async def _drain(self, listener: asyncio.Task[None]) -> None:
        context = self.context
        context.is_stopping = True
        self.uvicorn.should_exit = True
        timeout = context.args.shutdown_timeout
        if context.num_open and timeout and not context.engine.errored:
            logger.info("stopping; %d open requests get %g s to end", context.num_open, timeout)
            await self._until(timeout, lambda: not context.num_open or context.engine.errored)
        if num_aborted := await context.abort():
            logger.info("aborted %d requests", num_aborted)
        await self._until(FLUSH_SECONDS, listener.done)
        for connection in list(self.uvicorn.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]  # both protocols of uvicorn have one
        self.uvicorn.force_exit = True
        await self._until(FLUSH_SECONDS, listener.done, impatient=False)

    async def _until(self, timeout: float, is_over: Callable[[], bool], impatient: bool = True) -> None:
        """Wait at most `timeout` seconds; not at all once told twice to stop, if `impatient`."""
        deadline = time.monotonic() + timeout
        while not is_over() and time.monotonic() < deadline and not (impatient and self.num_stops > 1):
            await asyncio.sleep(POLL_SECONDS)
