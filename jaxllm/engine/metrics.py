"""What the engine counts and times. Kept in plain numbers here; a server publishes them.

A step fills an IterationStats, EngineMetrics adds it up. Metric names are vLLM's but for the prefix.
"""

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from jaxllm.core.types import EngineCoreEvent, EngineCoreOutput, EventType, FinishReason, SchedulerStats
from jaxllm.engine.errors import MaxQueuedTokensError, QueueOverflowError
from jaxllm.outputs import RequestStateStats

__all__ = ["Counter", "EngineMetrics", "FinishedRequestStats", "Gauge", "Histogram", "IterationStats", "RequestStateStats"]

METRIC_PREFIX = "jaxllm:"


def one_two_five(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … up to `largest`."""
    return [float(base * 10**power) for power in range(len(str(largest))) for base in (1, 2, 5) if base * 10**power <= largest]


TIME_TO_FIRST_TOKEN_BUCKETS = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
]
TOKEN_LATENCY_BUCKETS = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
]
REQUEST_LATENCY_BUCKETS = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
]
ITERATION_TOKENS_BUCKETS = [1.0, *(float(2**power) for power in range(3, 15))]
N_BUCKETS = [1.0, 2.0, 5.0, 10.0, 20.0]
PREEMPTION_BUCKETS = [0.0, 1.0, 2.0, 5.0, 10.0, 20.0]


@dataclass(slots=True)
class FinishedRequestStats:
    """One ended request. Times in seconds; 0.0 where a stage was never reached."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    max_tokens: int | None
    e2e_latency: float
    queued_time: float
    prefill_time: float
    inference_time: float
    decode_time: float
    mean_time_per_output_token: float


def finished_request_stats(
    reason: FinishReason,
    stats: RequestStateStats,
    num_prompt_tokens: int,
    num_cached_tokens: int,
    max_tokens: int | None,
    now: float,
) -> FinishedRequestStats:
    """The stages of a request: queued | prefill | decode, the last two being inference.

    Args:
        now: `time.time()`, to compare with the arrival.
    """
    started = stats.scheduled_ts > 0.0
    answered = stats.first_token_ts > 0.0
    decode_time = stats.last_token_ts - stats.first_token_ts if answered else 0.0
    return FinishedRequestStats(
        finish_reason=reason,
        num_prompt_tokens=num_prompt_tokens,
        num_generation_tokens=stats.num_generation_tokens,
        num_cached_tokens=num_cached_tokens,
        num_preemptions=stats.num_preemptions,
        max_tokens=max_tokens,
        e2e_latency=now - stats.arrival_time,
        queued_time=stats.scheduled_ts - stats.queued_ts if started else 0.0,
        prefill_time=stats.first_token_ts - stats.scheduled_ts if answered and started else 0.0,
        inference_time=stats.last_token_ts - stats.scheduled_ts if answered and started else 0.0,
        decode_time=decode_time,
        mean_time_per_output_token=decode_time / max(1, stats.num_generation_tokens - 1),
    )


@dataclass(slots=True)
class IterationStats:
    """What one step did, as seen by the output processor. Latencies in seconds.

    Attributes:
        timestamp: `time.time()` of the front end.
        num_prompt_tokens: prompt tokens of the requests that gave their first token.
        num_cached_tokens: those of them that came from the prefix cache.
        max_num_generation_tokens, n: one entry for each ended call: its longest output, and how many outputs it asked for.
    """

    timestamp: float
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    times_to_first_token: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    max_num_generation_tokens: list[int] = field(default_factory=list)
    n: list[int] = field(default_factory=list)

    def update(
        self,
        stats: RequestStateStats,
        output: EngineCoreOutput,
        num_new_tokens: int,
        timestamp: float,
        prompt_token_ids: Sequence[int],
        is_prefilling: bool,
    ) -> None:
        """Count one output, and bring the request's own times up to date.

        Args:
            num_new_tokens: of the output's, without those that came after a stop string.
            timestamp: `time.monotonic()` of the engine core at the end of the step.
            is_prefilling: whether this is the request's first output.
        """
        if output.events:
            self.update_from_events(stats, output.events)
        self.num_generation_tokens += num_new_tokens
        stats.num_generation_tokens += num_new_tokens
        if is_prefilling:
            self.num_prompt_tokens += len(prompt_token_ids)
            self.num_cached_tokens += output.num_cached_tokens
            if not num_new_tokens:
                return
            stats.first_token_ts = timestamp
            stats.first_token_latency = self.timestamp - stats.arrival_time
            self.times_to_first_token.append(stats.first_token_latency)
        elif num_new_tokens:
            self.inter_token_latencies.append(timestamp - stats.last_token_ts)
        stats.last_token_ts = timestamp

    def update_from_events(self, stats: RequestStateStats, events: Sequence[EngineCoreEvent]) -> None:
        for event in events:
            if event.type is EventType.QUEUED:
                stats.queued_ts = event.timestamp
            elif event.type is EventType.PREEMPTED:
                self.num_preemptions += 1
                stats.num_preemptions += 1
            elif stats.scheduled_ts == 0.0:  # a resumed request keeps the time at which it was first scheduled
                stats.scheduled_ts = event.timestamp


@dataclass(slots=True)
class Counter:
    """A number that only grows."""

    name: str
    documentation: str
    value: float = 0
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Gauge:
    """The latest value of something."""

    name: str
    documentation: str
    value: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Histogram:
    """How often a value fell between two bounds.

    Attributes:
        bounds: upper bounds, inclusive, ascending.
        counts: of each bound alone, and of what is above the last.
    """

    name: str
    documentation: str
    bounds: list[float]
    counts: list[int] = field(init=False)
    sum: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def buckets(self) -> dict[str, int]:
        """Cumulative count of each bound, and of "+Inf"."""
        return dict(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True))

    def observe(self, values: Iterable[float]) -> None:
        # The requests that decode together have waited equally long.
        for value, count in Counts(values).items():
            self.counts[bisect_left(self.bounds, value)] += count
            self.sum += value * count


Metric = Counter | Gauge | Histogram


class EngineMetrics:
    """Totals since the engine started.

    Args:
        max_model_len: bounds the histograms of token counts.
        labels: of all metrics.
    """

    def __init__(self, max_model_len: int, **labels: str) -> None:
        def counter(name: str, documentation: str, **labels: str) -> Counter:
            return Counter(METRIC_PREFIX + name, documentation, labels=labels)

        def gauge(name: str, documentation: str) -> Gauge:
            return Gauge(METRIC_PREFIX + name, documentation)

        def histogram(name: str, documentation: str, bounds: list[float]) -> Histogram:
            return Histogram(METRIC_PREFIX + name, documentation, bounds)

        latency, lengths = REQUEST_LATENCY_BUCKETS, one_two_five(max_model_len)
        self.num_requests_running = gauge("num_requests_running", "Requests in the running batch.")
        self.num_requests_waiting = gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        self.kv_cache_usage = gauge("kv_cache_usage_perc", "Share of the KV cache blocks in use; 1 is all.")
        self.prefix_cache_queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self.prefix_cache_hits = counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self.num_preemptions = counter("num_preemptions", "Preemptions of running requests.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that reached their first token.")
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Those of them that came from the prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.request_success = {
            reason: counter("request_success", "Requests that ended, by reason.", finished_reason=str(reason))
            for reason in FinishReason
        }
        self.admission_rejections = {
            error.limit: counter("admission_rejections", "Requests refused for want of room, by limit.", reason=error.limit)
            for error in (QueueOverflowError, MaxQueuedTokensError)
        }
        self.step_time = {
            stage: counter("step_time_seconds", "Seconds of the steps, by what they went to.", stage=stage)
            for stage in ("schedule", "dispatch", "wait", "update")
        }
        self.computed_tokens = counter("computed_tokens", "Tokens that steps computed for requests.")
        self.padding_tokens = counter("padding_tokens", "Tokens computed for nobody, to fill buckets.")
        self.compiles_after_warm_up = counter("compiles_after_warm_up", "Programs compiled since the start; a fault if not 0.")
        self.iteration_tokens = histogram("iteration_tokens_total", "Tokens of a step.", ITERATION_TOKENS_BUCKETS)
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TIME_TO_FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two outputs of a request.", TOKEN_LATENCY_BUCKETS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.", TOKEN_LATENCY_BUCKETS
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From arrival to the end.", latency)
        self.queue_time = histogram("request_queue_time_seconds", "From arrival in the core to the first step.", latency)
        self.inference_time = histogram("request_inference_time_seconds", "From the first step to the last token.", latency)
        self.prefill_time = histogram("request_prefill_time_seconds", "From the first step to the first token.", latency)
        self.decode_time = histogram("request_decode_time_seconds", "From the first token to the last.", latency)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens that a request generated.", lengths)
        self.max_num_generation_tokens = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest of a request's n outputs.", lengths
        )
        self.params_n = histogram("request_params_n", "The parameter n.", N_BUCKETS)
        self.params_max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens.", lengths)
        self.request_num_preemptions = histogram(
            "request_num_preemptions", "How often a request was preempted.", PREEMPTION_BUCKETS
        )
        self.prefill_kv_computed_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were computed, not cached.", lengths
        )
        for metric in self.snapshot():
            metric.labels = {**labels, **metric.labels}

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """Add one step."""
        if scheduler is not None:
            self.num_requests_running.value = scheduler.num_running_reqs
            self.num_requests_waiting.value = scheduler.num_waiting_reqs
            self.kv_cache_usage.value = scheduler.kv_cache_usage
            self.prefix_cache_queries.value += scheduler.prefix_cache_stats.queries
            self.prefix_cache_hits.value += scheduler.prefix_cache_stats.hits
            if (step := scheduler.step) is not None:
                for stage, counter in self.step_time.items():
                    counter.value += getattr(step, stage + "_time")
                self.computed_tokens.value += step.num_tokens
                self.padding_tokens.value += step.num_padding_tokens
                self.compiles_after_warm_up.value = step.num_compiles
        self.num_preemptions.value += iteration.num_preemptions
        self.prompt_tokens.value += iteration.num_prompt_tokens
        self.prompt_tokens_cached.value += iteration.num_cached_tokens
        self.generation_tokens.value += iteration.num_generation_tokens
        if num_tokens := iteration.num_prompt_tokens + iteration.num_generation_tokens:
            self.iteration_tokens.observe([num_tokens])
        self.time_to_first_token.observe(iteration.times_to_first_token)
        self.inter_token_latency.observe(iteration.inter_token_latencies)
        self.max_num_generation_tokens.observe(iteration.max_num_generation_tokens)
        self.params_n.observe(iteration.n)
        for request in iteration.finished_requests:
            self._record_finished(request)

    def _record_finished(self, request: FinishedRequestStats) -> None:
        self.request_success[request.finish_reason].value += 1
        self.e2e_latency.observe([request.e2e_latency])
        self.queue_time.observe([request.queued_time])
        self.inference_time.observe([request.inference_time])
        self.prefill_time.observe([request.prefill_time])
        self.decode_time.observe([request.decode_time])
        self.request_prompt_tokens.observe([request.num_prompt_tokens])
        self.request_generation_tokens.observe([request.num_generation_tokens])
        self.request_num_preemptions.observe([request.num_preemptions])
        self.prefill_kv_computed_tokens.observe([request.num_prompt_tokens - request.num_cached_tokens])
        if request.num_generation_tokens > 1:
            self.time_per_output_token.observe([request.mean_time_per_output_token])
        if request.max_tokens is not None:
            self.params_max_tokens.observe([request.max_tokens])

    def snapshot(self) -> list[Metric]:
        """All metrics, live."""
        metrics: list[Metric] = []
        for value in vars(self).values():
            metrics.extend(value.values() if isinstance(value, dict) else [value])
        return metrics
