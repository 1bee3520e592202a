"""How requests, outputs and calls cross to another process: msgpack in the first frame, large arrays as frames of their own.

A step's outputs go as columns (all ids, all tokens, …) rather than as one record a request: most of a record says what the next
one says too, and columns are a quarter of the bytes and half of the time.

Values of calls keep their Python types: None, bool, int (64 bits), float, str, bytes, list, tuple, set, dict, NumPy arrays, and
the dataclasses of `_DATACLASSES`. NumPy scalars arrive as Python's. Nothing is pickled: what arrives can run no code.
"""

import builtins
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import msgspec
import numpy as np

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
    StepStats,
)
from jaxllm.engine.errors import EngineDeadError
from jaxllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams

Buffer = bytes | bytearray | memoryview
Frames = Sequence[Buffer]

# A smaller array is copied into the first frame: a frame of its own costs about as much as copying this.
LEAST_FRAME_BYTES = 4096

_TUPLE, _SET, _DICT, _ARRAY, _DATACLASS = range(1, 6)


@dataclass(frozen=True, slots=True)
class CallFailure:
    """What a call raised, in the process in which it ran.

    Attributes:
        kind: name of the exception's class.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        return cls(type(error).__name__, str(error))

    def to_exception(self) -> Exception:
        """The same exception if it is one of Python's own or EngineDeadError, else a RuntimeError that names it."""
        kind = EngineDeadError if self.kind == "EngineDeadError" else getattr(builtins, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(self.message)
            except TypeError:  # UnicodeDecodeError and the like want more than a message
                pass
        return RuntimeError(f"{self.kind}: {self.message}")


_DATACLASSES = {
    cls.__name__: cls for cls in (CallFailure, KVEvents, PrefixCacheStats, RepetitionDetectionParams, SchedulerStats, StepStats)
}

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class _Packer:
    """Turns values into what msgpack knows; arrays that deserve it go to `frames`, whose first is kept for the rest."""

    def __init__(self) -> None:
        self.frames: list[Buffer] = [b""]

    def finish(self, packed: Any) -> list[Buffer]:
        self.frames[0] = _encode(packed)
        return self.frames

    def array(self, array: np.ndarray) -> Buffer | int:
        """Its bytes, or the number of the frame that has them."""
        if array.nbytes < LEAST_FRAME_BYTES:
            return array.tobytes()
        self.frames.append(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        return len(self.frames) - 1

    def logprobs(self, logprobs: LogprobsLists) -> tuple[Any, ...]:
        token_ids, values, ranks = logprobs
        return (
            token_ids.shape[1],
            self.array(token_ids.astype(np.int32, copy=False)),
            self.array(values.astype(np.float32, copy=False)),
            self.array(ranks.astype(np.int32, copy=False)),
        )

    def value(self, value: Any) -> Any:
        """Any value of a call; TypeError if it cannot be sent."""
        if value is None or type(value) in (bool, str, bytes):
            return value
        if isinstance(value, np.generic):
            return self.value(value.item())
        if isinstance(value, int):
            if not -(2**63) <= value < 2**64:
                raise TypeError(f"an integer must fit in 64 bits to be sent to another process, got {value}")
            return int(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, tuple):
            return self._tagged(_TUPLE, [self.value(item) for item in value])
        if isinstance(value, set | frozenset):
            return self._tagged(_SET, [self.value(item) for item in value])
        if isinstance(value, dict):
            if all(type(key) is str for key in value):
                return {key: self.value(item) for key, item in value.items()}
            return self._tagged(_DICT, [(self.value(key), self.value(item)) for key, item in value.items()])
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return self._tagged(_ARRAY, (value.dtype.str, value.shape, self.array(value)))
        name = type(value).__name__
        if _DATACLASSES.get(name) is type(value):
            return self._tagged(_DATACLASS, (name, [self.value(getattr(value, field.name)) for field in fields(value)]))
        raise TypeError(f"a {name} cannot be sent to another process, got {value!r}")

    @staticmethod
    def _tagged(tag: int, packed: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(tag, _encode(packed))


class _Unpacker:
    def __init__(self, frames: Frames) -> None:
        self.frames = frames

    def array(self, data: Buffer | int, dtype: Any) -> np.ndarray:
        """1-d, over the memory that was received."""
        return np.frombuffer(self.frames[data] if isinstance(data, int) else data, dtype)

    def logprobs(self, packed: Sequence[Any]) -> LogprobsLists:
        width, token_ids, values, ranks = packed
        ranks = self.array(ranks, np.int32)
        shape = (len(ranks), width)
        return LogprobsLists(self.array(token_ids, np.int32).reshape(shape), self.array(values, np.float32).reshape(shape), ranks)

    def value(self, packed: Any) -> Any:
        if isinstance(packed, list):
            return [self.value(item) for item in packed]
        if isinstance(packed, dict):
            return {key: self.value(item) for key, item in packed.items()}
        if isinstance(packed, msgspec.msgpack.Ext):
            return self._tagged(packed.code, _decode(packed.data))
        return packed

    def _tagged(self, tag: int, packed: Any) -> Any:
        if tag == _TUPLE:
            return tuple(self.value(item) for item in packed)
        if tag == _SET:
            return {self.value(item) for item in packed}
        if tag == _DICT:
            return {self.value(key): self.value(item) for key, item in packed}
        if tag == _ARRAY:
            dtype, shape, data = packed
            return self.array(data, dtype).reshape(shape)
        if tag == _DATACLASS:
            name, values = packed
            cls = _DATACLASSES[name]
            return cls(*map(self.value, values))
        raise ValueError(f"unknown tag {tag} in a message")


def encode_value(value: Any) -> list[Buffer]:
    """A call, or another value of the kinds that the module's docstring lists.

    Raises:
        TypeError: for a value of another kind.
    """
    packer = _Packer()
    return packer.finish(packer.value(value))


def decode_value(frames: Frames) -> Any:
    """What `encode_value` was given. Arrays share the frames' memory."""
    return _Unpacker(frames).value(_decode(frames[0]))


_DEFAULT_PARAMS = SamplingParams()
_PARAMS_FIELDS = tuple(field.name for field in fields(SamplingParams))


def encode_request(request: EngineCoreRequest) -> list[Buffer]:
    """A request. Of its sampling parameters only those that are not the default.

    Raises:
        TypeError: if `extra_args` holds what cannot be sent.
    """
    packer = _Packer()
    params = {}
    for name in _PARAMS_FIELDS:
        value = getattr(request.sampling_params, name)
        if value != getattr(_DEFAULT_PARAMS, name):
            params[name] = packer.value(value)
    return packer.finish(
        (
            request.request_id,
            request.prompt_token_ids,
            params,
            request.eos_token_id,
            request.arrival_time,
            request.priority,
            request.cache_salt,
            request.extra_keys,
            request.client_index,
            None if request.trace_headers is None else dict(request.trace_headers),
        )
    )


def decode_request(frames: Frames) -> EngineCoreRequest:
    """What `encode_request` was given. Its parameters are not checked again."""
    request_id, token_ids, packed, eos, arrival_time, priority, salt, extra_keys, client_index, headers = _decode(frames[0])
    unpacker = _Unpacker(frames)
    params = SamplingParams()
    for name, value in packed.items():
        setattr(params, name, unpacker.value(value))
    params.output_kind = RequestOutputKind(params.output_kind)
    return EngineCoreRequest(
        request_id, token_ids, params, eos, arrival_time, priority, salt, tuple(extra_keys), client_index, headers
    )


def encode_outputs(outputs: EngineCoreOutputs) -> list[Buffer]:
    """A step's outputs.

    Raises:
        TypeError: if the answer to a call cannot be sent.
    """
    packer = _Packer()
    records = outputs.outputs
    rest = []  # what few outputs have
    with_logprobs: dict[int, list[int]] = {}  # by the width of the rows: those of one step have one width
    for index, output in enumerate(records):
        if output.new_logprobs is not None:
            with_logprobs.setdefault(output.new_logprobs.token_ids.shape[1], []).append(index)
        if output.finish_reason is not None or output.events is not None or output.new_prompt_logprobs is not None:
            rest.append(
                (
                    index,
                    output.finish_reason,
                    output.stop_reason,
                    None if output.events is None else [(event.type, event.timestamp) for event in output.events],
                    None if output.new_prompt_logprobs is None else packer.logprobs(output.new_prompt_logprobs),
                )
            )
    return packer.finish(
        (
            [output.request_id for output in records],
            [output.new_token_ids for output in records],
            [output.num_cached_tokens for output in records],
            rest,
            [_pack_logprobs(packer, records, indices) for indices in with_logprobs.values()],
            packer.value(outputs.scheduler_stats),
            outputs.timestamp,
            outputs.finished_requests,
            packer.value(outputs.utility_result),
            packer.value(outputs.kv_events),
        )
    )


def _pack_logprobs(packer: _Packer, records: Sequence[EngineCoreOutput], indices: list[int]) -> tuple[Any, ...]:
    parts = [part for index in indices if (part := records[index].new_logprobs) is not None]
    together = parts[0] if len(parts) == 1 else LogprobsLists(*map(np.concatenate, zip(*parts, strict=True)))
    return indices, [len(part.ranks) for part in parts], packer.logprobs(together)


def decode_outputs(frames: Frames) -> EngineCoreOutputs:
    """What `encode_outputs` was given. Arrays share the frames' memory."""
    request_ids, token_ids, num_cached_tokens, rest, logprobs, stats, timestamp, finished, *others = _decode(frames[0])
    utility_result, kv_events = others
    unpacker = _Unpacker(frames)
    records = [
        EngineCoreOutput(request_id, tokens, num_cached_tokens=cached)
        for request_id, tokens, cached in zip(request_ids, token_ids, num_cached_tokens, strict=True)
    ]
    for index, finish_reason, stop_reason, events, prompt_logprobs in rest:
        record = records[index]
        record.finish_reason = None if finish_reason is None else FinishReason(finish_reason)
        record.stop_reason = stop_reason
        if events is not None:
            record.events = [EngineCoreEvent(EventType(kind), at) for kind, at in events]
        if prompt_logprobs is not None:
            record.new_prompt_logprobs = unpacker.logprobs(prompt_logprobs)
    for indices, counts, packed in logprobs:
        together = unpacker.logprobs(packed)
        start = 0
        for index, count in zip(indices, counts, strict=True):
            records[index].new_logprobs = together.slice(start, start + count)
            start += count
    return EngineCoreOutputs(
        outputs=records,
        scheduler_stats=unpacker.value(stats),
        timestamp=timestamp,
        finished_requests=None if finished is None else set(finished),
        utility_result=unpacker.value(utility_result),
        kv_events=unpacker.value(kv_events),
    )
