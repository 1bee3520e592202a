"""A machine that has engine cores only: they serve the front end of another machine; see engine_hub.py.

It starts and ends engine cores as the front end says, and tells it how they ended. When either side is lost, however, nothing of
the machine's is left running: the engine cores end with this process, and this process with the front end.
"""

import contextlib
import dataclasses
import logging
import os
import select
import signal
import socket
import time

from jaxllm.config import EngineConfig
from jaxllm.engine.core_proc import EngineCoreMain
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.engine.engine_devices import engine_environment
from jaxllm.engine.engine_process import EngineProcess
from jaxllm.engine.errors import FrontEndLostError
from jaxllm.engine.machine_wire import (
    BEAT_S,
    Beat,
    Connection,
    ConnectionLostError,
    End,
    Ended,
    Join,
    Kill,
    Leaving,
    Refused,
    Start,
    Started,
    ToMachine,
    Welcome,
    comparable,
    ranks_text,
    version,
)
from jaxllm.executor.abstract import Executor

logger = logging.getLogger(__name__)

# Between two attempts to connect, and between two lines of the log that say so.
RETRY_S, REMINDER_S = 1.0, 10.0
_CONNECT_S = 5.0


def headless_ranks(args: EngineArgs) -> range:
    """Of this machine's engine cores.

    Raises:
        ValueError: naming the argument and its value.
    """
    for name, wrong in (
        ("data_parallel_hybrid_lb", args.data_parallel_hybrid_lb),
        ("data_parallel_external_lb", args.data_parallel_external_lb),
        ("data_parallel_rank", args.data_parallel_rank is not None),
    ):
        if wrong:
            raise ValueError(
                f"headless excludes {name}: its engines belong to the server at data_parallel_address, those of a load balancer "
                "outside to a server of their own"
            )
    if args.data_parallel_backend != "mp":
        raise ValueError(
            f"headless excludes data_parallel_backend {args.data_parallel_backend!r}: Ray starts engines on other machines itself"
        )
    if args.nnodes > 1:
        raise ValueError(f"headless with nnodes {args.nnodes} is for node_rank 1 and above: on 0 the server runs")
    size, start = args.data_parallel_size, args.data_parallel_start_rank or 0
    num_engines = size - start if args.data_parallel_size_local is None else args.data_parallel_size_local
    if start < 0 or num_engines < 1 or start + num_engines > size:
        raise ValueError(
            f"headless: data_parallel_start_rank {start} and data_parallel_size_local {num_engines} must lie in "
            f"data_parallel_size {size}"
        )
    return range(start, start + num_engines)


def headless_config(args: EngineArgs) -> EngineConfig:
    """As the front end sees it: not one of these engines is on its machine.

    Raises:
        ValueError: naming the argument and its value.
    """
    return dataclasses.replace(args, data_parallel_start_rank=None, data_parallel_size_local=0).create_engine_config("server")


def run_headless(config: EngineConfig, ranks: range, executor_class: type[Executor] | None = None) -> None:
    """Wait for the front end, join it, and run engine cores for it until it ends or this process is interrupted.

    Args:
        executor_class: of the engine cores; None for what `config` says.

    Raises:
        ValueError: if there are too few devices, or the front end refuses this machine.
        FrontEndLostError: if the front end is not there any more and has not said that it would end.
        KeyboardInterrupt: if it comes before the front end is there.
    """
    environments = [engine_environment(config, index, len(ranks)) for index in range(len(ranks))]
    parallel = config.parallel
    where = f"{parallel.data_parallel_address}:{parallel.data_parallel_rpc_port}"
    sock = _connect(parallel.data_parallel_address, parallel.data_parallel_rpc_port)
    with contextlib.closing(Connection(sock, ToMachine, parallel.worker_hang_timeout)) as connection:
        try:
            connection.send(Join(version(), ranks.start, len(ranks), comparable(config)))
            _Machine(connection, config, ranks, environments, executor_class).run()
            logger.info("the front end at %s needs this machine no more", where)
        except ConnectionLostError as error:
            raise FrontEndLostError(f"the front end at {where} {error}") from error


def _connect(address: str, port: int) -> socket.socket:
    next_reminder = time.monotonic() + RETRY_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=_CONNECT_S)
        except OSError as error:
            if time.monotonic() >= next_reminder:
                logger.info("waiting for the front end at %s:%d: %s", address, port, error)
                next_reminder = time.monotonic() + REMINDER_S
        time.sleep(RETRY_S)


class _Machine:
    """The engine cores of this machine, by the numbers that the front end has given their processes."""

    def __init__(
        self,
        connection: Connection,
        config: EngineConfig,
        ranks: range,
        environments: list[dict[str, str]],
        executor_class: type[Executor] | None,
    ) -> None:
        self._connection, self._config, self._ranks = connection, config, ranks
        self._environments, self._executor_class = environments, executor_class
        self._processes: dict[int, EngineProcess] = {}
        self._next_beat = 0.0

    def run(self) -> None:
        try:
            while all(map(self._obey, self._connection.receive(0))):
                self._beat()
                self._wait()
        except KeyboardInterrupt:
            logger.info("interrupted: the engine cores end")
            self._connection.send(Leaving("was told to stop"))
        finally:
            self._end_all()

    def _obey(self, message: ToMachine) -> bool:
        """False when the front end has ended."""
        if isinstance(message, Refused):
            raise ValueError(f"the front end refuses this machine: {message.why}")
        if isinstance(message, Welcome):
            logger.info("joined the front end, with %s", ranks_text(self._ranks))
        elif isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Kill) and (process := self._processes.get(message.process)) is not None:
            _kill(process)  # `_wait` notices its end
        return not isinstance(message, End)

    def _start(self, order: Start) -> None:
        index = order.rank - self._ranks.start
        # One progress bar says what all of them do.
        config = dataclasses.replace(self._config, use_tqdm_on_load=self._config.use_tqdm_on_load and index == 0)
        main = EngineCoreMain(
            config,
            self._executor_class,
            order.log_stats,
            order.front_ends,
            os.getpid(),
            None,
            logging.getLogger().getEffectiveLevel(),
            order.rank,
            order.coordinator,
        )
        try:
            process = EngineProcess(main, f"engine-core-{order.rank}", self._environments[index])
        except OSError as error:
            self._connection.send(Ended(order.process, f"could not be started: {error}"))
            return
        self._processes[order.process] = process
        self._connection.send(Started(order.process, process.pid))

    def _beat(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_S
            self._connection.send(Beat())

    def _wait(self) -> None:
        """For whatever comes first, and not longer than until the next sign of life."""
        ends = select.poll()
        for end in (self._connection, *self._processes.values()):
            ends.register(end, select.POLLIN)
        ready = {fd for fd, _ in ends.poll(1000 * BEAT_S)}
        for number, process in list(self._processes.items()):
            if process.fileno() in ready:
                how = process.how_it_ended()
                logger.info("an engine core's process, %d, %s", process.pid, how)
                process.kill()
                process.close()
                del self._processes[number]
                self._connection.send(Ended(number, how))

    def _end_all(self) -> None:
        for process in self._processes.values():
            _kill(process)
        for process in self._processes.values():
            process.kill()
            process.close()


def _kill(process: EngineProcess) -> None:
    """Without waiting for its end."""
    if not process.has_ended():
        os.kill(process.pid, signal.SIGKILL)
