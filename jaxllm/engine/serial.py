"""How requests, outputs and calls cross to another process; see jaxllm/executor/values.py.

A step's outputs go as columns (all ids, all tokens, …) rather than as one record a request: most of a record says what the next
one says too, and columns are a quarter of the bytes and half of the time.
"""

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

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
from jaxllm.executor.shm_queue import Buffer, Frames
from jaxllm.executor.values import Packer, Unpacker, decode
from jaxllm.sampling_params import RepetitionDetectionParams


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


class _Packer(Packer):
    dataclasses = _DATACLASSES


class _Unpacker(Unpacker):
    dataclasses = _DATACLASSES


def encode_value(value: Any) -> list[Buffer]:
    """A call, or another value of the kinds that values.py lists.

    Raises:
        TypeError: for a value of another kind.
    """
    packer = _Packer()
    return packer.finish(packer.value(value))


def decode_value(frames: Frames) -> Any:
    """What `encode_value` was given. Arrays share the frames' memory."""
    return _Unpacker(frames).value(decode(frames[0]))


def encode_request(request: EngineCoreRequest) -> list[Buffer]:
    """A request. Of its sampling parameters only those that are not the default.

    Raises:
        TypeError: if `extra_args` holds what cannot be sent.
    """
    packer = _Packer()
    return packer.finish(
        (
            request.request_id,
            request.prompt_token_ids,
            packer.params(request.sampling_params),
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
    request_id, token_ids, packed, eos, arrival_time, priority, salt, extra_keys, client_index, headers = decode(frames[0])
    params = _Unpacker(frames).params(packed)
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
    request_ids, token_ids, num_cached_tokens, rest, logprobs, stats, timestamp, finished, *others = decode(frames[0])
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
