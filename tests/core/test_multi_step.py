"""Steps of several decodes: when they are scheduled, what they reserve, and what their output means."""

import pytest
from core_builders import EOS, add_requests, make_scheduler, update

from jaxllm.core.async_scheduler import AsyncScheduler
from jaxllm.core.output import MAX_END_TOKEN_IDS, SchedulerOutput
from jaxllm.core.request import RequestStatus
from jaxllm.core.scheduler import Scheduler
from jaxllm.core.types import FinishReason
from jaxllm.sampling_params import RepetitionDetectionParams


def prefilled(cls: type[Scheduler] = Scheduler, num_steps: int = 4, prompt: int = 6, max_tokens: int = 30, **kwargs) -> Scheduler:
    """A scheduler with request a, whose prompt is computed and first token, 9, sampled."""
    params = {name: kwargs.pop(name) for name in ("stop", "stop_token_ids", "repetition_detection") if name in kwargs}
    scheduler = make_scheduler(cls=cls, num_decode_steps=num_steps, **kwargs)
    add_requests(scheduler, {"a": prompt}, max_tokens=max_tokens, **params)
    update(scheduler, scheduler.schedule(), {"a": [9]})
    return scheduler


def steps_of(output: SchedulerOutput) -> tuple[int, dict[str, int]]:
    return output.num_decode_steps, output.num_scheduled_tokens


def test_several_tokens_a_step() -> None:
    scheduler = prefilled()
    a = scheduler.requests["a"]
    output = scheduler.schedule()
    assert steps_of(output) == (4, {"a": 4})
    assert (output.total_num_scheduled_tokens, output.scheduled_cached_reqs.num_computed_tokens) == (4, [6])
    # 6 + 4 tokens of 4 a block: two blocks for the prompt, and one more at once.
    assert output.scheduled_cached_reqs.new_block_ids == [([3],)]
    assert a.num_computed_tokens == 10
    assert update(scheduler, output, {"a": [10, 11, 12, 13]})["a"].new_token_ids == [10, 11, 12, 13]
    assert (a.num_tokens, a.num_computed_tokens) == (11, 10)
    assert steps_of(scheduler.schedule()) == (4, {"a": 4})


def test_a_prompt_is_never_part_of_it() -> None:
    scheduler = make_scheduler(num_decode_steps=4, max_num_batched_tokens=16, max_num_seqs=4)
    add_requests(scheduler, {"a": 17}, max_tokens=30)
    # 16 of 17 tokens, then the last one: it is one token, but no decode.
    for expected in ({"a": 16}, {"a": 1}):
        output = scheduler.schedule()
        assert steps_of(output) == (1, expected)
        update(scheduler, output)
    assert steps_of(scheduler.schedule()) == (4, {"a": 4})


def test_not_while_requests_wait() -> None:
    scheduler = prefilled(max_num_seqs=1)
    add_requests(scheduler, {"b": 4})
    assert steps_of(scheduler.schedule()) == (1, {"a": 1})


def test_not_in_the_step_that_admits() -> None:
    scheduler = prefilled()
    add_requests(scheduler, {"b": 4})
    assert steps_of(scheduler.schedule()) == (1, {"a": 1, "b": 4})


@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["x"]},
        {"repetition_detection": RepetitionDetectionParams(3)},
        {"stop_token_ids": list(range(100, 100 + MAX_END_TOKEN_IDS))},
    ],
)
def test_not_for_a_request_that_needs_the_host(params) -> None:
    scheduler = prefilled(**params)
    assert steps_of(scheduler.schedule()) == (1, {"a": 1})


def test_the_devices_know_the_ends() -> None:
    scheduler = make_scheduler(num_decode_steps=4)
    (a,) = add_requests(scheduler, {"a": 3}, stop_token_ids=[30, EOS, 31])
    assert a.end_token_ids == (EOS, 30, 31)
    assert scheduler.schedule().scheduled_new_reqs[0].end_token_ids == (EOS, 30, 31)
    (b,) = add_requests(scheduler, {"b": 3}, ignore_eos=True)
    assert b.end_token_ids == ()


def test_no_token_beyond_a_limit() -> None:
    scheduler = prefilled(max_tokens=3)
    add_requests(scheduler, {"b": 4}, max_tokens=30)
    output = scheduler.schedule()
    update(scheduler, output, {"a": [10], "b": [20]})
    output = scheduler.schedule()
    assert steps_of(output) == (4, {"a": 1, "b": 4})
    outputs = update(scheduler, output, {"a": [11], "b": [21, 22, 23, 24]})
    assert (outputs["a"].finish_reason, outputs["b"].finish_reason) == (FinishReason.LENGTH, None)
    # Nobody has room for more than the length of the model allows.
    scheduler = prefilled(max_model_len=9, max_num_batched_tokens=16)
    assert steps_of(scheduler.schedule()) == (2, {"a": 2})


def test_an_end_amid_the_steps() -> None:
    scheduler = prefilled()
    a = scheduler.requests["a"]
    out = update(scheduler, scheduler.schedule(), {"a": [10, EOS]})["a"]
    assert (out.new_token_ids, out.finish_reason) == ([10, EOS], FinishReason.STOP)
    assert a.num_computed_tokens == 8
    assert scheduler.kv_cache_manager.usage == 0.0
    # 8 tokens were computed from tokens that are known: both blocks can be hit, the reserved one cannot.
    (b,) = add_requests(scheduler, {"b": [*a.all_token_ids, 1, 2, 3, 4]})
    assert scheduler.kv_cache_manager.get_computed_blocks(b)[1] == 8


def test_blocks_are_cached_for_known_tokens_only() -> None:
    scheduler = prefilled(num_steps=8)
    a = scheduler.requests["a"]
    scheduler.schedule()
    assert a.num_computed_tokens == 14
    assert scheduler.kv_cache_manager.managers[0].num_cached_blocks["a"] == 1


def test_fewer_steps_where_blocks_are_short_and_no_preemption() -> None:
    # Four blocks of four tokens, and each of the two prompts takes one.
    scheduler = make_scheduler(num_decode_steps=8, num_blocks=5, max_model_len=16, max_num_batched_tokens=32)
    add_requests(scheduler, {"a": 4, "b": 4}, max_tokens=30)
    update(scheduler, scheduler.schedule(), {"a": [10], "b": [20]})
    # Eight tokens more would take three blocks each, four take two.
    output = scheduler.schedule()
    assert steps_of(output) == (4, {"a": 4, "b": 4})
    assert output.scheduled_cached_reqs.new_block_ids == [([3],), ([4],)]
    update(scheduler, output, {"a": [11, 12, 13, 14], "b": [21, 22, 23, 24]})
    # Now even one token needs a preemption, and then b waits.
    output = scheduler.schedule()
    assert (steps_of(output), output.preempted_req_ids) == ((1, {"a": 1}), {"b"})
    update(scheduler, output, {"a": [15]})
    assert steps_of(scheduler.schedule()) == (1, {"a": 1})


def test_steps_in_flight() -> None:
    scheduler = prefilled(AsyncScheduler, max_tokens=12)
    a = scheduler.requests["a"]
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert [steps_of(output) for output in (first, second, third)] == [(4, {"a": 4}), (4, {"a": 4}), (3, {"a": 3})]
    assert second.scheduled_cached_reqs.num_computed_tokens == [10]
    assert a.num_output_placeholders == 11
    # The last token is on its way.
    assert scheduler.schedule().num_scheduled_tokens == {}
    update(scheduler, first, {"a": [10, 11, 12, 13]})
    assert (a.num_tokens, a.num_computed_tokens, a.num_output_placeholders) == (11, 17, 7)
    # An end in the second makes the third stale.
    assert update(scheduler, second, {"a": [14, EOS]})["a"].new_token_ids == [14, EOS]
    assert update(scheduler, third, {"a": [99, 99, 99]}) == {}
    assert a.output_token_ids == [9, 10, 11, 12, 13, 14, EOS]


def test_aborted_amid_the_steps() -> None:
    scheduler = prefilled(AsyncScheduler)
    outputs = [scheduler.schedule(), scheduler.schedule()]
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_cache_manager.usage == 0.0
    assert [update(scheduler, output, {"a": [10, 11, 12, 13]}) for output in outputs] == [{}, {}]


def test_preempted_amid_the_steps() -> None:
    scheduler = prefilled(AsyncScheduler)
    a = scheduler.requests["a"]
    output = scheduler.schedule()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.schedule().num_scheduled_tokens == {}, "its tokens are on their way"
    assert update(scheduler, output, {"a": [10, 11, 12, 13]})["a"].new_token_ids == [10, 11, 12, 13]
    assert (a.num_computed_tokens, a.num_output_placeholders) == (0, 0)
    assert steps_of(scheduler.schedule()) == (1, {"a": 11})


def test_a_lower_bound_set_from_outside() -> None:
    scheduler = prefilled(num_steps=8)
    scheduler.max_decode_steps = 3
    assert steps_of(scheduler.schedule()) == (3, {"a": 3})
