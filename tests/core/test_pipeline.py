"""Steps for the stages of a pipeline: different requests in flight, evenly many."""

import pytest
from core_builders import add_requests, make_scheduler, update

from jaxllm.core.async_scheduler import AsyncScheduler
from jaxllm.core.output import SchedulerOutput
from jaxllm.core.scheduler import Scheduler


def scheduled(output: SchedulerOutput) -> dict[str, int]:
    return output.num_scheduled_tokens


@pytest.mark.parametrize("cls", [Scheduler, AsyncScheduler])
def test_each_stage_gets_its_share_of_the_requests(cls: type[Scheduler]) -> None:
    scheduler = make_scheduler(cls=cls, num_pipeline_stages=2)
    add_requests(scheduler, {"a": 3, "b": 3, "c": 3, "d": 3, "e": 3})
    first, second = scheduler.schedule(), scheduler.schedule()
    # Five requests, two stages: at most three in a step.
    assert (scheduled(first), scheduled(second)) == ({"a": 3, "b": 3, "c": 3}, {"d": 3, "e": 3})
    update(scheduler, first)
    third = scheduler.schedule()
    assert scheduled(third) == {"a": 1, "b": 1, "c": 1}
    update(scheduler, second)
    fourth = scheduler.schedule()
    assert scheduled(fourth) == {"d": 1, "e": 1}


def test_synchronous_requests_wait_for_their_tokens() -> None:
    scheduler = make_scheduler(num_pipeline_stages=2)
    add_requests(scheduler, {"a": 3, "b": 3})
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (scheduled(first), scheduled(second), scheduled(scheduler.schedule())) == ({"a": 3}, {"b": 3}, {})


def test_asynchronous_requests_come_again_after_as_many_steps_as_there_are_stages() -> None:
    scheduler = make_scheduler(cls=AsyncScheduler, num_pipeline_stages=3)
    (a,) = add_requests(scheduler, {"a": 3})
    outputs = [scheduler.schedule() for _ in range(4)]
    # The fourth step is scheduled while the first is in flight: it is one more than there are stages.
    assert list(map(scheduled, outputs)) == [{"a": 3}, {}, {}, {"a": 1}]
    assert a.num_output_placeholders == 2
    update(scheduler, outputs[0])
    assert (a.output_token_ids, a.num_output_placeholders) == ([7], 1)
    assert scheduled(scheduler.schedule()) == {}


def test_the_chunks_of_a_prompt_follow_each_other() -> None:
    """They need no token, so they fill the pipeline."""
    scheduler = make_scheduler(cls=AsyncScheduler, num_pipeline_stages=2, max_num_batched_tokens=16)
    add_requests(scheduler, {"a": 40})
    outputs = [scheduler.schedule() for _ in range(5)]
    assert list(map(scheduled, outputs)) == [{"a": 16}, {"a": 16}, {"a": 8}, {}, {"a": 1}]


def test_a_few_requests_are_not_spread_over_more_steps_than_there_are_rows() -> None:
    scheduler = make_scheduler(num_pipeline_stages=2, max_num_seqs=4)
    add_requests(scheduler, dict.fromkeys("abcdefgh", 3))
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert (list(scheduled(first)), list(scheduled(second)), list(scheduled(third))) == (["a", "b"], ["c", "d"], [])
