"""Scheduler: which tokens of which requests the next step computes, and what the step's output means for them.

Plain Python over integers: no jax, no clock, no I/O. Times are arguments and go nowhere but into events.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.kv_cache_manager import KVCacheManager
from jaxllm.core.kv_cache_utils import BlockHasher
from jaxllm.core.multi_step import extend_decodes
from jaxllm.core.output import CachedRequestData, LogprobsLists, ModelRunnerOutput, NewRequestData, SchedulerOutput
from jaxllm.core.request import Request, RequestStatus
from jaxllm.core.request_queue import create_request_queue
from jaxllm.core.scheduled_step import ScheduledStep
from jaxllm.core.stop_check import check_stop
from jaxllm.core.types import EngineCoreOutput, EngineCoreOutputs, EventType, SchedulerStats


class Scheduler:
    """Decides steps and keeps the books of all unfinished requests.

    `schedule` and `update_from_output` alternate, or the steps overlap: several may be scheduled before the output of the first
    is known, as long as outputs come back in order.

    Args:
        scheduler_config: limits and policy.
        cache_config: block size, prefix caching, watermark.
        kv_cache_config: blocks and groups, as the workers allocated them.

    Raises:
        ValueError: if the KV cache has another block size than `cache_config` or cannot hold one request of `max_model_len`.

    Attributes:
        requests: id → request, all that have not ended.
        running: requests that hold blocks, in the order in which steps serve them.
        waiting: the queue of those that hold none: new ones and preempted ones.
        block_hasher: for `Request.from_engine_core_request`; None if prefix caching is off.
        max_decode_steps: most tokens of a request in one step of nothing but decodes. Whoever measures steps may lower it.
    """

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig, kv_cache_config: KVCacheConfig) -> None:
        self.config = scheduler_config
        self.max_model_len = scheduler_config.max_model_len
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config,
            scheduler_config.max_model_len,
            cache_config.enable_prefix_caching,
            # Beside what one step computes and drafts, what a step in flight samples and drafts.
            max(scheduler_config.max_num_batched_tokens, scheduler_config.num_decode_steps)
            + 2 * scheduler_config.num_lookahead_tokens
            + scheduler_config.num_decode_steps,
        )
        self.max_decode_steps = scheduler_config.num_decode_steps
        if self.kv_cache_manager.block_size != cache_config.block_size:
            raise ValueError(
                f"block_size of the KV cache must be that of its configuration, {cache_config.block_size}, "
                f"got {self.kv_cache_manager.block_size}"
            )
        self.block_hasher = BlockHasher(cache_config.block_size) if cache_config.enable_prefix_caching else None
        self.num_watermark_blocks = int(cache_config.watermark * kv_cache_config.num_blocks)

        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = create_request_queue(scheduler_config.policy)
        # Told to the workers with the next step.
        self._finished_req_ids: set[str] = set()
        self._preempted_req_ids: set[str] = set()
        # Told to the front ends with the next output; by client.
        self._ended_req_ids: defaultdict[int, set[str]] = defaultdict(set)
        # Ended requests whose last steps are still in flight, with the number of these.
        self._num_orphaned_steps: dict[str, int] = {}
        self._num_preemptions = 0
        # Running requests that the next step must pass over.
        self._held_back: set[str] = set()

    def add_request(self, request: Request, timestamp: float = 0.0) -> None:
        """Queue a request.

        Raises:
            ValueError: if its id is in use, its prompt does not fit the model, or it was made with another block hasher.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by a request that has not ended")
        if request.num_prompt_tokens > self.max_model_len:
            raise ValueError(
                f"prompt_token_ids of request {request.request_id!r} must be at most max_model_len {self.max_model_len} tokens, "
                f"got {request.num_prompt_tokens}"
            )
        block_size = None if request.block_hasher is None else request.block_hasher.block_size
        if block_size != (None if self.block_hasher is None else self.block_hasher.block_size):
            raise ValueError(f"request {request.request_id!r} must be made with the scheduler's block_hasher, got {block_size=}")
        self.requests[request.request_id] = request
        self.waiting.add(request)
        request.record_event(EventType.QUEUED, timestamp)

    def schedule(self, timestamp: float = 0.0) -> SchedulerOutput:
        """Decide the next step.

        There is no prefill phase and no decode phase. A request has tokens, some of them computed, and every step lets
        `num_computed_tokens` catch up with `num_tokens_with_spec`, as far as the token budget goes. That covers chunked prefill,
        prefix hits, drafts and recomputation after a preemption.

        Running requests come first, in order; one that finds no block preempts others, or in the end itself. Only if nobody was
        preempted are requests admitted from the queue, until the budget is used up or the head of the queue does not fit.

        All accounts are settled at once, as if the step had run and every draft had been accepted, so that the next step can be
        scheduled before this one's output is known. `update_from_output` takes back what was rejected.
        """
        config = self.config
        step = ScheduledStep(
            token_budget=config.max_num_batched_tokens,
            # The stages of a pipeline work on different requests, so each step leaves some for the others.
            max_rows=-(-min(len(self.requests), config.max_num_seqs) // config.num_pipeline_stages),
            # Long prefills are cut short for the sake of the other requests, if there are any.
            max_tokens_per_request=(config.long_prefill_token_threshold if len(self.requests) > 1 else 0)
            or config.max_num_batched_tokens + self.max_model_len,
            timestamp=timestamp,
        )
        self._schedule_running(step)
        if not step.preempted_req_ids:
            self._schedule_waiting(step)
        if self.max_decode_steps > 1:
            self._schedule_further_decodes(step)
        output = self._make_output(step)
        self._update_after_schedule(step.running, output)
        self._update_after_schedule(step.admitted, output)
        return output

    def _schedule_running(self, step: ScheduledStep) -> None:
        allocate_slots = self.kv_cache_manager.allocate_slots
        num_lookahead_tokens = self.config.num_lookahead_tokens
        max_num_computed_tokens = self.max_model_len - 1
        running, held_back = self.running, self._held_back
        scheduled, num_scheduled_tokens = step.running, step.num_scheduled_tokens
        max_rows, token_budget = step.max_rows, step.token_budget
        index = 0
        while index < len(running) and token_budget > 0 and len(scheduled) < max_rows:
            request = running[index]
            num_placeholders = request.num_output_placeholders
            num_tokens = len(request.all_token_ids) + num_placeholders
            num_computed_tokens = request.num_computed_tokens
            num_new_tokens = num_tokens + len(request.spec_token_ids) - num_computed_tokens
            if num_new_tokens > 1:
                num_new_tokens = min(num_new_tokens, step.max_tokens_per_request, token_budget)
            if num_computed_tokens + num_new_tokens > max_num_computed_tokens:
                # The last token that a model of this length can have is sampled, never computed.
                num_new_tokens = max_num_computed_tokens - num_computed_tokens
            # How many tokens the steps in flight sample is certain (but for drafts, where it is at least one), and so is whether
            # these are the last ones; their values are not needed. A request that they end otherwise ends all the same.
            num_certain = 1 if num_lookahead_tokens else num_placeholders
            is_ending = num_placeholders and request.num_output_tokens + num_certain >= request.max_tokens
            request_id = request.request_id
            if num_new_tokens <= 0 or is_ending or request_id in held_back:
                index += 1
                continue

            # Where the table has room, as in most steps, allocate_slots would do nothing.
            if num_computed_tokens + num_new_tokens + num_lookahead_tokens >= request.kv_quiet_until:
                while (block_ids := allocate_slots(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens)) is None:
                    victim_index = self._choose_victim()
                    victim = running[victim_index]
                    if victim_index < index:
                        index -= 1
                        token_budget += step.take_back(victim)
                    self._preempt(victim_index, step.timestamp)
                    step.preempted_req_ids.add(victim.request_id)
                    if victim is request:
                        break
                if block_ids is None:
                    continue
                if block_ids:
                    step.new_block_ids[request_id] = block_ids

            scheduled.append(request)
            num_scheduled_tokens[request_id] = num_new_tokens
            token_budget -= num_new_tokens
            if request.spec_token_ids:
                num_spec_tokens = num_computed_tokens + num_new_tokens - num_tokens
                if num_spec_tokens > 0:
                    step.spec_decode_tokens[request_id] = request.spec_token_ids[:num_spec_tokens]
                request.spec_token_ids = []
            index += 1
        step.token_budget = token_budget

    def _schedule_waiting(self, step: ScheduledStep) -> None:
        manager, waiting = self.kv_cache_manager, self.waiting
        skipped: list[Request] = []
        num_scheduled_tokens, max_num_seqs = step.num_scheduled_tokens, self.config.max_num_seqs
        while (
            waiting and step.token_budget > 0 and len(self.running) < max_num_seqs and len(num_scheduled_tokens) < step.max_rows
        ):
            request = waiting.peek()
            if request.num_steps_in_flight:
                # Preempted while a step of it was under way. It can only be resumed with all its tokens known.
                skipped.append(waiting.pop())
                continue
            hit, num_hit_tokens = manager.get_computed_blocks(request)
            num_new_tokens = min(request.num_tokens - num_hit_tokens, step.max_tokens_per_request)
            if num_new_tokens > step.token_budget:
                if not self.config.enable_chunked_prefill:
                    break
                num_new_tokens = step.token_budget
            block_ids = manager.allocate_slots(
                request,
                num_new_tokens,
                num_hit_tokens,
                hit,
                self.config.num_lookahead_tokens,
                # With nothing running there is nobody to keep blocks for, and the request could wait for ever.
                num_reserved_blocks=self.num_watermark_blocks if self.running else 0,
                full_sequence_must_fit=self.config.full_sequence_must_fit,
            )
            if block_ids is None:
                break
            waiting.pop()
            manager.record_lookup(request, num_hit_tokens)
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = num_hit_tokens
            request.num_computed_tokens = num_hit_tokens
            request.status = RequestStatus.RUNNING
            request.record_event(EventType.SCHEDULED, step.timestamp)
            self.running.append(request)
            step.admitted.append(request)
            step.num_scheduled_tokens[request.request_id] = num_new_tokens
            step.token_budget -= num_new_tokens
        waiting.prepend_all(skipped)

    def _schedule_further_decodes(self, step: ScheduledStep) -> None:
        """Let a step of nothing but decodes go on for several tokens a request, unless somebody waits: it would wait longer."""
        if self.waiting or step.admitted or step.preempted_req_ids or step.spec_decode_tokens:
            return
        extend_decodes(step, self.max_decode_steps, self.max_model_len, self.kv_cache_manager)

    def _make_output(self, step: ScheduledStep) -> SchedulerOutput:
        req_ids = [request.request_id for request in step.running]
        output = SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=request.request_id,
                    token_ids=request.all_token_ids.copy(),
                    num_prompt_tokens=request.num_prompt_tokens,
                    sampling_params=request.sampling_params,
                    block_ids=self.kv_cache_manager.get_block_ids(request.request_id),
                    num_computed_tokens=request.num_computed_tokens,
                    end_token_ids=request.end_token_ids,
                )
                for request in step.admitted
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=req_ids,
                new_block_ids=list(map(step.new_block_ids.get, req_ids)) if step.new_block_ids else [None] * len(req_ids),
                num_computed_tokens=[request.num_computed_tokens for request in step.running],
                num_output_tokens=[
                    len(request.all_token_ids) - request.num_prompt_tokens + request.num_output_placeholders
                    for request in step.running
                ],
            ),
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - step.token_budget,
            scheduled_spec_decode_tokens=step.spec_decode_tokens,
            finished_req_ids=self._finished_req_ids,
            preempted_req_ids=step.preempted_req_ids | self._preempted_req_ids,
            num_decode_steps=step.num_decode_steps,
        )
        self._finished_req_ids = set()
        self._preempted_req_ids = set()
        return output

    def _update_after_schedule(self, requests: list[Request], output: SchedulerOutput) -> None:
        """Settle the accounts of requests that `output` schedules."""
        num_scheduled_tokens = output.num_scheduled_tokens
        for request in requests:
            num_computed_tokens = request.num_computed_tokens + num_scheduled_tokens[request.request_id]
            request.num_computed_tokens = num_computed_tokens
            request.is_prefill_chunk = num_computed_tokens < len(request.all_token_ids) + request.num_output_placeholders
            request.num_steps_in_flight += 1

    def _choose_victim(self) -> int:
        """The index in `running` of the request to preempt: the last, or the least urgent, the first of these on a tie."""
        running = self.running
        if self.config.policy == "fcfs":
            return len(running) - 1
        return max(range(len(running)), key=lambda index: (running[index].priority, running[index].arrival_time))

    def _preempt(self, index: int, timestamp: float) -> None:
        """Take all blocks from `running[index]` and queue it again. What it computed can be hit until it is evicted."""
        request = self.running.pop(index)
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self._num_preemptions += 1
        request.record_event(EventType.PREEMPTED, timestamp)
        self.waiting.prepend(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput, timestamp: float = 0.0
    ) -> dict[int, EngineCoreOutputs]:
        """Take in the output of a step.

        Appends the sampled tokens, ends requests that are complete, takes back rejected drafts. A request that ended since the
        step was scheduled emits nothing more; one that was preempted since gets its tokens.

        Args:
            scheduler_output: what was scheduled. Outputs come in the order of the steps.
            model_runner_output: what came of it.
            timestamp: of the end of the step; goes into the outputs.

        Returns:
            Outputs by client. Clients without outputs and without ended requests are left out.
        """
        requests, max_model_len, running_status = self.requests, self.max_model_len, RequestStatus.RUNNING
        prompt_logprobs = model_runner_output.prompt_logprobs
        sampled_token_ids, row_of = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        logprobs, logprobs_start = model_runner_output.logprobs, model_runner_output.logprobs_start
        spec_decode_tokens = scheduler_output.scheduled_spec_decode_tokens
        is_multi_step = scheduler_output.num_decode_steps > 1
        outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        stopped: list[Request] = []
        for request_id in scheduler_output.num_scheduled_tokens:
            if self._num_orphaned_steps and self._is_orphaned(request_id):
                continue
            request = requests[request_id]
            request.num_steps_in_flight -= 1
            new_token_ids = sampled_token_ids[row_of[request_id]]
            if not new_token_ids:
                # A part of a prefill.
                assert request_id not in spec_decode_tokens, f"no token for request {request_id!r}, which had drafts"
                continue
            is_running = request.status is running_status
            is_first = len(request.all_token_ids) == request.num_prompt_tokens
            if request_id in spec_decode_tokens or is_multi_step:
                # Tokens decoded one after the other are like drafts, all of them right until the request ends.
                num_drafts = (
                    scheduler_output.num_scheduled_tokens[request_id] - 1
                    if is_multi_step
                    else len(spec_decode_tokens[request_id])
                )
                new_token_ids, is_stopped = self._append_accepted(request, new_token_ids, num_drafts)
            else:
                assert len(new_token_ids) == 1, f"{len(new_token_ids)} tokens without drafts for request {request_id!r}"
                request.append_output_token_ids(new_token_ids)
                is_stopped = check_stop(request, max_model_len)
                if request.num_output_placeholders:
                    request.num_output_placeholders -= 1
            if is_stopped:
                stopped.append(request)
                if is_running:
                    self.kv_cache_manager.cache_blocks(request)
                else:
                    self.waiting.remove(request_id)
            outputs[request.client_index].append(
                EngineCoreOutput(
                    request_id,
                    new_token_ids,
                    None if logprobs is None else _logprobs_of(request_id, len(new_token_ids), logprobs, logprobs_start),
                    prompt_logprobs.get(request_id) if is_first else None,
                    request.status.finish_reason if is_stopped else None,
                    request.stop_reason,
                    request.take_events() if request.events else None,
                    request.num_cached_tokens,
                )
            )
        if stopped:
            for request in stopped:
                self._end(request)
            self.running = [request for request in self.running if request.status is running_status]
        return self._make_outputs(outputs, timestamp)

    def _append_accepted(self, request: Request, new_token_ids: list[int], num_drafts: int) -> tuple[list[int], bool]:
        """Append accepted drafts and the token sampled after them. If one of them ends the request, those behind it are dropped.

        The step counted as `num_drafts + 1` tokens. What was rejected or dropped is given back, of positions and placeholders.

        Returns:
            The tokens kept, and whether the last of them ends the request.
        """
        assert len(new_token_ids) <= num_drafts + 1, f"{len(new_token_ids)} tokens from {num_drafts} drafts"
        is_running = request.status is RequestStatus.RUNNING
        is_stopped = False
        num_kept = 0
        while not is_stopped and num_kept < len(new_token_ids):
            request.append_output_token_ids(new_token_ids[num_kept : num_kept + 1])
            is_stopped = check_stop(request, self.max_model_len)
            num_kept += 1
        if is_running:  # a preempted request has given everything back already
            request.num_computed_tokens -= num_drafts + 1 - num_kept
            if request.num_output_placeholders:
                request.num_output_placeholders -= num_drafts + 1
        return new_token_ids[:num_kept], is_stopped

    def _is_orphaned(self, request_id: str) -> bool:
        """Whether a step's output for this id belongs to a request that has ended; counts it off."""
        num_steps = self._num_orphaned_steps.pop(request_id, 0)
        if num_steps > 1:
            self._num_orphaned_steps[request_id] = num_steps - 1
        return num_steps > 0

    def _end(self, request: Request) -> None:
        """Forget a request whose status is final. The caller takes it off `running` or `waiting`."""
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)
        self._ended_req_ids[request.client_index].add(request.request_id)
        if request.num_steps_in_flight:
            orphaned = self._num_orphaned_steps
            orphaned[request.request_id] = orphaned.get(request.request_id, 0) + request.num_steps_in_flight

    def _make_outputs(self, outputs: dict[int, list[EngineCoreOutput]], timestamp: float) -> dict[int, EngineCoreOutputs]:
        ended, self._ended_req_ids = self._ended_req_ids, defaultdict(set)
        return {
            client_index: EngineCoreOutputs(
                outputs=outputs.get(client_index, []),
                timestamp=timestamp,
                finished_requests=ended.get(client_index),
            )
            for client_index in outputs.keys() | ended.keys()
        }

    def update_draft_token_ids(self, request_ids: Sequence[str], draft_token_ids: Sequence[list[int]]) -> None:
        """Give running requests drafts for the next step, one list each. Ended, waiting and half-prefilled requests get none."""
        for request_id, draft in zip(request_ids, draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.RUNNING and not request.is_prefill_chunk:
                request.spec_token_ids = list(draft)

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        """End requests from outside, wherever they are: an abort, or a stop string that the front end found.

        Their blocks are free at once and they emit nothing more. Unknown ids are passed over: the request may have ended since.

        Raises:
            ValueError: if `status` is not final.
        """
        if not status.is_finished:
            raise ValueError(f"status must be one of the FINISHED_ ones, got {status.name}")
        ended_running = False
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                ended_running = True
            else:
                self.waiting.remove(request_id)
            request.status = status
            self._end(request)
        if ended_running:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def reset_prefix_cache(self, reset_running_requests: bool = False, timestamp: float = 0.0) -> bool:
        """Forget every cached prefix. False, and no change, while requests hold blocks.

        Args:
            reset_running_requests: preempt all of them first; they compute everything again.
        """
        if reset_running_requests:
            # The last one first, so that the queue gets them in their old order.
            for index in reversed(range(len(self.running))):
                self._preempted_req_ids.add(self.running[index].request_id)
                self._preempt(index, timestamp)
        return self.kv_cache_manager.reset_prefix_cache()

    @property
    def num_unfinished(self) -> int:
        return len(self.requests)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def has_finished_requests(self) -> bool:
        """Whether requests have ended that the workers have not been told of."""
        return bool(self._finished_req_ids)

    def has_requests(self) -> bool:
        """Whether there is anything for a step to do."""
        return bool(self.requests or self._finished_req_ids)

    def make_stats(self) -> SchedulerStats:
        """The state now. Preemptions and prefix cache counts are those since the last call."""
        num_preemptions, self._num_preemptions = self._num_preemptions, 0
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
            num_preemptions=num_preemptions,
            prefix_cache_stats=self.kv_cache_manager.take_prefix_cache_stats(),
        )

    def check_integrity(self) -> None:
        """Recount requests and blocks. AssertionError if the books do not balance."""
        self.kv_cache_manager.check_integrity()
        running, waiting = self.running, list(self.waiting)
        ids = [request.request_id for request in running + waiting]
        assert sorted(ids) == sorted(self.requests), f"{ids} are not {sorted(self.requests)}"
        assert len(running) <= self.config.max_num_seqs
        tables = self.kv_cache_manager.managers[0].tables
        assert tables.keys() == {request.request_id for request in running}
        for request in running:
            assert request.status is RequestStatus.RUNNING
            block_size = self.kv_cache_manager.block_size
            num_cached_tokens = self.kv_cache_manager.managers[0].num_cached_blocks[request.request_id] * block_size
            assert num_cached_tokens <= request.num_computed_tokens <= len(tables[request.request_id]) * block_size
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.num_computed_tokens == request.num_output_placeholders == len(request.spec_token_ids) == 0


def _logprobs_of(
    request_id: str, num_tokens: int, logprobs: LogprobsLists, logprobs_start: dict[str, int]
) -> LogprobsLists | None:
    start = logprobs_start.get(request_id)
    return None if start is None else logprobs.slice(start, start + num_tokens)
