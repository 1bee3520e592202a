"""Asynchronous scheduling changes when things happen, never what comes out."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import ToyExecutor, expected_tokens, make_config

from jaxllm.core.async_scheduler import AsyncScheduler
from jaxllm.core.types import EngineCoreRequest
from jaxllm.engine.core import EngineCore
from jaxllm.sampling_params import RepetitionDetectionParams, SamplingParams


@dataclass
class Asked:
    """A request of a test.

    Attributes:
        at: the step before which it comes.
        abort_after: outputs after which it is aborted, None for never.
    """

    prompt: list[int]
    params: dict[str, Any]
    at: int = 0
    priority: int = 0
    abort_after: int | None = None


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    num_prompt_logprobs: int | None = None
    end: tuple[Any, Any] | None = None


def answers(asked: Sequence[Asked], **config: Any) -> list[Answer]:
    core = EngineCore(make_config(**config), ToyExecutor, log_stats=True)
    got = {str(i): Answer() for i in range(len(asked))}
    todo = sorted(range(len(asked)), key=lambda i: asked[i].at)
    step = 0
    while todo or core.has_work():
        while todo and asked[todo[0]].at <= step:
            i = todo.pop(0)
            params = SamplingParams(detokenize=False, **asked[i].params)
            request = EngineCoreRequest(str(i), asked[i].prompt, params, priority=asked[i].priority, arrival_time=i)
            core.add_request(core.make_request(request))
        for outputs in core.step().values():
            for output in outputs.outputs:
                answer = got[output.request_id]
                assert answer.end is None
                answer.token_ids += output.new_token_ids
                if output.new_logprobs is not None:
                    answer.logprobs += output.new_logprobs.logprobs.tolist()
                if output.new_prompt_logprobs is not None:
                    answer.num_prompt_logprobs = len(output.new_prompt_logprobs.ranks)
                if output.finished:
                    answer.end = (output.finish_reason, output.stop_reason)
                elif len(answer.token_ids) >= (asked[int(output.request_id)].abort_after or sys.maxsize):
                    answer.end = ("aborted", None)
                    core.abort_requests([output.request_id])
        core.scheduler.check_integrity()
        step += 1
    assert core.executor.rows == {}  # type: ignore[attr-defined]
    assert core.reset_prefix_cache()
    core.shutdown()
    return [got[str(i)] for i in range(len(asked))]


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    max_tokens = draw(st.integers(1, 12))
    return Asked(
        prompt=[7, 8, 9] * draw(st.integers(0, 4)) + draw(st.lists(st.integers(3, 12), min_size=1, max_size=12)),
        params={
            "max_tokens": max_tokens,
            # About a third of the vocabulary, so that outputs end early and without warning.
            "stop_token_ids": draw(st.sampled_from([[], list(range(3, 320, 3))])),
            "min_tokens": draw(st.integers(0, min(2, max_tokens))),
            "logprobs": draw(st.sampled_from([None, None, 2])),
            "prompt_logprobs": draw(st.sampled_from([None, None, None, 1])),
            "repetition_detection": draw(st.sampled_from([None, RepetitionDetectionParams(3)])),
        },
        at=draw(st.integers(0, 12)),
        priority=draw(st.integers(0, 2)),
        abort_after=draw(st.sampled_from([None, None, None, 1, 3])),
    )


@settings(max_examples=40, deadline=None)
@given(
    asked=st.lists(requests(), min_size=1, max_size=10),
    num_blocks=st.sampled_from([17, 20, 129]),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefix_caching=st.booleans(),
    budget=st.sampled_from([8, 16]),
    num_steps=st.integers(2, 5),
    num_stages=st.integers(2, 4),
    asynchronous=st.booleans(),
)
def test_same_as_synchronous(asked, num_blocks, policy, prefix_caching, budget, num_steps, num_stages, asynchronous):
    config = {
        "num_blocks": num_blocks,
        "policy": policy,
        "prefix_caching": prefix_caching,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 6,
    }
    expected = answers(asked, **config, async_scheduling=False)
    assert answers(asked, **config, async_scheduling=True) == expected
    # As many steps in flight as a pipeline has stages, or one more.
    assert answers(asked, **config, async_scheduling=asynchronous, num_stages=num_stages) == expected
    # With several decodes a step an abort comes at another token: its request then has some of its tokens, all others theirs.
    unaborted = [dataclasses.replace(one, abort_after=None) for one in asked]
    whole = answers(unaborted, **config, async_scheduling=False)
    for is_async in (False, True):
        several = {**config, "num_decode_steps": num_steps, "async_scheduling": is_async}
        assert answers(unaborted, **several) == whole
        for got, one in zip(answers(asked, **several), whole, strict=True):
            assert got.token_ids == one.token_ids[: len(got.token_ids)]
            assert got.end in (one.end, ("aborted", None))


def test_the_next_step_starts_before_the_last_is_read():
    log: list[str] = []

    class Slow(ToyExecutor):
        def start_model(self, scheduler_output):
            step = len([entry for entry in log if entry.startswith("start")])
            handle = super().start_model(scheduler_output)
            log.append(f"start {step}")

            class Handle:
                def result(self):
                    log.append(f"read {step}")
                    return handle.result()

            return Handle()

    core = EngineCore(make_config(async_scheduling=True), Slow, log_stats=False)
    assert isinstance(core.scheduler, AsyncScheduler)
    params = SamplingParams(max_tokens=3, detokenize=False)
    core.add_request(core.make_request(EngineCoreRequest("a", [5, 6], params)))
    tokens = []
    while core.has_work():
        for outputs in core.step().values():
            tokens += [token for output in outputs.outputs for token in output.new_token_ids]
    assert tokens == expected_tokens([5, 6], 3)
    # The length is known beforehand, so no step is wasted on it.
    assert log[:5] == ["start 0", "start 1", "read 0", "start 2", "read 1"]
    assert log.count("read 3") <= 1


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_leaves_no_step_in_flight(mode):
    core = EngineCore(make_config(async_scheduling=True), ToyExecutor, log_stats=True)
    params = SamplingParams(max_tokens=6, detokenize=False)
    core.add_request(core.make_request(EngineCoreRequest("a", [5, 6], params)))
    tokens: list[int] = []

    def take(all_outputs):
        for outputs in all_outputs.values():
            for output in outputs.outputs:
                tokens.extend(output.new_token_ids)

    for _ in range(3):
        take(core.step())
    done = core.pause(mode, clear_cache=True)
    while not done.done():
        take(core.step())
    assert not core._in_flight
    take(core.take_undelivered())
    core.resume()
    while core.has_work():
        take(core.step())
    expected = expected_tokens([5, 6], 6)
    assert tokens == (expected[: len(tokens)] if mode == "abort" else expected)
    assert len(tokens) >= 2
    assert core.reset_prefix_cache()
