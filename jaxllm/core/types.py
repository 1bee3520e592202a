"""What crosses between a front end and an engine core: requests in, tokens out."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.core.kv_events import KVEvents
from jaxllm.core.output import LogprobsLists
from jaxllm.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a request ended. `str()` gives the name that the OpenAI API uses."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(slots=True)
class EngineCoreRequest:
    """A validated request, as the front end hands it to the engine core.

    Attributes:
        request_id: unique within the engine core.
        prompt_token_ids: the prompt, never empty.
        sampling_params: cloned and completed by the input processor (`max_tokens` is set, `n` is 1).
        eos_token_id: the token that ends the request, None if the model has none. `ignore_eos` is honoured by the scheduler.
        arrival_time: seconds, `time.time()` of the front end; orders requests of equal priority.
        priority: lower is served first under the priority policy.
        cache_salt: enters the hash of the first block, so that only requests with the same salt share blocks.
        extra_keys: more that enters the hash of every block (an adapter's name, an image's digest).
        client_index: which front end asked; outputs go back to it.
        trace_headers: passed through untouched.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_id: int | None = None
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    extra_keys: tuple[str, ...] = ()
    client_index: int = 0
    trace_headers: Mapping[str, str] | None = None


class EventType(enum.IntEnum):
    """Moments in a request's life inside the engine core."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


@dataclass(slots=True)
class EngineCoreEvent:
    """`timestamp` is `time.monotonic()` of the engine core's process: only differences between events mean something."""

    type: EventType
    timestamp: float


@dataclass(slots=True)
class EngineCoreOutput:
    """What one step produced for one request. Partial prefills produce none."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs: LogprobsLists | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class PrefixCacheStats:
    """Counts since they were last taken. Tokens, not blocks; a preempted request's later lookups are counted apart."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    reset: bool = False


@dataclass(slots=True)
class StepStats:
    """Where the time of a step went, in seconds; the rest as in WorkerStepStats."""

    schedule_time: float = 0.0
    dispatch_time: float = 0.0
    wait_time: float = 0.0
    update_time: float = 0.0
    num_padding_tokens: int = 0
    num_compiles: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """The state of the scheduler after a step.

    Attributes:
        step: None if there was no step, or its executor does not count.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    step: StepStats | None = None


@dataclass(slots=True)
class EngineCoreOutputs:
    """All that one step sends to one front end.

    Attributes:
        timestamp: `time.monotonic()` at the end of the step.
        finished_requests: ids of requests that ended in this step, with or without an output.
        utility_result: the answer to a call that is not a request, with its id.
        kv_events: what the prefix cache has gained and lost, if requests are routed by it; for every front end.
        engine_index: which engine core; not sent, since the front end knows where it came from.
    """

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    finished_requests: set[str] | None = None
    utility_result: tuple[int, Any] | None = None
    kv_events: KVEvents | None = None
    engine_index: int = 0
