"""What an executor and workers in other processes say to each other. Every message has a number; an answer has its question's.

executor → workers: start a step, finish it, call a method, end. worker → executor: a step's output, a call's result, a failure.
"""

import builtins
import enum
import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec
from jaxllm.core.output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    WorkerStepStats,
)
from jaxllm.executor.shm_queue import Buffer, Frames
from jaxllm.executor.values import Packer, Unpacker, decode
from jaxllm.sampling_params import RepetitionDetectionParams


class Kind(enum.IntEnum):
    """Of a message."""

    START = 0
    FINISH = 1
    CALL = 2
    END = 3
    OUTPUT = 4
    RESULT = 5
    FAILURE = 6


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """What a worker's method raised.

    Attributes:
        kind: name of the exception's class.
        place: the line of code that raised it.
    """

    kind: str
    message: str
    place: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
        return cls(type(error).__name__, str(error), place)

    def to_exception(self) -> Exception:
        """The same exception if it is one of Python's own, else a RuntimeError that names it."""
        kind = getattr(builtins, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(self.message)
            except TypeError:  # UnicodeDecodeError and the like want more than a message
                pass
        return RuntimeError(f"{self.kind}: {self.message}")

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} ({self.place})"


class Message(NamedTuple):
    """
    Attributes:
        body: SchedulerOutput of START, (method, args, kwargs) of CALL, ModelRunnerOutput of OUTPUT, anything of RESULT,
            WorkerFailure of FAILURE; else None.
    """

    kind: Kind
    number: int
    body: Any = None


_DATACLASSES = {cls.__name__: cls for cls in (KVCacheConfig, KVCacheGroup, KVCacheSpec, RepetitionDetectionParams, WorkerFailure)}


class _Packer(Packer):
    dataclasses = _DATACLASSES

    def scheduler_output(self, output: SchedulerOutput) -> tuple[Any, ...]:
        cached = output.scheduled_cached_reqs
        return (
            [self._new_request(request) for request in output.scheduled_new_reqs],
            (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens),
            output.num_scheduled_tokens,
            output.total_num_scheduled_tokens,
            output.scheduled_spec_decode_tokens,
            output.finished_req_ids,
            output.preempted_req_ids,
            output.num_decode_steps,
        )

    def _new_request(self, request: NewRequestData) -> tuple[Any, ...]:
        params = self.params(request.sampling_params)
        computed, ends = request.num_computed_tokens, request.end_token_ids
        return request.req_id, request.token_ids, request.num_prompt_tokens, params, request.block_ids, computed, ends

    def model_runner_output(self, output: ModelRunnerOutput) -> tuple[Any, ...]:
        return (
            output.req_ids,
            output.sampled_token_ids,
            None if output.logprobs is None else self.logprobs(output.logprobs),
            output.logprobs_start,
            {req_id: self.logprobs(logprobs) for req_id, logprobs in output.prompt_logprobs.items()},
            output.stats,
        )


class _Unpacker(Unpacker):
    dataclasses = _DATACLASSES

    def scheduler_output(self, packed: Any) -> SchedulerOutput:
        new, cached, scheduled, total, drafts, finished, preempted, num_decode_steps = packed
        req_ids, new_block_ids, computed, num_outputs = cached
        blocks = [None if ids is None else tuple(ids) for ids in new_block_ids]
        return SchedulerOutput(
            [self._new_request(request) for request in new],
            CachedRequestData(req_ids, blocks, computed, num_outputs),
            scheduled,
            total,
            drafts,
            set(finished),
            set(preempted),
            num_decode_steps,
        )

    def _new_request(self, packed: Any) -> NewRequestData:
        req_id, token_ids, num_prompt_tokens, params, block_ids, num_computed_tokens, ends = packed
        params, blocks = self.params(params), tuple(block_ids)
        return NewRequestData(req_id, token_ids, num_prompt_tokens, params, blocks, num_computed_tokens, tuple(ends))

    def model_runner_output(self, packed: Any) -> ModelRunnerOutput:
        req_ids, token_ids, logprobs, logprobs_start, prompt_logprobs, stats = packed
        return ModelRunnerOutput(
            req_ids,
            {req_id: row for row, req_id in enumerate(req_ids)},
            token_ids,
            None if logprobs is None else self.logprobs(logprobs),
            logprobs_start,
            {req_id: self.logprobs(one) for req_id, one in prompt_logprobs.items()},
            None if stats is None else WorkerStepStats(*stats),
        )


def encode_message(message: Message) -> list[Buffer]:
    """
    Raises:
        TypeError: if an argument or a result cannot be sent.
    """
    packer = _Packer()
    if message.kind is Kind.START:
        body = packer.scheduler_output(message.body)
    elif message.kind is Kind.OUTPUT:
        body = packer.model_runner_output(message.body)
    else:
        body = packer.value(message.body)
    return packer.finish((message.kind, message.number, body))


def decode_message(frames: Frames) -> Message:
    """What `encode_message` was given. Arrays share the frames' memory."""
    kind, number, body = decode(frames[0])
    unpacker = _Unpacker(frames)
    if kind == Kind.START:
        return Message(Kind.START, number, unpacker.scheduler_output(body))
    if kind == Kind.OUTPUT:
        return Message(Kind.OUTPUT, number, unpacker.model_runner_output(body))
    return Message(Kind(kind), number, unpacker.value(body))


FAREWELL = encode_message(Message(Kind.END, 0))
