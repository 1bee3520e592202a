"""The scheduler, rule by rule, where no recorded trace shows it or where a small case says it better. Block size 4."""

import pytest
from checking_worker import CheckingWorker
from core_builders import (
    EOS,
    add_requests,
    free_ids,
    ids_of,
    make_kv_cache_config,
    make_request,
    make_scheduler,
    runner_output,
    step,
    update,
)

from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec
from jaxllm.core.kv_cache_utils import BlockHasher
from jaxllm.core.output import CachedRequestData, LogprobsLists, ModelRunnerOutput, SchedulerOutput
from jaxllm.core.request import RequestStatus
from jaxllm.core.scheduler import Scheduler
from jaxllm.core.types import EngineCoreEvent, EventType, FinishReason, PrefixCacheStats, SchedulerStats

ABORTED = RequestStatus.FINISHED_ABORTED


def test_first_step_sends_everything_and_the_next_only_what_changed() -> None:
    scheduler = make_scheduler()
    a, b = add_requests(scheduler, {"a": 4, "b": 6})
    output = scheduler.schedule()
    new = {data.req_id: data for data in output.scheduled_new_reqs}
    assert list(new) == ["a", "b"]
    assert (new["b"].token_ids, new["b"].num_prompt_tokens, new["b"].num_computed_tokens) == (b.all_token_ids, 6, 0)
    assert new["b"].token_ids is not b.all_token_ids
    assert (new["a"].block_ids, new["b"].block_ids) == (([1],), ([2, 3],))
    assert new["a"].sampling_params is a.sampling_params
    assert output.scheduled_cached_reqs == CachedRequestData()
    assert (output.num_scheduled_tokens, output.total_num_scheduled_tokens) == ({"a": 4, "b": 6}, 10)
    update(scheduler, output)

    output = scheduler.schedule()
    assert output.scheduled_new_reqs == []
    assert output.scheduled_cached_reqs == CachedRequestData(["a", "b"], [([4],), None], [4, 6], [1, 1])
    assert (output.num_scheduled_tokens, output.total_num_scheduled_tokens) == ({"a": 1, "b": 1}, 2)
    assert (output.finished_req_ids, output.preempted_req_ids, output.scheduled_spec_decode_tokens) == (set(), set(), {})


def test_nothing_to_do() -> None:
    scheduler = make_scheduler()
    assert not scheduler.has_requests()
    output = scheduler.schedule()
    assert output == SchedulerOutput()
    assert scheduler.update_from_output(output, ModelRunnerOutput()) == {}


def test_running_requests_share_the_budget_in_order_before_anyone_is_admitted() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    add_requests(scheduler, {"a": 20, "b": 6, "c": 6, "d": 20})
    assert [step(scheduler).num_scheduled_tokens for _ in range(4)] == [
        {"a": 16},
        {"a": 4, "b": 6, "c": 6},
        {"a": 1, "b": 1, "c": 1, "d": 13},
        {"a": 1, "b": 1, "c": 1, "d": 7},
    ]


def test_long_prefills_are_cut_short_only_in_company() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=10)
    add_requests(scheduler, {"a": 100})
    assert step(scheduler).num_scheduled_tokens == {"a": 64}
    add_requests(scheduler, {"b": 30})
    assert step(scheduler).num_scheduled_tokens == {"a": 10, "b": 10}
    scheduler.finish_requests("b", ABORTED)
    assert step(scheduler).num_scheduled_tokens == {"a": 26}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, max_model_len=32, enable_chunked_prefill=False)
    add_requests(scheduler, {"a": 20, "b": 20, "c": 4})
    # b does not fit behind a, and c does not overtake it.
    assert step(scheduler).num_scheduled_tokens == {"a": 20}
    assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 20, "c": 4}


def test_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add_requests(scheduler, {"a": 4, "b": 4, "c": 4}, max_tokens=2)
    assert list(step(scheduler).num_scheduled_tokens) == ["a", "b"]
    assert scheduler.make_stats().num_waiting_reqs == 1
    assert list(step(scheduler).num_scheduled_tokens) == ["a", "b"]
    assert list(step(scheduler).num_scheduled_tokens) == ["c"]


def test_a_request_at_the_model_length_computes_no_more() -> None:
    # max_model_len 8: the eighth token can be sampled, so positions up to 6 are computed.
    scheduler = make_scheduler(max_model_len=8)
    (a,) = add_requests(scheduler, {"a": 7}, max_tokens=50)
    output = scheduler.schedule()
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert update(scheduler, output, {"a": [7]})["a"].finish_reason is FinishReason.LENGTH
    assert a.num_tokens == 8


def test_a_prompt_that_fills_the_model_yields_one_token() -> None:
    scheduler = make_scheduler(max_model_len=8)
    add_requests(scheduler, {"a": 8}, max_tokens=50)
    out = update(scheduler, scheduler.schedule())["a"]
    assert (out.new_token_ids, out.finish_reason) == ([7], FinishReason.LENGTH)


def test_preemption_of_the_last_and_its_return() -> None:
    # 6 usable blocks; each prompt takes 2, filled to the last slot.
    scheduler = make_scheduler(num_blocks=7, max_model_len=24, enable_prefix_caching=False)
    a, b, c = add_requests(scheduler, {"a": 8, "b": 8, "c": 8})
    step(scheduler, {"a": [10], "b": [20], "c": [30]})
    output = scheduler.schedule(5.0)
    assert (output.num_scheduled_tokens, output.preempted_req_ids) == ({"a": 1, "b": 1}, {"c"})
    assert (c.status, c.num_preemptions, c.num_computed_tokens) == (RequestStatus.PREEMPTED, 1, 0)
    assert c.events == [EngineCoreEvent(EventType.PREEMPTED, 5.0)]
    assert ids_of(list(scheduler.waiting)) == ["c"]
    out = update(scheduler, output, {"a": [11], "b": [EOS]})
    assert out["b"].finish_reason is FinishReason.STOP

    # It comes back as a new request with all that it has, and is counted once as cached: at first admission.
    output = scheduler.schedule(6.0)
    assert (output.finished_req_ids, output.preempted_req_ids) == ({"b"}, set())
    (data,) = output.scheduled_new_reqs
    assert (data.req_id, data.token_ids, data.num_prompt_tokens) == ("c", [*c.prompt_token_ids, 30], 8)
    assert output.num_scheduled_tokens == {"a": 1, "c": 9}
    assert update(scheduler, output)["c"].events == [
        EngineCoreEvent(EventType.PREEMPTED, 5.0),
        EngineCoreEvent(EventType.SCHEDULED, 6.0),
    ]
    assert scheduler.make_stats().num_preemptions == 1
    assert scheduler.make_stats().num_preemptions == 0
    assert a.num_preemptions == b.num_preemptions == 0


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=20, enable_prefix_caching=False)
    add_requests(scheduler, {"a": 8, "b": 12})
    step(scheduler)
    add_requests(scheduler, {"c": 2})
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.preempted_req_ids) == ({"a": 1}, {"b"})
    assert ids_of(list(scheduler.waiting)) == ["b", "c"]


def test_the_last_request_preempts_itself() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=20, enable_prefix_caching=False)
    add_requests(scheduler, {"a": 10, "b": 8})
    step(scheduler)
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.preempted_req_ids) == ({"a": 1}, {"b"})


def test_priority_preempts_the_least_urgent_and_takes_back_what_it_was_given() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=28, max_num_batched_tokens=16, policy="priority")
    scheduler.add_request(make_request("low", 4, scheduler.block_hasher, priority=5))
    step(scheduler)
    scheduler.add_request(make_request("high", 13, scheduler.block_hasher, priority=1, arrival_time=1.0))
    assert step(scheduler).num_scheduled_tokens == {"low": 1, "high": 13}
    for _ in range(3):
        assert step(scheduler).num_scheduled_tokens == {"low": 1, "high": 1}
    # Of 7 blocks one is free. low takes it for its ninth token; then there is none for high's 17th.
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.total_num_scheduled_tokens) == ({"high": 1}, 1)
    assert output.preempted_req_ids == {"low"}
    assert output.scheduled_cached_reqs == CachedRequestData(["high"], [([7],)], [16], [4])


def test_priority_victim_that_was_given_tokens_leaves_no_hit_on_what_it_did_not_compute() -> None:
    scheduler = make_scheduler(
        num_blocks=9,
        max_model_len=32,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        long_prefill_token_threshold=8,
        full_sequence_must_fit=False,
        policy="priority",
    )
    v = make_request("v", 28, scheduler.block_hasher, priority=9)
    scheduler.add_request(v)
    assert step(scheduler).num_scheduled_tokens == {"v": 12}
    scheduler.add_request(make_request("u", 4, scheduler.block_hasher, priority=0))
    assert step(scheduler).num_scheduled_tokens == {"v": 8, "u": 4}
    # v is given tokens 20 to 27 and the last two blocks, 7 and 8, for them. u needs a block and preempts it: block 8 goes to
    # u, block 7 stays free. Nothing is ever written to it for v, which must not find it when it comes back.
    output = step(scheduler)
    assert (output.num_scheduled_tokens, output.preempted_req_ids) == ({"u": 1}, {"v"})
    assert scheduler.kv_cache_manager.get_block_ids("u") == ([6, 8],)
    assert free_ids(scheduler.kv_cache_manager) == [7, 5, 4, 3, 2, 1]
    assert scheduler.kv_cache_manager.get_computed_blocks(v)[1] == 20


def test_the_same_with_the_content_of_the_cache_checked() -> None:
    scheduler = make_scheduler(
        num_blocks=9,
        max_model_len=32,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        long_prefill_token_threshold=8,
        full_sequence_must_fit=False,
        policy="priority",
    )
    worker = CheckingWorker(make_kv_cache_config(9, 4))
    v = make_request("v", 28, scheduler.block_hasher, priority=9, max_tokens=2, ignore_eos=True)
    u = make_request("u", 4, scheduler.block_hasher, priority=0, max_tokens=2, ignore_eos=True)
    scheduler.add_request(v)
    scheduler.update_from_output(output := scheduler.schedule(), worker.execute(output))
    scheduler.add_request(u)
    while scheduler.has_unfinished_requests():
        scheduler.update_from_output(output := scheduler.schedule(), worker.execute(output))
    assert (u.num_preemptions, v.num_preemptions) == (0, 1)
    assert (u.num_output_tokens, v.num_output_tokens) == (2, 2)


def test_priority_on_a_tie_preempts_the_first() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=20, policy="priority")
    add_requests(scheduler, {"a": 4, "b": 4, "c": 8})
    step(scheduler)
    output = scheduler.schedule()
    # a takes the last free block; b has none and a is the first of three equals.
    assert (output.preempted_req_ids, list(output.num_scheduled_tokens)) == ({"a"}, ["b", "c"])


def test_watermark_keeps_blocks_free_only_while_something_runs() -> None:
    scheduler = make_scheduler(num_blocks=10, max_model_len=36, watermark=0.3)
    add_requests(scheduler, {"a": 20, "b": 5})
    # 9 usable blocks: a takes 5; b's 2 would leave 2, and int(0.3 * 10) = 3 must stay free.
    assert list(step(scheduler).num_scheduled_tokens) == ["a"]
    scheduler.finish_requests("a", ABORTED)
    add_requests(scheduler, {"c": 36})
    assert list(step(scheduler).num_scheduled_tokens) == ["b"]
    scheduler.finish_requests("b", ABORTED)
    assert list(step(scheduler).num_scheduled_tokens) == ["c"]


@pytest.mark.parametrize("must_fit", [True, False])
def test_full_sequence_must_fit_before_the_first_chunk(must_fit: bool) -> None:
    scheduler = make_scheduler(
        num_blocks=9, max_model_len=32, max_num_seqs=4, max_num_batched_tokens=9, full_sequence_must_fit=must_fit
    )
    add_requests(scheduler, {"a": 16})
    assert [step(scheduler).num_scheduled_tokens for _ in range(2)] == [{"a": 9}, {"a": 7}]
    # a needs a fifth of the 8 blocks. b's first 8 tokens would fit in the 3 that are left, all of its 20 do not.
    add_requests(scheduler, {"b": 20})
    assert step(scheduler).num_scheduled_tokens == ({"a": 1} if must_fit else {"a": 1, "b": 8})


def test_a_prefix_is_shared_within_one_step() -> None:
    scheduler = make_scheduler()
    prompt = list(range(100, 110))
    a, b = add_requests(scheduler, {"a": prompt, "b": [*prompt, 1, 2]})
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 10, "b": 4}
    assert [data.num_computed_tokens for data in output.scheduled_new_reqs] == [0, 8]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)
    assert update(scheduler, output)["b"].num_cached_tokens == 8


def test_prefix_stats_are_taken_at_admission_and_again_after_a_preemption() -> None:
    scheduler = make_scheduler(num_blocks=7, max_model_len=24)
    prompt = list(range(100, 108))
    add_requests(scheduler, {"a": 12, "b": prompt})
    step(scheduler)
    # c shares b's first block, but there is no block left for it: looked up in vain, not counted.
    add_requests(scheduler, {"c": [*prompt, *range(200, 216)]})
    assert list(step(scheduler).num_scheduled_tokens) == ["a"], "b has preempted itself"
    assert scheduler.make_stats().prefix_cache_stats == PrefixCacheStats(requests=2, queries=20)
    scheduler.finish_requests(["a", "c"], ABORTED)
    assert step(scheduler).num_scheduled_tokens == {"b": 1}
    assert scheduler.make_stats().prefix_cache_stats == PrefixCacheStats(
        preempted_requests=1, preempted_queries=9, preempted_hits=8
    )


def test_stats() -> None:
    scheduler = make_scheduler(num_blocks=11, max_model_len=40, max_num_seqs=1)
    add_requests(scheduler, {"a": 10, "b": 4, "c": 4})
    scheduler.schedule()
    stats = scheduler.make_stats()
    assert stats == SchedulerStats(1, 2, pytest.approx(0.3), 0, PrefixCacheStats(requests=1, queries=10))


def test_outputs_go_to_the_client_that_asked() -> None:
    scheduler = make_scheduler()
    for name, client in (("a", 0), ("b", 1), ("c", 1)):
        scheduler.add_request(make_request(name, 4, scheduler.block_hasher, client_index=client, max_tokens=1 + client), 2.5)
    output = scheduler.schedule(3.0)
    outputs = scheduler.update_from_output(output, runner_output(output, {name: [7] for name in "abc"}), 4.0)
    assert {client: [out.request_id for out in outs.outputs] for client, outs in outputs.items()} == {0: ["a"], 1: ["b", "c"]}
    assert (outputs[0].finished_requests, outputs[1].finished_requests) == ({"a"}, None)
    assert outputs[0].timestamp == outputs[1].timestamp == 4.0
    assert outputs[0].outputs[0].events == [EngineCoreEvent(EventType.QUEUED, 2.5), EngineCoreEvent(EventType.SCHEDULED, 3.0)]
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, runner_output(output, {"b": [7], "c": [8]}), 5.0)
    assert {client: outs.finished_requests for client, outs in outputs.items()} == {1: {"b", "c"}}


def test_events_are_sent_once() -> None:
    scheduler = make_scheduler()
    add_requests(scheduler, {"a": 4})
    assert len(update(scheduler, scheduler.schedule())["a"].events) == 2
    assert update(scheduler, scheduler.schedule())["a"].events is None


def test_a_partial_prefill_emits_nothing() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    add_requests(scheduler, {"a": 20})
    assert update(scheduler, scheduler.schedule()) == {}
    assert list(update(scheduler, scheduler.schedule())) == ["a"]


def test_logprobs_are_cut_out_of_the_batch() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    add_requests(scheduler, {"a": 4, "b": 4}, max_tokens=2)
    logprobs = LogprobsLists([[7, 1], [8, 1]], [[-0.5, -1.0], [-0.25, -2.0]], [1, 1])
    prompt_logprobs = LogprobsLists([[1]], [[-3.0]], [4])

    def run() -> dict:
        output = scheduler.schedule()
        result = runner_output(output, {"a": [7], "b": [8]})
        result.logprobs, result.logprobs_start, result.prompt_logprobs = logprobs, {"b": 1}, {"b": prompt_logprobs}
        return {out.request_id: out for out in scheduler.update_from_output(output, result)[0].outputs}

    outs = run()
    assert (outs["a"].new_logprobs, outs["a"].new_prompt_logprobs) == (None, None)
    assert outs["b"].new_logprobs == LogprobsLists([[8, 1]], [[-0.25, -2.0]], [1])
    assert outs["b"].new_prompt_logprobs is prompt_logprobs
    # A prefill that ends a second time, after a preemption, is not told again.
    outs = run()
    assert outs["b"].new_logprobs == LogprobsLists([[8, 1]], [[-0.25, -2.0]], [1])
    assert outs["b"].new_prompt_logprobs is None


def test_a_finished_request_is_told_to_workers_and_front_end_once() -> None:
    scheduler = make_scheduler()
    add_requests(scheduler, {"a": 4}, max_tokens=1)
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, runner_output(output, {"a": [9]}))
    assert outputs[0].finished_requests == {"a"}
    assert (scheduler.has_unfinished_requests(), scheduler.has_finished_requests(), scheduler.has_requests()) == (
        False,
        True,
        True,
    )
    output = scheduler.schedule()
    assert (output.finished_req_ids, output.num_scheduled_tokens) == ({"a"}, {})
    assert not scheduler.has_requests()
    assert scheduler.update_from_output(output, ModelRunnerOutput()) == {}
    assert scheduler.kv_cache_manager.usage == 0.0


@pytest.mark.parametrize("when", ["waiting", "prefill", "running", "in flight", "preempted"])
def test_abort(when: str) -> None:
    scheduler = make_scheduler(num_blocks=9, max_model_len=32, max_num_batched_tokens=24, max_num_seqs=2)
    add_requests(scheduler, {"other": 4})
    if when == "waiting":
        add_requests(scheduler, {"more": 4, "a": 20})
        step(scheduler)
    elif when == "prefill":
        add_requests(scheduler, {"a": 25})
        step(scheduler)
        assert scheduler.requests["a"].num_computed_tokens == 20
    elif when in ("running", "in flight"):
        add_requests(scheduler, {"a": 9})
        step(scheduler)
    else:
        # 8 blocks: "other" takes 1 and needs a second at once, "a" has 6 and needs a seventh when it starts to decode.
        add_requests(scheduler, {"a": 24})
        while scheduler.requests["a"].status is not RequestStatus.PREEMPTED:
            step(scheduler)
    output = scheduler.schedule() if when == "in flight" else None
    scheduler.finish_requests("a", ABORTED)
    scheduler.finish_requests(["a", "unknown"], ABORTED)
    scheduler.check_integrity()
    if output is not None:
        assert "a" in output.num_scheduled_tokens
        assert list(update(scheduler, output)) == ["other"]
    output = scheduler.schedule()
    assert output.finished_req_ids == {"a"}
    assert "a" not in output.num_scheduled_tokens
    outputs = scheduler.update_from_output(output, runner_output(output, {name: [7] for name in output.num_scheduled_tokens}))
    assert "a" not in [out.request_id for out in outputs[0].outputs]
    scheduler.finish_requests(list(scheduler.requests), ABORTED)
    assert not scheduler.has_unfinished_requests()
    assert len(free_ids(scheduler.kv_cache_manager)) == 8


def test_an_abort_reaches_the_front_end_with_the_next_output() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, scheduler.block_hasher, client_index=3))
    scheduler.finish_requests("a", ABORTED)
    outputs = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput())
    assert {client: (outs.outputs, outs.finished_requests) for client, outs in outputs.items()} == {3: ([], {"a"})}


def test_an_id_may_be_used_again_at_once_and_gets_none_of_the_old_tokens() -> None:
    scheduler = make_scheduler()
    add_requests(scheduler, {"a": 4})
    old = scheduler.schedule()
    scheduler.finish_requests("a", ABORTED)
    (again,) = add_requests(scheduler, {"a": range(50, 56)})
    output = scheduler.schedule()
    assert (output.finished_req_ids, output.num_scheduled_tokens) == ({"a"}, {"a": 6})
    assert update(scheduler, old, {"a": [11]}) == {}
    assert update(scheduler, output, {"a": [12]})["a"].new_token_ids == [12]
    assert again.output_token_ids == [12]


def test_ending_needs_a_final_status() -> None:
    scheduler = make_scheduler()
    add_requests(scheduler, {"a": 4})
    with pytest.raises(ValueError, match="status must be one of the FINISHED_ ones, got PREEMPTED"):
        scheduler.finish_requests("a", RequestStatus.PREEMPTED)
    assert "a" in scheduler.requests


def test_reset_prefix_cache_with_running_requests() -> None:
    scheduler = make_scheduler()
    a, b = add_requests(scheduler, {"a": 8, "b": 8})
    step(scheduler, {"a": [10], "b": [20]})
    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.check_integrity()
    assert ids_of(list(scheduler.waiting)) == ["a", "b"]
    output = scheduler.schedule()
    # The workers forget both before they get them again.
    assert output.preempted_req_ids == {"a", "b"}
    assert [(data.req_id, data.token_ids[-1], data.num_computed_tokens) for data in output.scheduled_new_reqs] == [
        ("a", 10, 0),
        ("b", 20, 0),
    ]
    assert (a.num_preemptions, b.num_preemptions) == (1, 1)
    assert scheduler.make_stats().prefix_cache_stats.reset


def test_bad_requests() -> None:
    scheduler = make_scheduler(max_model_len=8)
    scheduler.add_request(make_request("a", 8, scheduler.block_hasher))
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        scheduler.add_request(make_request("a", 4, scheduler.block_hasher))
    with pytest.raises(ValueError, match="must be at most max_model_len 8 tokens, got 9"):
        scheduler.add_request(make_request("b", 9, scheduler.block_hasher))
    for hasher in (None, BlockHasher(8)):
        with pytest.raises(ValueError, match="must be made with the scheduler's block_hasher"):
            scheduler.add_request(make_request("b", 4, hasher))
    with pytest.raises(ValueError, match="must be made with the scheduler's block_hasher"):
        make_scheduler(enable_prefix_caching=False).add_request(make_request("b", 4, BlockHasher(4)))
    assert list(scheduler.requests) == ["a"]


def test_bad_kv_cache() -> None:
    def make(num_blocks: int, block_size: int) -> Scheduler:
        group = KVCacheGroup((0,), KVCacheSpec(block_size, 1, 8, 2))
        return Scheduler(SchedulerConfig(max_model_len=32), CacheConfig(block_size=16), KVCacheConfig(num_blocks, (group,)))

    make(3, 16)
    with pytest.raises(ValueError, match="num_blocks 2 is too small"):
        make(2, 16)
    with pytest.raises(ValueError, match="block_size of the KV cache must be that of its configuration, 16, got 8"):
        make(9, 8)


def test_two_kv_cache_groups() -> None:
    scheduler = make_scheduler(windows=(None, 6), num_blocks=40, max_model_len=64)
    (a,) = add_requests(scheduler, {"a": 13})
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].block_ids == ([1, 2, 3, 4], [5, 6, 7, 8])
    update(scheduler, output)
    for _ in range(3):
        assert step(scheduler).scheduled_cached_reqs.new_block_ids == [None]
    assert step(scheduler).scheduled_cached_reqs.new_block_ids == [([9], [10])]
    assert scheduler.kv_cache_manager.get_block_ids("a") == ([1, 2, 3, 4, 9], [0, 0, 7, 8, 10])
    assert a.num_computed_tokens == 17
