"""SimEngine: the real scheduler and block manager of one engine on a virtual clock."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxllm.bench.sim.request import SimRequest
from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.core.async_scheduler import AsyncScheduler
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.core.scheduler import Scheduler

_SAMPLED, _NOTHING = [0], []


class StepTime(Protocol):
    """How long the devices take for a step, in seconds."""

    def __call__(self, num_tokens: int, num_rows: int, num_context_tokens: int, num_pairs: int) -> float:
        """
        Args:
            num_tokens: computed in the step.
            num_rows: requests in it; as many as tokens if each has one.
            num_context_tokens: sum over the rows of the tokens whose keys and values are read.
            num_pairs: sum over the rows of (query, key) pairs.
        """
        ...


class Recorder(Protocol):
    """What hears of tokens."""

    def gap(self, seconds: float, count: int) -> None:
        """`count` requests got a token `seconds` after the one before it."""

    def finished(self, request: SimRequest) -> None: ...


@dataclass(frozen=True)
class EngineSpec:
    """All that engines of one kind share.

    Attributes:
        host_time: seconds between the scheduling of a step and its start on an idle device.
    """

    scheduler: SchedulerConfig
    cache: CacheConfig
    kv_cache: KVCacheConfig
    host_time: float = 0.0


class _Limits:
    """A SchedulerConfig whose two sizes can be lowered by the requests that are not looked at."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.__dict__.update({name: getattr(config, name) for name in config.__dataclass_fields__})
        self._sizes = config.max_num_seqs, config.max_num_batched_tokens

    def lower(self, count: int) -> None:
        seqs, tokens = self._sizes
        self.max_num_seqs, self.max_num_batched_tokens = seqs - count, tokens - count


class _Step:
    """A step in flight: what the scheduler decided of the requests that it looked at, and when the devices are done."""

    __slots__ = ("chunks", "end", "output")

    def __init__(self, output: SchedulerOutput | None, chunks: set[str], end: float) -> None:
        self.output, self.chunks, self.end = output, chunks, end


class SimEngine:
    """Runs requests through the scheduler as EngineCore does, with `step_time` for the devices.

    Most steps of most requests are alike: one token more, no new block, nobody comes or goes. A running request whose next such
    steps are certain is *parked*: taken out of `scheduler.running`, its budget kept for it, until the step at which its block
    table must grow, a block is full, or it ends. The scheduler then decides about the others just as it would with all of them
    in view, and a step in which all are parked needs no scheduler. Where that is not certain (few free blocks, so that somebody
    may be preempted; a prefill that could starve those behind it) all are brought back before the scheduler decides.

    Args:
        fast: whether to park. Without it every step goes through the scheduler in full; the results are the same.

    Attributes:
        now: seconds of virtual time.
        waiting, running: requests after the latest step, as its statistics tell the front end.
        min_free_blocks: there ever were.
    """

    def __init__(self, spec: EngineSpec, step_time: StepTime, recorder: Recorder, *, fast: bool = True, now: float = 0.0) -> None:
        config = spec.scheduler
        self.scheduler = (AsyncScheduler if config.async_scheduling else Scheduler)(config, spec.cache, spec.kv_cache)
        self.scheduler.config = self._limits = _Limits(config)  # type: ignore[assignment]
        self.step_time, self.recorder, self.fast, self.now = step_time, recorder, fast, now
        self.waiting = self.running = 0
        self.num_steps = 0
        self.min_free_blocks = spec.kv_cache.num_blocks - 1
        self.busy_time = 0.0
        self._host_time = spec.host_time
        self._max_in_flight = 2 if config.async_scheduling else 1
        self._max_num_seqs, self._max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self._num_groups = len(spec.kv_cache.groups)
        self._block_size = spec.cache.block_size
        self._arrivals: deque[tuple[float, SimRequest]] = deque()
        self._in_flight: deque[_Step] = deque()
        self._finish_at: float | None = None
        self._device_free = now
        self._last_update = now
        self._serial = 0
        # Parked requests, those due first; the sum of their computed tokens is `_parked_context + len(_due) * num_steps`.
        self._due: list[tuple[int, int, SimRequest]] = []
        self._parked_context = 0
        # Whether the head of the queue was refused and nothing has changed since.
        self._is_stuck = False

    @property
    def block_hasher(self):
        return self.scheduler.block_hasher

    def add(self, time: float, request: SimRequest) -> None:
        """A request that reaches the engine at `time`, not before those added earlier."""
        self._arrivals.append((time, request))

    def run_until(self, until: float) -> None:
        """Let everything happen that happens up to and at `until`."""
        while True:
            if self._finish_at is not None:
                if self._finish_at > until:
                    return
                self._finish()
                continue
            if not self._in_flight and not self.scheduler.has_requests():
                if not self._arrivals or self._arrivals[0][0] > until:
                    return
                self.now = max(self.now, self._arrivals[0][0])
            self._start()

    def unfinished(self) -> list[SimRequest]:
        """All requests that have not ended, also those that have just reached the engine."""
        return [*self.scheduler.requests.values(), *(request for _, request in self._arrivals)]

    def _start(self) -> None:
        """Take in what has come, schedule and start a step; then the engine waits for the oldest step, if it must."""
        scheduler, arrivals = self.scheduler, self._arrivals
        while arrivals and arrivals[0][0] <= self.now:
            scheduler.add_request(arrivals.popleft()[1])
            self._is_stuck = False
        is_started = scheduler.has_requests()
        if is_started:
            due = self._due
            if (
                due
                and due[0][0] > self.num_steps + 1
                and not scheduler.running
                and (not scheduler.waiting or self._is_stuck or len(due) >= self._max_num_seqs)
            ):
                # Only parked requests. What the scheduler would decide is known.
                count = len(due)
                context = self._parked_context + count * (self.num_steps + 1)
                self._launch(None, set(), count, count, context, context)
            else:
                self._schedule()
        in_flight = self._in_flight
        if in_flight and (not is_started or len(in_flight) == self._max_in_flight):
            self._finish_at = max(self.now, in_flight[0].end)

    def _launch(
        self, output: SchedulerOutput | None, chunks: set[str], num_tokens: int, num_rows: int, context: int, pairs: int
    ) -> None:
        begin = max(self._device_free, self.now + self._host_time)
        duration = self.step_time(num_tokens, num_rows, context, pairs) if num_tokens else 0.0
        self.busy_time += duration
        self._device_free = begin + duration
        self._in_flight.append(_Step(output, chunks, self._device_free))
        self.num_steps += 1

    def _schedule(self) -> None:
        """A step that the scheduler decides."""
        scheduler, due = self.scheduler, self._due
        step = self.num_steps + 1
        if due:
            back = []
            while due and due[0][0] <= step:
                back.append(heapq.heappop(due)[2])
            self._unpark(back)
            if due and not self._can_look_at_some():
                everyone = [request for _, _, request in due]
                due.clear()
                self._unpark(everyone)
        num_parked = len(due)
        had_running = bool(scheduler.running)
        self._limits.lower(num_parked)
        output = scheduler.schedule(self.now)
        self._limits.lower(0)
        num_free_blocks = scheduler.kv_cache_manager.block_pool.num_free_blocks
        if num_free_blocks < self.min_free_blocks:
            self.min_free_blocks = num_free_blocks

        context = pairs = self._parked_context + num_parked * step
        num_tokens = output.total_num_scheduled_tokens + num_parked
        requests, chunks = scheduler.requests, set()
        for new in output.scheduled_new_reqs:
            self._serial += 1
            requests[new.req_id].serial = self._serial  # type: ignore[attr-defined]
        for request_id, count in output.num_scheduled_tokens.items():
            request = requests[request_id]
            after = request.num_computed_tokens
            context += after
            pairs += after if count == 1 else count * (after - count) + count * (count + 1) // 2
            if request.is_prefill_chunk:
                chunks.add(request_id)
        self._is_stuck = bool(num_parked) and not had_running and not output.scheduled_new_reqs
        self._launch(output, chunks, num_tokens, len(output.num_scheduled_tokens) + num_parked, context, pairs)

    def _can_look_at_some(self) -> bool:
        """Whether the scheduler decides about `scheduler.running` as it would with the parked requests in their places."""
        scheduler, due = self.scheduler, self._due
        running = scheduler.running
        if not running and scheduler.waiting and scheduler.num_watermark_blocks:
            return False
        num_tokens = num_blocks = 0
        first_prefill = None
        for request in running:
            missing = len(request.all_token_ids) + request.num_output_placeholders - request.num_computed_tokens
            num_tokens += missing
            num_blocks += missing // self._block_size + 2
            if missing > 1 and first_prefill is None:
                first_prefill = request
        if num_blocks * self._num_groups > scheduler.kv_cache_manager.block_pool.num_free_blocks:
            return False
        if first_prefill is None or num_tokens + len(due) <= self._max_num_batched_tokens:
            return True
        return all(request.serial < first_prefill.serial for _, _, request in due)  # type: ignore[attr-defined]

    def _unpark(self, requests: Sequence[SimRequest]) -> None:
        """Put requests back where the scheduler would have them by now; they are off the heap already."""
        if not requests:
            return
        self._is_stuck = False
        for request in requests:
            count = self.num_steps - request.parked_at
            self._parked_context -= request.num_computed_tokens - request.parked_at
            request.num_computed_tokens += count
            request.advance(count)
            request.token_time = self._last_update
        running = self.scheduler.running
        running.extend(requests)
        running.sort(key=_serial)
        if self._max_in_flight == 2:
            # They are part of the one step in flight.
            (step,) = self._in_flight
            if step.output is None:
                step.output = SchedulerOutput()
            scheduled = step.output.num_scheduled_tokens | {request.request_id: 1 for request in requests}
            live = self.scheduler.requests
            step.output.num_scheduled_tokens = dict(sorted(scheduled.items(), key=lambda item: live[item[0]].serial))  # type: ignore[attr-defined]

    def _finish(self) -> None:
        """The oldest step is done: its tokens reach the requests."""
        assert self._finish_at is not None
        self.now, self._finish_at = self._finish_at, None
        step = self._in_flight.popleft()
        num_parked = len(self._due)
        if num_parked:
            self.recorder.gap(self.now - self._last_update, num_parked)
        if step.output is not None and step.output.num_scheduled_tokens:
            self._update(step.output, step.chunks)
        self._last_update = self.now
        self.waiting, self.running = len(self.scheduler.waiting), len(self.scheduler.running) + len(self._due)

    def _update(self, output: SchedulerOutput, chunks: set[str]) -> None:
        scheduler, now, recorder = self.scheduler, self.now, self.recorder
        self._is_stuck = False
        req_ids = list(output.num_scheduled_tokens)
        rows: list[SimRequest] = [scheduler.requests[request_id] for request_id in req_ids]  # type: ignore[misc]
        sampled = [_SAMPLED] * len(req_ids)
        if chunks:
            sampled = [_NOTHING if request_id in chunks else _SAMPLED for request_id in req_ids]
        row_of = {request_id: row for row, request_id in enumerate(req_ids)}
        scheduler.update_from_output(output, ModelRunnerOutput(req_ids, row_of, sampled), now)
        for request, tokens in zip(rows, sampled, strict=True):
            if not tokens:
                continue
            if request.first_time < 0:
                request.first_time = now
            else:
                recorder.gap(now - request.token_time, 1)
            request.token_time = now
            if request.status.is_finished:
                recorder.finished(request)
        if self.fast:
            self._park()

    def _park(self) -> None:
        """Take the requests out of the scheduler's sight whose next steps are certain."""
        scheduler = self.scheduler
        running = scheduler.running
        # With few free blocks the scheduler would need all of them back at once.
        if scheduler.kv_cache_manager.block_pool.num_free_blocks < 2 * self._num_groups * (len(running) + 1):
            return
        now, num_in_flight, started = self.now, self._max_in_flight - 1, self.num_steps
        latest = self._in_flight[0].output if self._in_flight else None
        in_flight = {} if latest is None else latest.num_scheduled_tokens
        stay = []
        for request in running:
            if (
                request.token_time != now  # type: ignore[attr-defined]
                or request.is_prefill_chunk
                or request.num_steps_in_flight != num_in_flight
                or request.num_output_placeholders != num_in_flight
            ):
                stay.append(request)
                continue
            # Steps from now until one that needs the scheduler, that one included.
            steps = min(
                request.kv_quiet_until - request.num_computed_tokens,
                request.max_tokens - len(request.all_token_ids) + request.num_prompt_tokens,
            )
            if steps < 2:
                stay.append(request)
                continue
            request.parked_at = started  # type: ignore[attr-defined]
            self._parked_context += request.num_computed_tokens - started
            heapq.heappush(self._due, (started + steps, request.serial, request))  # type: ignore[attr-defined]
            if num_in_flight:
                del in_flight[request.request_id]
        scheduler.running = stay


def _serial(request: SimRequest) -> int:
    return request.serial
