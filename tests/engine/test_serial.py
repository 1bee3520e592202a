"""Whatever crosses to another process arrives as it was."""

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.core.kv_events import KVEvents
from jaxllm.core.output import LogprobsLists
from jaxllm.core.types import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EventType,
    FinishReason,
    PrefixCacheStats,
    SchedulerStats,
)
from jaxllm.engine.errors import EngineDeadError
from jaxllm.engine.serial import (
    CallFailure,
    Frames,
    decode_outputs,
    decode_request,
    decode_value,
    encode_outputs,
    encode_request,
    encode_value,
)
from jaxllm.executor.values import LEAST_FRAME_BYTES
from jaxllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams


def sent(frames: Frames) -> list[bytes]:
    """What arrives: bytes."""
    return [bytes(frame) for frame in frames]


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    return a == b


ints = st.integers(-(2**63), 2**64 - 1)
scalars = st.none() | st.booleans() | ints | st.floats(allow_nan=False) | st.text() | st.binary()
hashables = st.recursive(scalars, lambda inner: st.tuples(inner, inner), max_leaves=4)
arrays = st.builds(
    lambda dtype, shape: np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape),
    st.sampled_from(["i1", "<i4", ">i4", "u8", "f2", "f4", "f8", "c8", "?"]),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
)
stats = st.builds(
    SchedulerStats,
    st.integers(0, 9),
    st.integers(0, 9),
    st.floats(0, 1),
    st.integers(0, 9),
    st.builds(PrefixCacheStats, *[st.integers(0, 99)] * 6, st.booleans()),
)
values = st.recursive(
    hashables | arrays | stats | st.builds(CallFailure, st.text(), st.text()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=300)
def test_values(value: Any) -> None:
    assert same(decode_value(sent(encode_value(value))), value)


def test_large_arrays_are_frames_and_are_not_copied() -> None:
    large = np.arange(LEAST_FRAME_BYTES, dtype=np.uint8)
    small = large[:-1]
    first, frame = encode_value([small, large])
    assert len(first) < LEAST_FRAME_BYTES + 100
    assert np.shares_memory(np.frombuffer(frame, np.uint8), large)
    _, decoded = decode_value([first, frame])
    assert np.shares_memory(decoded, large)
    column = np.arange(4 * LEAST_FRAME_BYTES, dtype=np.float32).reshape(-1, 4)[:, 1]
    assert same(decode_value(sent(encode_value({1: (column,)}))), {1: (np.ascontiguousarray(column),)})


def test_numpy_scalars_become_pythons() -> None:
    value = decode_value(sent(encode_value([np.int32(5), np.float32(0.5), np.bool_(True), np.float64(2.5), np.str_("a")])))
    assert same(value, [5, 0.5, True, 2.5, "a"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "a object cannot be sent to another process, got <object"),
        ([{"a": lambda: 0}], "a function cannot be sent"),
        (np.array(["a"]), "a ndarray cannot be sent"),
        (2**64, "an integer must fit in 64 bits .* got 18446744073709551616"),
        (SamplingParams(), "a SamplingParams cannot be sent"),
    ],
)
def test_what_cannot_be_sent(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode_value(value)


def test_failures_come_back_as_what_they_were() -> None:
    for error in (ValueError("a"), KeyError("b"), TimeoutError("c"), AttributeError("d"), EngineDeadError("e"), RuntimeError("")):
        back = CallFailure.of(error).to_exception()
        assert (type(back), str(back).strip("'\"")) == (type(error), str(error).strip("'\""))
    for error in (msgspec.DecodeError("a"), UnicodeDecodeError("utf-8", b"a", 0, 1, "b"), KeyboardInterrupt()):
        back = CallFailure.of(error).to_exception()
        assert type(back) is RuntimeError
        assert str(back).startswith(type(error).__name__)


token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=5)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.25, 1.0]),
    top_k=st.integers(-1, 9),
    n=st.integers(1, 3),
    seed=st.none() | ints.filter(lambda seed: seed != -1),
    stop=st.none() | st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=st.none() | token_lists,
    ignore_eos=st.booleans(),
    max_tokens=st.integers(9, 99),
    min_tokens=st.integers(0, 9),
    logprobs=st.none() | st.integers(-1, 3),
    prompt_logprobs=st.none() | st.integers(-1, 3),
    output_kind=st.sampled_from(RequestOutputKind),
    stream_interval=st.none() | st.integers(1, 4),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | token_lists.filter(bool),
    bad_words=st.none() | st.lists(st.text(min_size=1), max_size=3, unique=True),
    extra_args=st.none() | st.dictionaries(st.text(), values, max_size=3),
    skip_reading_prefix_cache=st.none() | st.booleans(),
    repetition_detection=st.none()
    | st.builds(RepetitionDetectionParams, st.integers(3, 9), st.integers(1, 3), st.integers(2, 4)),
)


@given(
    st.builds(
        EngineCoreRequest,
        st.text(),
        token_lists,
        params,
        eos_token_id=st.none() | st.integers(0, 99),
        arrival_time=st.floats(0, 2e9),
        priority=st.integers(-(2**63), 2**63 - 1),
        cache_salt=st.none() | st.text(),
        extra_keys=st.lists(st.text(), max_size=3).map(tuple),
        client_index=st.integers(0, 9),
        trace_headers=st.none() | st.dictionaries(st.text(), st.text(), max_size=3),
    ),
    st.lists(token_lists, max_size=3),
)
@settings(max_examples=200)
def test_requests(request: EngineCoreRequest, bad_words_token_ids: list[list[int]]) -> None:
    request.sampling_params.bad_words_token_ids = bad_words_token_ids
    request.sampling_params.all_stop_token_ids.add(7)
    back = decode_request(sent(encode_request(request)))
    assert same(back, request)
    assert back.sampling_params.stop is not SamplingParams().stop


def test_requests_are_small() -> None:
    """Only what differs from the default is sent."""
    assert len(encode_request(EngineCoreRequest("r", [5], SamplingParams()))[0]) < 32


@st.composite
def logprobs(draw: st.DrawFn, width: int, num_rows: int | None = None) -> LogprobsLists:
    num_rows = draw(st.integers(0, 4)) if num_rows is None else num_rows
    numbers = np.arange(num_rows * width).reshape(num_rows, width) + draw(st.integers(0, 9))
    return LogprobsLists(numbers.astype(np.int32), -numbers.astype(np.float32), numbers[:, 0].astype(np.int32))


short_hashes = st.lists(st.integers(0, 2**64 - 1), max_size=9).map(lambda hashes: np.array(hashes, np.uint64))


@st.composite
def engine_core_outputs(draw: st.DrawFn) -> EngineCoreOutputs:
    outputs = []
    for i in range(draw(st.integers(0, 6))):
        tokens = draw(token_lists)
        with_logprobs = logprobs(draw(st.integers(1, 3)), len(tokens))
        outputs.append(
            EngineCoreOutput(
                f"r{i}",
                tokens,
                draw(st.none() | with_logprobs),
                draw(st.none() | logprobs(2) | logprobs(LEAST_FRAME_BYTES)),
                draw(st.none() | st.sampled_from(FinishReason)),
                None,
                draw(st.none() | st.lists(st.builds(EngineCoreEvent, st.sampled_from(EventType), st.floats(0, 9)), max_size=3)),
                draw(st.integers(0, 99)),
            )
        )
        if outputs[-1].finish_reason is not None:
            outputs[-1].stop_reason = draw(st.none() | st.integers(0, 99) | st.text())
    return EngineCoreOutputs(
        outputs,
        draw(st.none() | stats),
        draw(st.floats(0, 1e6)),
        draw(st.none() | st.sets(st.text(), max_size=3)),
        draw(st.none() | st.tuples(st.integers(0, 99), values)),
        draw(st.none() | st.builds(KVEvents, short_hashes, short_hashes, st.booleans())),
    )


@given(engine_core_outputs())
@settings(max_examples=200)
def test_outputs(outputs: EngineCoreOutputs) -> None:
    back = decode_outputs(sent(encode_outputs(outputs)))
    assert same(back, outputs)
    for output in back.outputs:
        assert output.finish_reason is None or type(output.finish_reason) is FinishReason


def test_no_field_is_forgotten() -> None:
    """A new field needs a place in the messages, and in the strategies above."""
    known = {
        EngineCoreRequest: 10,
        EngineCoreOutput: 8,
        EngineCoreOutputs: 7,  # the engine's index is not sent
        EngineCoreEvent: 2,
    }
    assert {cls: len(fields(cls)) for cls in known} == known
    assert LogprobsLists._fields == ("token_ids", "logprobs", "ranks")
