"""SyncMPClient and AsyncMPClient: an engine core in a process of its own, at the other end of an EngineLink."""

import asyncio
import logging
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.core.types import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from jaxllm.engine.core import PauseMode
from jaxllm.engine.core_client import EngineCoreClient
from jaxllm.engine.core_proc import InputType
from jaxllm.engine.engine_link import EngineLink, Mailbox, Put
from jaxllm.engine.errors import EngineDeadError
from jaxllm.engine.serial import (
    encode_request,
)
from jaxllm.executor.abstract import Executor

logger = logging.getLogger(__name__)


class MPClient:
    """What both clients have in common.

    Raises:
        As EngineLink and its `wait_until_ready`.
    """

    def __init__(self, config: EngineConfig, executor_class: type[Executor] | None, log_stats: bool, put: Put) -> None:
        self._link = EngineLink(config, executor_class, log_stats, put)
        self._link.wait_until_ready()
        # The receiving thread holds the link, not the client: a client that is forgotten ends its process. In a thread of its
        # own, since the collector may find it in any thread, the receiving one included.
        closer = threading.Thread(target=self._link.close, name="engine-close")
        weakref.finalize(self, closer.start).atexit = False

    @property
    def num_gpu_blocks(self) -> int:
        return self._link.description["num_gpu_blocks"]

    @property
    def pid(self) -> int:
        """Of the engine core's process."""
        return self._link.process.pid

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine core is dead; None while it lives."""
        return self._link.death

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. One that the engine core refuses ends with an error."""
        self._link.send(InputType.ADD, encode_request(request))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored. A dead engine core has none."""
        if request_ids:
            self._link.abort(request_ids)

    def shutdown(self, drain_timeout: float = 0.0) -> None:
        """End the engine core and its process. May be called more than once.

        Args:
            drain_timeout: seconds in which unfinished requests may run to their end.
        """
        self._link.close(drain_timeout)


class SyncMPClient(MPClient, EngineCoreClient):
    """For a front end without an event loop. The engine core steps by itself; `get_output` waits for what it gives."""

    def __init__(self, config: EngineConfig, executor_class: type[Executor] | None, log_stats: bool) -> None:
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | EngineDeadError] = queue.SimpleQueue()
        self._unfinished: set[str] = set()
        super().__init__(config, executor_class, log_stats, self._outputs.put)

    def get_output(self) -> EngineCoreOutputs:
        try:
            # Without an unfinished request there may never be another output.
            outputs = self._outputs.get(block=bool(self._unfinished))
        except queue.Empty:
            return EngineCoreOutputs()
        if isinstance(outputs, EngineDeadError):
            self._outputs.put(outputs)  # for the next call
            self._link.check_alive()
            raise AssertionError("an engine core that is dead has a death")
        self._unfinished -= outputs.finished_requests or set()
        return outputs

    def add_request(self, request: EngineCoreRequest) -> None:
        super().add_request(request)
        self._unfinished.add(request.request_id)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self._link.call("reset_prefix_cache", reset_running_requests).result()

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return self._link.call("collective_rpc", method, timeout, tuple(args), dict(kwargs or {})).result()

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        self._link.call("pause", mode, clear_cache).result()

    def resume(self) -> None:
        self._link.call("resume").result()

    def is_paused(self) -> bool:
        return self._link.call("is_paused").result()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        self._link.call("sleep", level, mode).result()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self._link.call("wake_up", _tags(tags)).result()

    def is_sleeping(self) -> bool:
        return self._link.call("is_sleeping").result()

    def get_stats(self) -> SchedulerStats:
        return self._link.call("get_stats").result()

    def check_health(self) -> None:
        self._link.call("check_health").result()


class AsyncEngineCoreCalls(ABC):
    """The calls of SyncMPClient as coroutines."""

    @abstractmethod
    async def _call(self, method: str, *args: Any) -> Any: ...

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return await self._call("reset_prefix_cache", reset_running_requests)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return await self._call("collective_rpc", method, timeout, tuple(args), dict(kwargs or {}))

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        await self._call("pause", mode, clear_cache)

    async def resume(self) -> None:
        await self._call("resume")

    async def is_paused(self) -> bool:
        return await self._call("is_paused")

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        await self._call("sleep", level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._call("wake_up", _tags(tags))

    async def is_sleeping(self) -> bool:
        return await self._call("is_sleeping")

    async def get_stats(self) -> SchedulerStats:
        return await self._call("get_stats")

    async def check_health(self) -> None:
        await self._call("check_health")


class AsyncMPClient(MPClient, AsyncEngineCoreCalls):
    """For a front end with an event loop. The methods of SyncMPClient; those that wait are coroutines.

    All of it belongs to one event loop at a time, but for the constructor and `shutdown`.
    """

    def __init__(self, config: EngineConfig, executor_class: type[Executor] | None, log_stats: bool) -> None:
        self.num_engines = 1
        self._outputs: Mailbox[EngineCoreOutputs | EngineDeadError] = Mailbox()
        # The receiving thread holds the mailbox, not the client.
        super().__init__(config, executor_class, log_stats, self._outputs.put)

    def add_request(self, request: EngineCoreRequest, engine: int | None = None) -> None:
        """Queue a request. One that the engine core refuses ends with an error.

        Args:
            engine: 0, or None; other clients have more than one engine core.
        """
        assert engine in (None, 0), engine
        super().add_request(request)

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs, waiting for them. For one caller at a time.

        Raises:
            EngineDeadError: once, after the last outputs, and ever after.
        """
        outputs = await self._outputs.first()
        if isinstance(outputs, EngineDeadError):
            raise EngineDeadError(str(outputs))
        return self._outputs.items.popleft()  # type: ignore[return-value]

    async def _call(self, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self._link.call(method, *args))


def _tags(tags: Sequence[str] | None) -> Any:
    return tags if tags is None or isinstance(tags, str) else list(tags)
