"""DPLBAsyncMPClient: several engine cores behind one client, which shares out the requests among them.

Each engine core is an EngineLink: a process, two sockets and a thread that puts what comes into one mailbox. A coordinator tells
how busy they are. Who gets a request is the LoadBalancer's matter.
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.checks import check_at_least
from jaxllm.config import EngineConfig
from jaxllm.core.kv_cache_utils import BlockHasher
from jaxllm.core.kv_events import PrefixIndex
from jaxllm.core.load_balancer import LoadBalancer
from jaxllm.core.request import prompt_block_hashes
from jaxllm.core.types import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from jaxllm.engine.attached import AttachedGroup
from jaxllm.engine.coordinator import Snapshot
from jaxllm.engine.core_proc import InputType
from jaxllm.engine.engine_group import EngineGroup, EngineReady, FrontEnd, Item
from jaxllm.engine.engine_link import EngineLink, Mailbox
from jaxllm.engine.errors import EngineDeadError, EngineLostError
from jaxllm.engine.mp_client import AsyncEngineCoreCalls
from jaxllm.engine.serial import encode_request
from jaxllm.executor.abstract import Executor

logger = logging.getLogger(__name__)

# How often it is looked whether engine cores that are to leave have done their work.
DRAIN_POLL_S = 0.02


class DPLBAsyncMPClient(AsyncEngineCoreCalls):
    """AsyncMPClient for several engine cores. Calls go to all that live.

    An engine core that dies takes nothing with it but its own requests: `get_output` hands them back in an EngineLostError.

    Args:
        front_end: to use engine cores that another process starts, with other front ends.

    Raises:
        As EngineLink and its `wait_until_ready`; nothing is left running then.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
        front_end: FrontEnd | None = None,
    ) -> None:
        self._mailbox: Mailbox[Item] = Mailbox()
        client = (0, 1) if front_end is None else (front_end.client_index, front_end.client_count)
        self.balancer = LoadBalancer(config.parallel.data_parallel_size, *client)
        self._engine_of: dict[str, int] = {}  # of every unfinished request
        self._requests: list[dict[str, EngineCoreRequest]] = [{} for _ in range(config.parallel.data_parallel_size)]
        # For routing by prefix; what engine cores have cached, and how to hash a prompt as they do.
        self._prefixes: PrefixIndex | None = None
        if config.parallel.data_parallel_routing == "prefix":
            self._prefixes = PrefixIndex(config.parallel.data_parallel_size)
            self._block_hasher = BlockHasher(config.cache.block_size)
        self._deaths: list[EngineDeadError | None] = [None] * config.parallel.data_parallel_size
        # What an engine core that comes back must be told: that all are paused or asleep.
        self._standing_calls: list[tuple[str, tuple[Any, ...]]] = []
        # The group's threads hold the mailbox, not the client: a client that is forgotten ends its processes.
        self._group: EngineGroup
        if front_end is None:
            self._group = EngineGroup(config, executor_class, log_stats, self._mailbox.put)
        else:
            self._group = AttachedGroup(config, front_end, self._mailbox.put)
        self._group.wait_until_ready()
        closer = threading.Thread(target=self._group.close, name="engines-close")
        weakref.finalize(self, closer.start).atexit = False
        # As of the items of the mailbox that have been read.
        self._links = list(self._group.links)
        self._can_scale = config.parallel.data_parallel_backend == "ray"
        self._is_scaling = False
        self.num_engines = len(self._links)  # that take requests or will again

    async def scale(self, num_engines: int) -> None:
        """Change the number of engine cores while they serve.

        New ones take requests once they are ready. The last ones leave: they take no more requests, run those that they have to
        their end, and are ended.

        Raises:
            ValueError: if `num_engines` is no number of engine cores, or their number cannot change, or is changing.
            EngineStartError: if a new one does not become ready; all is as before then.
        """
        check_at_least("data_parallel_size", num_engines, 1)
        if not self._can_scale:
            raise ValueError("the number of engines is fixed: only data_parallel_backend 'ray' can change it")
        if self._is_scaling:
            raise ValueError(f"data_parallel_size is changing already, got {num_engines}")
        self._is_scaling = True
        try:
            if num_engines > self.num_engines:
                self._welcome_new(await asyncio.to_thread(self._group.grow, num_engines))
            elif num_engines < self.num_engines:
                await self._dismiss(num_engines)
        finally:
            self._is_scaling = False

    def _welcome_new(self, links: Sequence[EngineLink]) -> None:
        first = len(self._links)
        self._links += links
        self._requests += [{} for _ in links]
        self._deaths += [None] * len(links)
        self.num_engines = len(self._links)
        self.balancer.resize(self.num_engines)
        if self._prefixes is not None:
            self._prefixes.num_engines = self.num_engines
        for index in range(first, self.num_engines):
            self.balancer.set_available(index, False)
            self._welcome(index, self._links[index])

    async def _dismiss(self, num_engines: int) -> None:
        """Let the last engine cores drain and end."""
        self.num_engines = num_engines
        for index in range(num_engines, len(self._links)):
            self.balancer.set_available(index, False)
        while any(self._requests[num_engines:]):
            await asyncio.sleep(DRAIN_POLL_S)
        for index in range(num_engines, len(self._links)):
            if self._prefixes is not None:
                self._prefixes.forget(index)
        # What still comes from them is for nobody.
        del self._links[num_engines:], self._requests[num_engines:], self._deaths[num_engines:]
        self.balancer.resize(num_engines)
        if self._prefixes is not None:
            self._prefixes.num_engines = num_engines
        await asyncio.to_thread(self._group.shrink, num_engines)

    @property
    def num_gpu_blocks(self) -> int:
        """Of all engine cores together."""
        return sum(link.description["num_gpu_blocks"] for link in self._group.links)

    @property
    def pids(self) -> list[int]:
        """Of the engine cores' processes."""
        return [link.process.pid for link in self._group.links]

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why no engine core lives; None while one does, or will again."""
        return self._group.dead_error

    @property
    def loads(self) -> Snapshot:
        """What the coordinator last said of each engine core."""
        return self._group.last_snapshot

    def num_unfinished(self, engine: int) -> int:
        """Requests that were given to an engine core and have not ended."""
        return len(self._requests[engine])

    def add_request(self, request: EngineCoreRequest, engine: int | None = None) -> None:
        """Queue a request. One that the engine core refuses ends with an error.

        Args:
            engine: which engine core is to run it; None for the one with the least to do.

        Raises:
            EngineDeadError: if no engine core lives.
            EngineLostError: if the one that is asked for does not.
        """
        if engine is not None and engine >= self.num_engines:
            raise EngineLostError(f"engine core {engine} is about to leave", engine)
        frames = encode_request(request)
        while True:
            index = self._choose(request) if engine is None else engine
            link = self._links[index]
            try:
                link.send(InputType.ADD, frames)
            except EngineDeadError as error:
                if engine is not None:
                    raise EngineLostError(str(error), index) from None
                # Its last message has not been read yet.
                self.balancer.finish(index)
                self.balancer.set_available(index, False)
                continue
            if engine is not None:
                self.balancer.place(index)
            self._engine_of[request.request_id] = index
            self._requests[index][request.request_id] = request
            return

    def _choose(self, request: EngineCoreRequest) -> int:
        snapshot, self._group.snapshot = self._group.snapshot, None
        for load in snapshot or ():
            if load is not None and load.engine_index < self.num_engines:
                self.balancer.update(load.engine_index, load.waiting, load.running)
        cached = None
        if self._prefixes is not None:
            cached = self._prefixes.cached_blocks(prompt_block_hashes(request, self._block_hasher))
        try:
            return self.balancer.pick(cached)
        except LookupError:
            raise self.dead_error or EngineDeadError("no engine core can take a request now") from None

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests, each where it runs; unknown ids are ignored. A dead engine core has none."""
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            if (engine := self._engine_of.get(request_id)) is not None:
                by_engine.setdefault(engine, []).append(request_id)
        for engine, ids in by_engine.items():
            self._links[engine].abort(ids)

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs of any engine core, waiting for them. For one caller at a time.

        Raises:
            EngineLostError: if an engine core has died, once for each, after its last outputs.
            EngineDeadError: once no engine core lives and all that is known of them has been told, and ever after.
        """
        while True:
            if not self._mailbox.items and (error := self.dead_error) is not None and all(self._deaths):
                raise error
            await self._mailbox.first()
            index, link, item = self._mailbox.items.popleft()
            if index >= len(self._links):
                continue  # it has left
            if isinstance(item, EngineReady):
                self._welcome(index, link)
                continue
            if isinstance(item, EngineDeadError):
                raise self._lose(index, item)
            item.engine_index = index
            if item.kv_events is not None:
                if self._prefixes is not None:
                    self._prefixes.update(index, item.kv_events)
                continue  # it comes alone
            for request_id in item.finished_requests or ():
                if self._requests[index].pop(request_id, None) is not None:
                    del self._engine_of[request_id]
                    self.balancer.finish(index)
            return item

    def _lose(self, index: int, death: EngineDeadError) -> EngineLostError:
        requests, self._requests[index] = self._requests[index], {}
        for request_id in requests:
            del self._engine_of[request_id]
        self._deaths[index] = death
        if self._prefixes is not None:
            self._prefixes.forget(index)
        self.balancer.finish(index, len(requests))
        self.balancer.set_available(index, False)
        return EngineLostError(str(death), index, list(requests.values()))

    def _welcome(self, index: int, link: EngineLink) -> None:
        if link.death is not None:
            return  # it has not lived long, and another one is on its way
        if index >= self.num_engines:
            return  # it is about to leave
        self._links[index] = link
        self._deaths[index] = None
        try:
            for method, args in self._standing_calls:
                link.call(method, *args)
        except EngineDeadError:
            return  # of which the mailbox tells next
        self.balancer.set_available(index, True)

    async def _call(self, method: str, *args: Any) -> Any:
        """Call a method of every engine core that lives, all at once, and make one result of theirs."""
        futures = []
        for link in self._links:
            if link.death is None:
                try:
                    futures.append(asyncio.wrap_future(link.call(method, *args)))
                except EngineDeadError:
                    continue
        results = await asyncio.gather(*futures, return_exceptions=True)
        # One that died meanwhile does not count, unless none is left.
        kept = [result for result in results if not isinstance(result, EngineDeadError)]
        if not kept:
            raise next(iter(results), None) or self.dead_error or EngineDeadError("no engine core lives")
        for result in kept:
            if isinstance(result, BaseException):
                raise result
        self._note_standing(method, args)
        return _COMBINED.get(method, _first)(kept)

    def _note_standing(self, method: str, args: tuple[Any, ...]) -> None:
        if method == "resume" or (method == "wake_up" and args[0] is None):
            self._standing_calls = []
        elif method == "pause":
            self._standing_calls = [("pause", ("abort", False))]
        elif method == "sleep":
            self._standing_calls = [("sleep", (args[0], "abort"))]
        elif method == "wake_up":
            self._standing_calls.append((method, args))

    def shutdown(self, drain_timeout: float = 0.0) -> None:
        """End all engine cores and their processes. May be called more than once.

        Args:
            drain_timeout: seconds in which unfinished requests may run to their end.
        """
        self._group.close(drain_timeout)


def _first(results: Sequence[Any]) -> Any:
    return results[0]


def _sum_of_stats(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    return SchedulerStats(
        num_running_reqs=sum(one.num_running_reqs for one in stats),
        num_waiting_reqs=sum(one.num_waiting_reqs for one in stats),
        kv_cache_usage=sum(one.kv_cache_usage for one in stats) / len(stats),
    )


# What the results of all engine cores say together; the other calls have none.
_COMBINED: dict[str, Callable[[Sequence[Any]], Any]] = {
    "reset_prefix_cache": all,
    "is_paused": all,
    "is_sleeping": any,
    "get_stats": _sum_of_stats,
    "collective_rpc": lambda results: [result for one in results for result in one],
}
