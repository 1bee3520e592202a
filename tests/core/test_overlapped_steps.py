"""Steps that are scheduled before the output of the last one is known: placeholders, stale output, over-scheduled steps."""

import pytest
from core_builders import EOS, OverlappedScheduler, add_requests, ids_of, make_scheduler, step, update

from jaxllm.core.output import SchedulerOutput
from jaxllm.core.request import Request, RequestStatus
from jaxllm.core.scheduler import Scheduler
from jaxllm.core.types import FinishReason


def overlapped(**kwargs: object) -> OverlappedScheduler:
    return make_scheduler(cls=OverlappedScheduler, **kwargs)


def test_the_next_token_is_scheduled_before_the_last_is_known() -> None:
    scheduler = overlapped()
    (a,) = add_requests(scheduler, {"a": 6})
    first = scheduler.schedule()
    assert (a.num_computed_tokens, a.num_output_placeholders, a.num_steps_in_flight) == (6, 1, 1)
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 1}
    assert (second.scheduled_cached_reqs.num_computed_tokens, second.scheduled_cached_reqs.num_output_tokens) == ([6], [1])
    assert (a.num_tokens, a.num_computed_tokens, a.num_output_placeholders, a.num_steps_in_flight) == (6, 7, 2, 2)
    update(scheduler, first, {"a": [10]})
    assert (a.num_tokens, a.num_computed_tokens, a.num_output_placeholders, a.num_steps_in_flight) == (7, 7, 1, 1)
    third = scheduler.schedule()
    assert third.scheduled_cached_reqs.num_output_tokens == [2]
    update(scheduler, second, {"a": [11]})
    update(scheduler, third, {"a": [12]})
    assert a.output_token_ids == [10, 11, 12]
    assert (a.num_computed_tokens, a.num_output_placeholders, a.num_steps_in_flight) == (8, 0, 0)


def test_a_block_is_cached_when_its_tokens_are_known() -> None:
    scheduler = overlapped()
    (a,) = add_requests(scheduler, {"a": 6})
    outputs = [scheduler.schedule() for _ in range(3)]
    # Tokens 6 and 7 are scheduled and would fill block 1, but nobody knows them.
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    assert (a.num_computed_tokens, blocks[1].block_hash, blocks[2].block_hash) == (8, a.block_hashes[0], None)
    update(scheduler, outputs[0], {"a": [10]})
    update(scheduler, outputs[1], {"a": [11]})
    assert blocks[2].block_hash is None
    scheduler.schedule()
    assert blocks[2].block_hash == a.block_hashes[1]


def test_the_last_block_of_an_ended_request_is_cached() -> None:
    scheduler = overlapped()
    (a,) = add_requests(scheduler, {"a": 6}, max_tokens=3)
    outputs = [scheduler.schedule() for _ in range(3)]
    for output, token_id in zip(outputs, (10, 11, 12), strict=True):
        update(scheduler, output, {"a": [token_id]})
    assert a.status is RequestStatus.FINISHED_LENGTH_CAPPED
    (b,) = add_requests(scheduler, {"b": a.all_token_ids})
    assert scheduler.kv_cache_manager.get_computed_blocks(b)[1] == 8


def test_max_tokens_stops_the_scheduling_one_step_early() -> None:
    scheduler = overlapped()
    add_requests(scheduler, {"a": 4}, max_tokens=2)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 4}, {"a": 1})
    update(scheduler, first)
    assert scheduler.schedule().num_scheduled_tokens == {}, "the second token is on its way, and it is the last"
    assert update(scheduler, second)["a"].finish_reason is FinishReason.LENGTH


def test_max_model_len_stops_the_scheduling_too() -> None:
    scheduler = overlapped(max_model_len=6)
    add_requests(scheduler, {"a": 4}, max_tokens=50)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (second.num_scheduled_tokens, scheduler.schedule().num_scheduled_tokens) == ({"a": 1}, {})
    update(scheduler, first)
    assert update(scheduler, second)["a"].finish_reason is FinishReason.LENGTH


def test_a_skipped_request_does_not_hold_up_those_behind_it() -> None:
    scheduler = overlapped()
    add_requests(scheduler, {"a": 4}, max_tokens=1)
    add_requests(scheduler, {"b": 4}, max_tokens=9)
    scheduler.schedule()
    assert scheduler.schedule().num_scheduled_tokens == {"b": 1}


def test_the_step_beyond_a_stop_is_dropped() -> None:
    scheduler = overlapped()
    (a,) = add_requests(scheduler, {"a": 4})
    first, second = scheduler.schedule(), scheduler.schedule()
    assert update(scheduler, first, {"a": [EOS]})["a"].finish_reason is FinishReason.STOP
    assert scheduler.kv_cache_manager.usage == 0.0
    assert update(scheduler, second, {"a": [99]}) == {}
    assert a.output_token_ids == [EOS]
    assert not scheduler._num_orphaned_steps


def test_an_id_used_again_gets_none_of_two_old_steps() -> None:
    scheduler = overlapped()
    add_requests(scheduler, {"a": 4})
    old = [scheduler.schedule(), scheduler.schedule()]
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    (again,) = add_requests(scheduler, {"a": 5})
    new = scheduler.schedule()
    assert [update(scheduler, output, {"a": [11]}) for output in old] == [{}, {}]
    assert update(scheduler, new, {"a": [12]})["a"].new_token_ids == [12]
    assert again.output_token_ids == [12]


def test_preempted_with_a_step_in_flight() -> None:
    # 4 blocks: a and b take 2 each, filled to the last slot.
    scheduler = overlapped(num_blocks=5, max_model_len=16, enable_prefix_caching=False)
    a, b = add_requests(scheduler, {"a": 8, "b": 8})
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (second.num_scheduled_tokens, second.preempted_req_ids) == ({"a": 1}, {"b"})
    assert (b.num_computed_tokens, b.num_output_placeholders, b.num_steps_in_flight) == (0, 0, 1)
    # Its first token arrives late, and it goes on from there; meanwhile it lets others pass.
    assert update(scheduler, first, {"a": [EOS], "b": [20]})["b"].new_token_ids == [20]
    assert (b.status, b.output_token_ids, b.num_steps_in_flight) == (RequestStatus.PREEMPTED, [20], 0)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"b": 9}
    assert output.scheduled_new_reqs[0].token_ids == [*b.prompt_token_ids, 20]
    assert update(scheduler, second, {"a": [99]}) == {}
    assert update(scheduler, output, {"b": [21]})["b"].new_token_ids == [21]
    assert a.output_token_ids == [EOS]


def test_a_request_whose_tokens_are_on_their_way_keeps_its_place_and_lets_others_pass() -> None:
    scheduler = overlapped(num_blocks=9, max_model_len=16, max_num_seqs=2)
    a, b = add_requests(scheduler, {"a": 4, "b": 4})
    first = scheduler.schedule()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    add_requests(scheduler, {"c": 4, "d": 4, "e": 4})
    assert scheduler.schedule().num_scheduled_tokens == {"c": 4, "d": 4}
    assert ids_of(list(scheduler.waiting)) == ["a", "b", "e"]
    update(scheduler, first, {"a": [10], "b": [EOS]})
    # b ended while it waited.
    assert ids_of(list(scheduler.waiting)) == ["a", "e"]
    assert (a.output_token_ids, b.status) == ([10], RequestStatus.FINISHED_STOPPED)


class OverlappedDraftScheduler(Scheduler):
    """Schedules two drafts a step before they are known, as an asynchronous scheduler with a draft model does."""

    def _update_after_schedule(self, requests: list[Request], output: SchedulerOutput) -> None:
        super()._update_after_schedule(requests, output)
        for request in requests:
            if not request.is_prefill_chunk:
                request.num_output_placeholders += 1 + len(output.scheduled_spec_decode_tokens.get(request.request_id, ()))
                request.spec_token_ids = [-1, -1]


def test_unknown_drafts_on_top_of_unknown_tokens() -> None:
    scheduler = make_scheduler(cls=OverlappedDraftScheduler, num_lookahead_tokens=2)
    (a,) = add_requests(scheduler, {"a": 6})

    def accounts() -> tuple[int, int, int]:
        return a.num_tokens, a.num_computed_tokens, a.num_output_placeholders

    first = scheduler.schedule()
    assert accounts() == (6, 6, 1)
    second = scheduler.schedule()
    assert (second.num_scheduled_tokens, second.scheduled_spec_decode_tokens) == ({"a": 3}, {"a": [-1, -1]})
    assert accounts() == (6, 9, 4)
    update(scheduler, first, {"a": [10]})
    assert accounts() == (7, 9, 3)
    third = scheduler.schedule()
    assert (third.num_scheduled_tokens, third.scheduled_cached_reqs.num_computed_tokens) == ({"a": 3}, [9])
    assert accounts() == (7, 12, 6)
    # One of two drafts was right: one position too many was counted. What is left are the three of the third step.
    update(scheduler, second, {"a": [11, 12]})
    assert accounts() == (9, 11, 3)
    update(scheduler, third, {"a": [13, 14, 15]})
    assert accounts() == (12, 11, 0)


@pytest.mark.parametrize("sampled", [[42], [EOS]])
def test_output_of_a_step_before_a_preemption_without_placeholders(sampled: list[int]) -> None:
    """The plain scheduler, with the steps of different requests in flight (as in a pipeline)."""
    scheduler = make_scheduler(num_blocks=11, max_model_len=40, enable_prefix_caching=False)
    add_requests(scheduler, {"a": 20})
    output_a = scheduler.schedule()
    (b,) = add_requests(scheduler, {"b": 20})
    output_b = scheduler.schedule()
    assert output_b.num_scheduled_tokens == {"b": 20}, "a waits for its token"
    update(scheduler, output_a)
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.preempted_req_ids) == ({"a": 1}, {"b"})
    assert update(scheduler, output_b, {"b": sampled})["b"].new_token_ids == sampled
    assert b.output_token_ids == sampled
    assert ("b" in scheduler.waiting, b.status.is_finished) == (sampled == [42], sampled == [EOS])
    update(scheduler, output)
    step(scheduler)
