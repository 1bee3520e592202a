"""Messages between an executor and its workers arrive as they were sent."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec
from jaxllm.core.output import (
    CachedRequestData,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    WorkerStepStats,
)
from jaxllm.executor.wire import Kind, Message, WorkerFailure, decode_message, encode_message
from jaxllm.sampling_params import SamplingParams


def sent(message: Message) -> Message:
    return decode_message([bytes(frame) for frame in encode_message(message)])


names = st.text(max_size=8)
counts = st.integers(0, 2**31 - 1)
token_ids = st.lists(counts, max_size=6)
block_ids = st.tuples(token_ids, token_ids)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.none() | st.integers(0, 2**63),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-1, 1, width=32), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3),
    max_tokens=st.integers(1, 99),
    logprobs=st.none() | st.integers(0, 5),
)
new_requests = st.builds(NewRequestData, names, token_ids, counts, params, block_ids, counts)


@st.composite
def cached_requests(draw: st.DrawFn) -> CachedRequestData:
    size = draw(st.integers(0, 4))
    columns = [st.lists(one, min_size=size, max_size=size) for one in (names, st.none() | block_ids, counts, counts)]
    return CachedRequestData(*map(draw, columns))


scheduler_outputs = st.builds(
    SchedulerOutput,
    st.lists(new_requests, max_size=3),
    cached_requests(),
    st.dictionaries(names, counts, max_size=4),
    counts,
    st.dictionaries(names, token_ids, max_size=2),
    st.sets(names, max_size=3),
    st.sets(names, max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(scheduler_outputs)
def test_scheduler_outputs(output):
    got = sent(Message(Kind.START, 7, output))
    assert got == Message(Kind.START, 7, output)
    assert list(got.body.num_scheduled_tokens) == list(output.num_scheduled_tokens)  # the order of scheduling


@st.composite
def logprobs(draw: st.DrawFn) -> LogprobsLists:
    rows, width = draw(st.sampled_from([(0, 1), (1, 3), (400, 11)]))
    shape = (rows, width)
    return LogprobsLists(
        np.arange(rows * width, dtype=np.int32).reshape(shape),
        np.linspace(-9, 0, rows * width, dtype=np.float32).reshape(shape),
        np.arange(rows, dtype=np.int32),
    )


def same(one: LogprobsLists | None, other: LogprobsLists | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


@settings(max_examples=50, deadline=None)
@given(
    req_ids=st.lists(names, max_size=4, unique=True),
    some=st.none() | logprobs(),
    prompt=st.dictionaries(names, logprobs(), max_size=2),
    stats=st.none() | st.builds(WorkerStepStats, st.floats(0, 9), st.floats(0, 9), counts, counts, counts),
)
def test_model_runner_outputs(req_ids, some, prompt, stats):
    indices = {req_id: i for i, req_id in enumerate(req_ids)}
    output = ModelRunnerOutput(req_ids, indices, [[i] for i in indices.values()], some, indices, prompt, stats)
    got = sent(Message(Kind.OUTPUT, 3, output)).body
    assert same(got.logprobs, some)
    assert got.prompt_logprobs.keys() == prompt.keys()
    assert all(same(got.prompt_logprobs[req_id], prompt[req_id]) for req_id in prompt)
    assert dataclasses.replace(got, logprobs=None, prompt_logprobs={}) == dataclasses.replace(
        output, logprobs=None, prompt_logprobs={}
    )


def test_calls_and_results_keep_their_types():
    config = KVCacheConfig(9, (KVCacheGroup((0, 1), KVCacheSpec(4, 2, 8, 4, None)),))
    for value in (None, ("sleep", (1,), {"tags": ["a"]}), config, {1: {2, 3}}, b"x", [1.5, True]):
        assert sent(Message(Kind.CALL, 1, value)) == Message(Kind.CALL, 1, value)
    with pytest.raises(TypeError, match="a object cannot be sent"):
        encode_message(Message(Kind.RESULT, 1, object()))


def test_failures():
    try:
        [][1]
    except IndexError as error:
        failure = WorkerFailure.of(error)
    got = sent(Message(Kind.FAILURE, 5, failure)).body
    assert got == failure
    assert str(got).startswith("IndexError: list index out of range (test_wire.py:")
    assert repr(got.to_exception()) == "IndexError('list index out of range')"
    assert repr(WorkerFailure("XlaRuntimeError", "no memory", "").to_exception()) == "RuntimeError('XlaRuntimeError: no memory')"
    assert WorkerFailure.of(ValueError("never raised")).place == ""
