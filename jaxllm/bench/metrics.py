"""What a load test measured, from the times at which requests were sent and chunks came. Definitions are vLLM 0.33's.

All times of a RequestRecord are seconds of `time.perf_counter()`; all results are milliseconds where their name ends in `_ms`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Name in results → (name in the table, title of its section).
LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
GOODPUT_LATENCIES = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it.

    Attributes:
        prompt_len: tokens; as the server counted them, or else as the data set did.
        due: when it should have been sent; later than that only to keep to the highest concurrency.
        start: just before it was sent.
        chunk_times: when each chunk with output arrived; two chunks of one network read share a time.
        output_len: tokens as the server counted them; None if it did not say.
        error: why it failed; empty if it did not.
    """

    prompt_len: int
    due: float = 0.0
    start: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    output_len: int | None = None
    text: str = ""
    error: str = ""

    @property
    def success(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Time to first token: to the first chunk. 0 if there was none."""
        return self.chunk_times[0] - self.start if self.chunk_times else 0.0

    @property
    def latency(self) -> float:
        """E2EL: to the last chunk. 0 if there was none."""
        return self.chunk_times[-1] - self.start if self.chunk_times else 0.0

    @property
    def itls(self) -> list[float]:
        """Every gap between two chunks."""
        return [after - before for before, after in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def queue_time(self) -> float:
        """How long the client held it back to keep to the highest concurrency."""
        return self.start - self.due


@dataclass(frozen=True)
class Summary:
    """Statistics of one latency in milliseconds; all 0 where there are no values.

    Attributes:
        percentiles: (percentile, value); interpolated linearly between values.
    """

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Iterable[float]) -> "Summary":
        values = np.asarray(seconds if len(seconds) else [0.0], np.float64) * 1000
        return cls(
            float(values.mean()),
            float(np.median(values)),
            float(values.std()),
            tuple((p, float(np.percentile(values, p))) for p in percentiles),
        )

    def as_result(self, name: str) -> dict[str, float]:
        """mean_NAME_ms, median_NAME_ms, std_NAME_ms, p99_NAME_ms."""
        result = {f"mean_{name}_ms": self.mean, f"median_{name}_ms": self.median, f"std_{name}_ms": self.std}
        return result | {f"p{percentile_word(p)}_{name}_ms": value for p, value in self.percentiles}


@dataclass(frozen=True)
class BenchmarkMetrics:
    """
    Attributes:
        duration: seconds from the first send to the last end.
        total_input, total_output: tokens of the requests that succeeded.
        request_throughput, request_goodput: requests a second; goodput counts those that met every objective, None without any.
        output_throughput, total_token_throughput: tokens a second.
        max_output_tokens_per_s: chunks of the busiest second, counted from the first send.
        max_concurrent_requests: most requests that were under way at one moment.
        mean_concurrent_requests: sum of their latencies over the duration (Little's law).
        latencies: by the names of LATENCIES.
    """

    duration: float
    completed: int
    failed: int
    total_input: int
    total_output: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    mean_concurrent_requests: float
    latencies: Mapping[str, Summary]

    def as_result(self) -> dict[str, Any]:
        """vLLM's names for a result file."""
        result: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input,
            "total_output_tokens": self.total_output,
            "request_throughput": self.request_throughput,
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "max_concurrent_requests": self.max_concurrent_requests,
            "mean_concurrent_requests": self.mean_concurrent_requests,
        }
        for name, summary in self.latencies.items():
            result |= summary.as_result(name)
        return result


def calculate_metrics(
    records: Sequence[RequestRecord],
    duration: float,
    *,
    count_tokens: Callable[[str], int] | None = None,
    latencies: Sequence[str] = ("ttft", "tpot", "itl", "e2el"),
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> BenchmarkMetrics:
    """Sum up a run. Only requests that succeeded count, but for `failed`.

    TPOT = (E2EL - TTFT) / (output tokens - 1), of requests with more than one; ITL is each gap between two chunks, of all
    requests together.

    Args:
        duration: seconds.
        count_tokens: tokens of a text, for servers that do not say how many there were; by default one a chunk.
        latencies: which of LATENCIES to report.
        goodput: objectives in milliseconds for "ttft", "tpot" (0 for a request of one token), "e2el".
    """
    done = [record for record in records if record.success]
    lens = output_lens(done, count_tokens)
    tpots = [(r.latency - r.ttft) / (n - 1) if n > 1 else 0.0 for r, n in zip(done, lens, strict=True)]
    values = {
        "ttft": [r.ttft for r in done],
        "tpot": [tpot for tpot, n in zip(tpots, lens, strict=True) if n > 1],
        "itl": [gap for r in done for gap in r.itls],
        "e2el": [r.latency for r in done],
        "client_queue_time": [r.queue_time for r in done],
        "e2el_including_client_queue": [r.latency + r.queue_time for r in done],
    }
    good = None
    if goodput:
        of_requests = {**values, "tpot": tpots}
        met = [all(of_requests[name][i] * 1000 <= limit for name, limit in goodput.items()) for i in range(len(done))]
        good = sum(met) / duration
    total_input, total_output = sum(r.prompt_len for r in done), sum(lens)
    return BenchmarkMetrics(
        duration=duration,
        completed=len(done),
        failed=len(records) - len(done),
        total_input=total_input,
        total_output=total_output,
        request_throughput=len(done) / duration,
        request_goodput=good,
        output_throughput=total_output / duration,
        total_token_throughput=(total_input + total_output) / duration,
        max_output_tokens_per_s=float(chunks_per_second(done).max(initial=0)),
        max_concurrent_requests=max((count for _, count in concurrency_steps(done)), default=0),
        mean_concurrent_requests=sum(values["e2el"]) / duration,
        latencies={name: Summary.of(values[name], percentiles) for name in latencies},
    )


def output_lens(records: Iterable[RequestRecord], count_tokens: Callable[[str], int] | None) -> list[int]:
    """Output tokens of each: the server's count, else the tokenizer's, else one a chunk; 0 of a failed one."""

    def length(record: RequestRecord) -> int:
        if not record.success:
            return 0
        if record.output_len is not None:
            return record.output_len
        return count_tokens(record.text) if count_tokens is not None else len(record.chunk_times)

    return [length(record) for record in records]


def chunks_per_second(records: Sequence[RequestRecord]) -> np.ndarray:
    """[seconds] chunks that came in each whole second since the first request was sent."""
    if not records:
        return np.zeros(0, np.int64)
    first = min(record.start for record in records)
    times = np.asarray([time - first for record in records for time in record.chunk_times])
    return np.bincount(times.astype(np.int64)) if times.size else np.zeros(0, np.int64)


def concurrency_steps(records: Iterable[RequestRecord]) -> list[tuple[float, int]]:
    """(time, requests under way from then on), ascending. A request is under way from its start up to, not at, its last chunk."""
    lasting = [record for record in records if record.latency > 0]
    events = [(r.start, 1) for r in lasting] + [(r.start + r.latency, -1) for r in lasting]
    steps, count = [], 0
    for time, change in sorted(events):
        count += change
        steps.append((time, count))
    return steps


def percentile_word(percentile: float) -> str:
    """99 for 99.0, 99.9 for 99.9."""
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def parse_percentiles(text: str) -> list[float]:
    """ "50,99" → [50.0, 99.0]. Raises ValueError naming the text."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--metric-percentiles must be numbers separated by commas, got {text!r}") from None
    if any(not 0 <= value <= 100 for value in values):
        raise ValueError(f"--metric-percentiles must be in [0, 100], got {text!r}")
    return list(dict.fromkeys(values))


def parse_latencies(text: str) -> list[str]:
    """ "ttft,itl" → ["ttft", "itl"]. Raises ValueError naming what is unknown."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in LATENCIES:
            raise ValueError(f"--percentile-metrics: unknown metric {name!r}; known: {', '.join(LATENCIES)}")
    return list(dict.fromkeys(names))


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """["ttft:200", "tpot:30"] → milliseconds by name. Raises ValueError naming the pair."""
    return {name: limit for name, limit in map(_name_and_limit, pairs) if _known(name, GOODPUT_LATENCIES, "--goodput")}


def _known(name: str, names: Sequence[str], flag: str) -> bool:
    if name not in names:
        raise ValueError(f"{flag}: unknown metric {name!r}; known: {', '.join(names)}")
    return True


def _name_and_limit(pair: str) -> tuple[str, float]:
    name, _, text = pair.partition(":")
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise ValueError(f"an objective is NAME:MILLISECONDS, such as ttft:200, got {pair!r}")
    return name, limit


@dataclass(frozen=True)
class Objective:
    """A limit on one number of a whole run.

    Attributes:
        field: such as "p99_ttft_ms".
        limit: milliseconds, inclusive.
        percentile: which percentile has to be computed for it, if any.
    """

    field: str
    limit: float
    latency: str
    percentile: float | None

    @classmethod
    def parse(cls, pair: str) -> "Objective":
        """From "p99_ttft:500", "mean_itl:30" or "e2el:9000", which is of the 99th percentile.

        Raises:
            ValueError: naming the pair.
        """
        name, limit = _name_and_limit(pair)
        match = re.fullmatch(r"(?:(mean|median|p(\d+(?:\.\d+)?))_)?(\w+)", name)
        if match is None or match[3] not in LATENCIES:
            raise ValueError(f"an objective is such as p99_ttft:500, mean_itl:30 or e2el:9000, got {pair!r}")
        statistic = match[1] or "p99"
        percentile = float(statistic[1:]) if statistic[0] == "p" else None
        if percentile is not None:
            if percentile > 100:
                raise ValueError(f"a percentile must be in [0, 100], got {pair!r}")
            statistic = "p" + percentile_word(percentile)
        return cls(f"{statistic}_{match[3]}_ms", limit, match[3], percentile)

    def met_by(self, result: Mapping[str, Any]) -> bool:
        return result[self.field] <= self.limit
