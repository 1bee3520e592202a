"""Request: what the scheduler knows of a request, and RequestStatus."""

import enum
import sys
from collections.abc import Sequence

from jaxllm.core.kv_cache_utils import BlockHasher, encode_extra_keys
from jaxllm.core.output import MAX_END_TOKEN_IDS
from jaxllm.core.types import EngineCoreEvent, EngineCoreRequest, EventType, FinishReason


class RequestStatus(enum.IntEnum):
    """Where a request is in its life. All values from FINISHED_STOPPED on are final."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6
    FINISHED_REPETITION = 7

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> FinishReason | None:
        """What the front end is told; None while the request lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


def block_extras(request: EngineCoreRequest) -> tuple[bytes, bytes]:
    """What enters the hash of the first block, and of the others, beside tokens."""
    return encode_extra_keys(request.extra_keys, request.cache_salt), encode_extra_keys(request.extra_keys, None)


def prompt_block_hashes(request: EngineCoreRequest, block_hasher: BlockHasher) -> list[bytes]:
    """Of the full blocks of its prompt, in order."""
    hashes: list[bytes] = []
    block_hasher.extend(hashes, request.prompt_token_ids, *block_extras(request))
    return hashes


class Request:
    """A request inside the engine core.

    It has tokens, some of them computed; the scheduler lets `num_computed_tokens` catch up with `num_tokens_with_spec`.

    Attributes:
        eos_token_id: None if the request goes on after it (`ignore_eos`).
        end_token_ids: all tokens that end the request, as NewRequestData has them.
        needs_host_each_token: whether the devices cannot tell by themselves when the request ends.
        stop_reason: the stop token id that ended the request, or what else did; None for EOS and lengths.
        all_token_ids: the prompt and what was sampled. Changed by `append_output_token_ids` only.
        block_hashes: of the full blocks of `all_token_ids`, in order; empty without a block hasher.
        block_hasher: None if prefix caching is off.
        spec_token_ids: drafts that the next step will try.
        num_computed_tokens: tokens whose keys and values are in the cache or will be once the scheduled steps have run. Drafts
            count as accepted until the output says otherwise.
        num_output_placeholders: tokens that scheduled steps will sample and that are not known yet (asynchronous scheduling).
        is_prefill_chunk: whether the last scheduled step ended before the last known token, so that it samples nothing.
        num_steps_in_flight: scheduled steps whose output has not been processed.
        num_cached_tokens: tokens found in the prefix cache at the first admission; -1 before it.
        kv_quiet_until: until the scheduled tokens reach this number, nothing is to be done for the block table. Kept by the
            KVCacheManager.
    """

    __slots__ = (
        "_first_block_extra",
        "_later_block_extra",
        "_next_block_end",
        "all_token_ids",
        "arrival_time",
        "block_hasher",
        "block_hashes",
        "client_index",
        "end_token_ids",
        "eos_token_id",
        "events",
        "is_prefill_chunk",
        "kv_quiet_until",
        "max_tokens",
        "needs_host_each_token",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_steps_in_flight",
        "priority",
        "request_id",
        "sampling_params",
        "spec_token_ids",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(self, request: EngineCoreRequest, block_hasher: BlockHasher | None = None) -> None:
        params = request.sampling_params
        if not request.prompt_token_ids:
            raise ValueError(f"prompt_token_ids of request {request.request_id!r} must not be empty, got []")
        if params.max_tokens is None:
            raise ValueError(f"max_tokens of request {request.request_id!r} must be set, got None")
        if params.n != 1:
            raise ValueError(f"n of request {request.request_id!r} must be 1 inside the engine core, got {params.n}")
        self.request_id = request.request_id
        self.client_index = request.client_index
        self.priority = request.priority
        self.arrival_time = request.arrival_time
        self.sampling_params = params
        self.max_tokens = params.max_tokens
        self.stop_token_ids = params.stop_token_ids
        self.eos_token_id = None if params.ignore_eos else request.eos_token_id
        ends = dict.fromkeys([*([] if self.eos_token_id is None else [self.eos_token_id]), *self.stop_token_ids])
        fits = len(ends) <= MAX_END_TOKEN_IDS
        self.end_token_ids = tuple(ends) if fits else ()
        # A stop string is found in the text, by the front end; a repetition in the tokens, by the scheduler.
        self.needs_host_each_token = bool(params.stop or params.repetition_detection is not None or not fits)

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] = []
        self.all_token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.spec_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_steps_in_flight = 0
        self.is_prefill_chunk = False
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.kv_quiet_until = 0

        self.block_hasher = block_hasher
        self.block_hashes: list[bytes] = []
        self._first_block_extra, self._later_block_extra = block_extras(request)
        self._next_block_end = sys.maxsize
        if block_hasher is not None:
            self._hash_full_blocks(block_hasher)

    @classmethod
    def from_engine_core_request(cls, request: EngineCoreRequest, block_hasher: BlockHasher | None) -> "Request":
        """A waiting request.

        Args:
            request: from the front end.
            block_hasher: None if prefix caching is off.

        Raises:
            ValueError: if the prompt is empty, or `max_tokens` or `n` was not completed by the input processor.
        """
        return cls(request, block_hasher)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self.all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    def append_output_token_ids(self, token_ids: Sequence[int]) -> None:
        """Append sampled tokens and hash the blocks that they fill."""
        self.all_token_ids.extend(token_ids)
        if len(self.all_token_ids) >= self._next_block_end:
            self._hash_full_blocks(self.block_hasher)

    def _hash_full_blocks(self, block_hasher: BlockHasher) -> None:
        block_hasher.extend(self.block_hashes, self.all_token_ids, self._first_block_extra, self._later_block_extra)
        self._next_block_end = (len(self.block_hashes) + 1) * block_hasher.block_size

    def record_event(self, event_type: EventType, timestamp: float) -> None:
        self.events.append(EngineCoreEvent(event_type, timestamp))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """Events since the last call; None if there were none."""
        if not self.events:
            return None
        events, self.events = self.events, []
        return events

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
