"""EngineGroup: the processes of data parallelism, from their start over their deaths to their end."""

import dataclasses
import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.core.types import EngineCoreOutputs
from jaxllm.engine.coordinator import CoordinatorProcess, Snapshot, SnapshotListener, free_ports
from jaxllm.engine.core_proc import Addresses, OutputType, send_to_all
from jaxllm.engine.engine_devices import engine_environment
from jaxllm.engine.engine_hub import EngineHub
from jaxllm.engine.engine_link import EngineLink, Put, socket_folder
from jaxllm.engine.errors import EngineDeadError, EngineStartError
from jaxllm.engine.ray_process import RayPlacement
from jaxllm.executor.abstract import Executor

logger = logging.getLogger(__name__)

# Seconds before an engine core that has died is started again; twice as many each time that it does not become ready.
FIRST_RESTART_DELAY_S = 1.0
# In a row; then it is given up.
MAX_FAILED_RESTARTS = 5


class EngineReady:
    """An engine core that had died is there again."""


# What came, from which engine core, and through which link: after a restart the same engine core has another one.
Item = tuple[int, EngineLink, EngineCoreOutputs | EngineDeadError | EngineReady]
PutItem = Callable[[Item], None]


class FrontEnd(NamedTuple):
    """Which of several front ends one is.

    Attributes:
        folder: of all their sockets; whoever has started the engine cores has made it.
        snapshots: where the coordinator publishes.
        remote: where it takes from and gives to engine cores of other machines, by engine index.
    """

    folder: str
    client_index: int
    client_count: int
    snapshots: str
    remote: Mapping[int, Addresses]

    def addresses(self, engine_index: int) -> Addresses:
        """Where it takes from and gives to an engine core."""
        if engine_index in self.remote:
            return self.remote[engine_index]
        start = f"ipc://{self.folder}/{self.client_index}-{engine_index}"
        return Addresses(f"{start}-inputs", f"{start}-outputs")


def _remote_addresses(host: str, engines: range) -> dict[int, Addresses]:
    ports = iter(free_ports(host, 2 * len(engines)))
    return {index: Addresses(f"tcp://{host}:{next(ports)}", f"tcp://{host}:{next(ports)}") for index in engines}


class EngineGroup:
    """The processes of data parallelism: a coordinator and the engine cores, all started at once.

    Args:
        put: gets, from the receiving threads, what an EngineLink's `put` gets, with the engine core's index and link before it.
        num_attached: further front ends, which say themselves that they are there; see attached.py. This one comes after them.

    Raises:
        As EngineLink; nothing is left running then.

    Attributes:
        links: by engine index, the latest that were ready.
        restarting: engine cores that have died and will be there again.
        snapshot: the last that the coordinator sent; None once it has been taken.
        last_snapshot: the last that the coordinator sent.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
        put: PutItem,
        num_attached: int = 0,
    ) -> None:
        self._prepare(config, put)
        self._executor_class, self._log_stats, self._num_attached = executor_class, log_stats, num_attached
        self._placement: RayPlacement | EngineHub | None = None  # of the engine cores that are not on this machine
        self._environments: list[dict[str, str]] = []  # of those that are
        num_local = config.parallel.num_local_engines
        if config.parallel.data_parallel_backend == "ray":
            if num_attached:
                raise ValueError(f"data_parallel_backend 'ray' needs api_server_count 1, got {num_attached}")
            self._placement = RayPlacement(config)
        else:
            self._environments = [engine_environment(config, index, num_local) for index in range(num_local)]
        self.folder = socket_folder()
        self._remote = [{} for _ in range(num_attached)]
        self._listener: SnapshotListener | None = None
        self.coordinator: CoordinatorProcess | None = None
        try:
            if self._placement is None and num_local < self.num_engines:
                self._placement = EngineHub(config)
                for remote in self._remote:
                    remote.update(_remote_addresses(self._placement.host, range(num_local, self.num_engines)))
            host = None if self._placement is None else self._placement.host
            self.coordinator = CoordinatorProcess(self.folder, self.num_engines, host)
            if not num_attached:
                self._listener = SnapshotListener(self.coordinator.addresses.snapshots, self._take_snapshot)
            for index in range(self.num_engines):
                self.links.append(self.start_link(index))
            if isinstance(self._placement, EngineHub):
                self._placement.open()
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Nothing is left running if this raises what EngineLink.wait_until_ready does."""
        try:
            for link in self.links:
                link.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _prepare(self, config: EngineConfig, put: PutItem) -> None:
        self.num_engines = config.parallel.data_parallel_size
        self.links: list[EngineLink] = []
        self.snapshot: Snapshot | None = None
        self.last_snapshot: Snapshot = [None] * self.num_engines
        self._config = config
        self._put = put
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._starting: dict[int, EngineLink] = {}
        self._restarts: list[threading.Thread] = []
        self.restarting: set[int] = set()
        self._remote: list[dict[int, Addresses]] = []  # of each FrontEnd

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why no engine core lives; None while one does, or will again."""
        deaths = [link.death for link in self.links]
        if self.restarting or any(death is None for death in deaths):
            return None
        return EngineDeadError("; ".join(dict.fromkeys(map(str, deaths))))

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        self.snapshot = self.last_snapshot = snapshot

    def front_end(self, client_index: int) -> FrontEnd:
        """Of those that are attached."""
        assert self.coordinator is not None
        snapshots, remote = self.coordinator.addresses.snapshots, self._remote[client_index]
        return FrontEnd(self.folder, client_index, self._num_attached, snapshots, remote)

    def start_link(self, index: int) -> EngineLink:
        """A link to engine core `index`, which is not ready yet."""

        def put(item: EngineCoreOutputs | EngineDeadError) -> None:
            if isinstance(item, EngineDeadError):
                self._tell_attached(index, link)
                self._begin_restart(index)
            self._put((index, link, item))

        link = self._make_link(index, put)
        return link

    def _make_link(self, index: int, put: Put) -> EngineLink:
        assert self.coordinator is not None
        is_here = index < len(self._environments)
        # One progress bar says what all of them do.
        config = dataclasses.replace(self._config, use_tqdm_on_load=self._config.use_tqdm_on_load and index == 0)
        return EngineLink(
            config,
            self._executor_class,
            self._log_stats,
            put,
            engine_index=index,
            coordinator=self.coordinator.addresses.loads,
            environment=self._environments[index] if is_here else None,
            placement=None if is_here else self._placement,
            other_front_ends=[self.front_end(client).addresses(index) for client in range(self._num_attached)],
        )

    def _tell_attached(self, index: int, link: EngineLink) -> None:
        """From the receiving thread of the link that has died: front ends cannot see for themselves what another machine's do."""
        told = [remote[index] for remote in self._remote if index in remote]
        if told and not self._closed.is_set():
            frames = [str(link.death).encode(), str(link.description["pid"]).encode()]
            args = (told, OutputType.DEAD, frames)
            threading.Thread(target=send_to_all, args=args, daemon=True, name=f"death-{index}").start()

    def _begin_restart(self, index: int) -> None:
        """From the receiving thread of the link that has died."""
        with self._lock:
            if not self._config.parallel.data_parallel_restart or not self._is_wanted(index):
                return
            self.restarting.add(index)
            thread = threading.Thread(target=self._restart, args=(index,), daemon=True, name=f"restart-{index}")
            self._restarts = [*(other for other in self._restarts if other.is_alive()), thread]
            thread.start()

    def _restart(self, index: int) -> None:
        dead = self.links[index]
        for failures in range(MAX_FAILED_RESTARTS):
            self._closed.wait(FIRST_RESTART_DELAY_S * 2**failures)
            with self._lock:
                if not self._is_wanted(index):
                    self.restarting.discard(index)
                    return
                link = self._starting[index] = self.start_link(index)
            try:
                link.wait_until_ready()
            except (ValueError, EngineStartError) as error:
                if not self._closed.is_set():
                    logger.error("engine core %d does not start again: %s", index, error)
                continue
            finally:
                with self._lock:
                    del self._starting[index]
            self._replace(index, link)
            dead.close()
            return
        self.restarting.discard(index)
        # Whoever waits for outputs looks again whether there is hope.
        self._put((index, dead, EngineDeadError(f"{dead.death}; it could not be started again")))

    def _replace(self, index: int, link: EngineLink) -> None:
        with self._lock:
            is_late = not self._is_wanted(index)
            self.restarting.discard(index)
            if not is_late:
                self.links[index] = link
        if is_late:
            link.close()
        else:
            logger.info("engine core %d is there again", index)
            self._put((index, link, EngineReady()))

    def _is_wanted(self, index: int) -> bool:
        return not self._closed.is_set() and index < self.num_engines

    def grow(self, num_engines: int) -> list[EngineLink]:
        """Start engine cores until there are `num_engines`, and wait until all are ready. Blocks.

        Returns:
            The new ones.

        Raises:
            As `wait_until_ready`; none of the new ones is left running then.
        """
        new: list[EngineLink] = []
        first = len(self.links)
        try:
            for index in range(first, num_engines):
                with self._lock:
                    if self._closed.is_set():
                        raise EngineDeadError("the engine was shut down")
                    link = self._starting[index] = self.start_link(index)
                new.append(link)
            for link in new:
                link.wait_until_ready()
        except BaseException:
            for link in new:
                link.close()
            raise
        finally:
            with self._lock:
                for index in range(first, num_engines):
                    self._starting.pop(index, None)
        with self._lock:
            is_late = self._closed.is_set()
            if not is_late:
                self.links += new
                self.num_engines = num_engines
        if is_late:
            for link in new:
                link.close()
            raise EngineDeadError("the engine was shut down")
        return new

    def shrink(self, num_engines: int) -> None:
        """End the last engine cores, which have no requests. Blocks."""
        with self._lock:
            if self._closed.is_set():
                return
            self.num_engines = num_engines
            leaving = self.links[num_engines:]
            del self.links[num_engines:]
        for link in leaving:
            link.ask_to_end()
        for link in leaving:
            link.close()

    def close(self, drain_timeout: float = 0.0) -> None:
        """End all processes. May be called more than once; see EngineLink.close."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            # The thread that waits for it to become ready does the rest.
            for link in self._starting.values():
                link.process.kill()
        for thread in self._restarts:
            thread.join()
        try:
            for link in self.links:
                link.ask_to_end(drain_timeout)
            for link in self.links:
                link.close(drain_timeout)
        finally:
            if isinstance(self._placement, EngineHub):
                self._placement.close()
            if self._listener is not None:
                self._listener.close()
            if self.coordinator is not None:
                self.coordinator.close()
            shutil.rmtree(self.folder, ignore_errors=True)
