"""Drafts: how many are scheduled, and what happens to the accounts when they are rejected. Block size 4."""

import pytest
from core_builders import EOS, add_requests, make_scheduler, step, update

from jaxllm.core.request import Request, RequestStatus
from jaxllm.core.scheduler import Scheduler
from jaxllm.core.types import FinishReason


def decoding(draft: list[int], **kwargs: object) -> tuple[Scheduler, Request]:
    """A request of 5 prompt tokens and one output token, with a draft."""
    scheduler = make_scheduler(num_lookahead_tokens=3, **kwargs)
    (a,) = add_requests(scheduler, {"a": 5}, max_tokens=20)
    step(scheduler, {"a": [10]})
    scheduler.update_draft_token_ids(["a"], [draft])
    return scheduler, a


@pytest.mark.parametrize(
    ("draft", "sampled", "num_computed_tokens"),
    [
        ([11, 12, 13], [11, 12, 13, 14], 9),
        ([11, 12, 13], [11, 12, 99], 8),
        ([11, 12, 13], [99], 6),
        ([11], [11, 12], 7),
        ([11], [99], 6),
        ([], [11], 6),
    ],
)
def test_rejected_drafts_are_given_back(draft: list[int], sampled: list[int], num_computed_tokens: int) -> None:
    scheduler, a = decoding(draft)
    assert (a.num_tokens, a.num_tokens_with_spec, a.num_computed_tokens) == (6, 6 + len(draft), 5)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 1 + len(draft)}
    assert output.scheduled_spec_decode_tokens == ({"a": draft} if draft else {})
    assert (a.num_computed_tokens, a.spec_token_ids) == (6 + len(draft), [])
    assert update(scheduler, output, {"a": sampled})["a"].new_token_ids == sampled
    assert a.output_token_ids == [10, *sampled]
    assert a.num_computed_tokens == num_computed_tokens == a.num_tokens - 1
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 1}
    assert output.scheduled_cached_reqs.num_computed_tokens == [num_computed_tokens]


def test_drafts_are_cut_to_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6, max_num_seqs=2, num_lookahead_tokens=3)
    add_requests(scheduler, {"a": 3, "b": 3})
    step(scheduler, {"a": [10], "b": [20]})
    scheduler.update_draft_token_ids(["a", "b"], [[11, 12, 13], [21, 22, 23]])
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 4, "b": 2}
    assert output.scheduled_spec_decode_tokens == {"a": [11, 12, 13], "b": [21]}


def test_without_budget_a_draft_waits() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=2, num_lookahead_tokens=3)
    _, b = add_requests(scheduler, {"a": 2, "b": 2})
    step(scheduler, {"a": [10], "b": [20]})
    scheduler.update_draft_token_ids(["a", "b"], [[11, 12, 13], [21]])
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 4}
    assert b.spec_token_ids == [21]
    update(scheduler, output, {"a": [99]})
    assert scheduler.schedule().scheduled_spec_decode_tokens == {"b": [21]}


def test_drafts_are_cut_to_the_model_length() -> None:
    # 6 tokens of at most 8: positions up to 6 are computed, so one draft.
    scheduler, _ = decoding([11, 12, 13], max_model_len=8)
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.scheduled_spec_decode_tokens) == ({"a": 2}, {"a": [11]})
    out = update(scheduler, output, {"a": [11, 12]})["a"]
    assert (out.new_token_ids, out.finish_reason) == ([11, 12], FinishReason.LENGTH)


def test_drafts_are_cut_away_at_the_model_length() -> None:
    scheduler, a = decoding([11, 12, 13], max_model_len=7)
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.scheduled_spec_decode_tokens) == ({"a": 1}, {})
    assert a.spec_token_ids == []


@pytest.mark.parametrize(
    ("sampled", "kept", "reason", "stop_reason"),
    [
        ([11, EOS, 13, 14], [11, EOS], FinishReason.STOP, None),
        ([11, 12, 9, 14], [11, 12, 9], FinishReason.STOP, 9),
        ([11, 12, 13, 14], [11, 12, 13], FinishReason.LENGTH, None),
        ([EOS], [EOS], FinishReason.STOP, None),
    ],
)
def test_tokens_behind_a_stop_are_dropped(sampled: list[int], kept: list[int], reason: FinishReason, stop_reason: object) -> None:
    scheduler = make_scheduler(num_lookahead_tokens=3)
    (a,) = add_requests(scheduler, {"a": 5}, max_tokens=4, stop_token_ids=[9])
    step(scheduler, {"a": [10]})
    scheduler.update_draft_token_ids(["a"], [[11, 12, 13]])
    output = scheduler.schedule()
    out = update(scheduler, output, {"a": sampled})["a"]
    assert (out.new_token_ids, out.finish_reason, out.stop_reason) == (kept, reason, stop_reason)
    assert a.output_token_ids == [10, *kept]
    assert a.num_computed_tokens == a.num_tokens - 1
    assert len(scheduler.kv_cache_manager.block_pool.free_queue.get_all()) == 999


def test_accepted_drafts_of_an_ended_request_can_be_hit() -> None:
    # 5 + 1 tokens, 3 drafts: tokens 0 to 8 are computed, all but the last sampled one. Two full blocks.
    scheduler, a = decoding([11, 12, 13])
    update(scheduler, scheduler.schedule(), {"a": [11, 12, 13, EOS]})
    (b,) = add_requests(scheduler, {"b": a.all_token_ids})
    assert scheduler.kv_cache_manager.get_computed_blocks(b)[1] == 8


def test_rejected_drafts_are_never_hit() -> None:
    # The drafts filled block 1 (tokens 4 to 7) with something else.
    scheduler, a = decoding([11, 12, 13])
    update(scheduler, scheduler.schedule(), {"a": [11, EOS]})
    (b,) = add_requests(scheduler, {"b": [*a.prompt_token_ids, 10, 11, 12, 13, 14]})
    assert scheduler.kv_cache_manager.get_computed_blocks(b)[1] == 4


def test_lookahead_slots_are_there_for_drafts() -> None:
    # 5 prompt tokens and 3 slots ahead fill 2 blocks; the sixth token with its 3 ahead needs a third.
    scheduler = make_scheduler(num_lookahead_tokens=3)
    add_requests(scheduler, {"a": 5})
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].block_ids == ([1, 2],)
    update(scheduler, output)
    assert scheduler.schedule().scheduled_cached_reqs.new_block_ids == [([3],)]


def test_who_gets_no_draft() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=2)
    a, b, c = add_requests(scheduler, {"a": 4, "b": 8, "c": 4})
    step(scheduler, {"a": [10]})
    scheduler.update_draft_token_ids(["a", "b", "c", "gone"], [[11], [21], [31], [41]])
    assert (a.spec_token_ids, b.spec_token_ids, c.spec_token_ids) == ([11], [], [])
    # b is half prefilled, c waits. When b's prompt is through, it may.
    step(scheduler, {"a": [12], "b": [20]})
    scheduler.update_draft_token_ids(["b"], [[21]])
    assert b.spec_token_ids == [21]
    with pytest.raises(ValueError, match="zip"):
        scheduler.update_draft_token_ids(["a", "b"], [[1]])


def test_a_preempted_request_loses_its_draft_and_gets_its_tokens() -> None:
    scheduler, a = decoding([11, 12, 13])
    output = scheduler.schedule()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert (a.status, a.num_computed_tokens, a.num_steps_in_flight) == (RequestStatus.PREEMPTED, 0, 1)
    # Its tokens are not known yet, so it cannot be resumed.
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert update(scheduler, output, {"a": [11, 99]})["a"].new_token_ids == [11, 99]
    assert (a.num_computed_tokens, a.num_output_placeholders) == (0, 0)
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].token_ids == [*a.prompt_token_ids, 10, 11, 99]


def test_priority_victim_returns_its_drafts() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=28, policy="priority")
    (low,) = add_requests(scheduler, {"low": 4}, priority=5)
    step(scheduler)
    add_requests(scheduler, {"high": 13}, priority=1)
    for _ in range(4):
        step(scheduler)
    scheduler.update_draft_token_ids(["low"], [[11, 12]])
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.preempted_req_ids) == ({"high": 1}, {"low"})
    assert (output.scheduled_spec_decode_tokens, output.total_num_scheduled_tokens, low.spec_token_ids) == ({}, 1, [])
