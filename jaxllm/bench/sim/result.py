"""What a simulation comes to: the figures and tables of the load client, and what only a simulation can tell."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.bench.metrics import Summary
from jaxllm.bench.report import table
from jaxllm.bench.sim.cluster import ClusterResult
from jaxllm.bench.sim.group import GAP_BINS, EngineTotals
from jaxllm.bench.sim.workload import Workload


def gap_summary(result: ClusterResult, percentiles: Sequence[float]) -> Summary:
    """Of all gaps between tokens. Mean and deviation are exact, median and percentiles to half a percent."""
    bins: dict[int, int] = {}
    for group in result.groups:
        for index, count in group.gaps.items():
            bins[index] = bins.get(index, 0) + count
    total = sum(bins.values())
    if not total:
        return Summary.of([], percentiles)
    order = sorted(bins)
    reached = np.cumsum([bins[index] for index in order])

    def at(percentile: float) -> float:
        index = order[int(np.searchsorted(reached, percentile / 100 * (total - 1), side="right"))]
        return 1000 * math.exp((index + 0.5) * GAP_BINS)

    mean = sum(group.gap_sum for group in result.groups) / total
    variance = sum(group.gap_square_sum for group in result.groups) / total - mean * mean
    return Summary(
        1000 * mean,
        at(50),
        1000 * math.sqrt(max(variance, 0.0)),
        tuple((percentile, at(percentile)) for percentile in percentiles),
    )


def summarize(
    workload: Workload, result: ClusterResult, percentiles: Sequence[float], goodput: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The figures, under the names of the load client.

    Only requests that ended count, but for `failed`; gaps between tokens are those of all requests.

    Args:
        goodput: objectives in milliseconds for "ttft", "tpot", "e2el".
    """
    first, last = (np.max([getattr(group, name) for group in result.groups], axis=0) for name in ("first_times", "last_times"))
    done = last >= 0
    starts, outputs = workload.times[done], workload.output_lens[done]
    ttft, e2el = first[done] - starts, last[done] - starts
    tpot = np.where(outputs > 1, (e2el - ttft) / np.maximum(outputs - 1, 1), 0.0)
    duration = float(last.max() - workload.times[0]) if done.any() else 0.0
    per_second = 1 / duration if duration else 0.0
    prompts, completed = int(workload.prompt_lens[done].sum()), int(done.sum())
    values = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": completed,
        "failed": len(workload) - completed,
        "total_input_tokens": prompts,
        "total_output_tokens": int(outputs.sum()),
        "request_throughput": completed * per_second,
        "output_throughput": float(outputs.sum()) * per_second,
        "total_token_throughput": float(prompts + outputs.sum()) * per_second,
        "mean_concurrent_requests": float(e2el.sum()) * per_second,
    }
    if goodput:
        good = np.ones(completed, bool)
        for name, limit in goodput.items():
            good &= values[name] * 1000 <= limit
        figures["request_goodput"] = float(good.sum()) * per_second
    figures |= Summary.of(ttft, percentiles).as_result("ttft")
    figures |= Summary.of(tpot[outputs > 1], percentiles).as_result("tpot")
    figures |= gap_summary(result, percentiles).as_result("itl")
    figures |= Summary.of(e2el, percentiles).as_result("e2el")

    engines = engine_totals(result)
    queries = sum(engine.queries for engine in engines)
    if queries:
        figures["prefix_cache_hit_rate"] = 100 * sum(engine.hits for engine in engines) / queries
    figures["preemptions"] = sum(engine.preemptions for engine in engines)
    figures["steps"] = sum(engine.steps for engine in engines)
    figures["num_engines"] = len(engines)
    figures["requests_of_engine"] = [engine.finished for engine in engines]
    figures["deaths"] = [
        {
            "engine": death.kill.engine,
            "time": death.kill.time,
            "failed_over": len(death.failed_over),
            "lost": len(death.lost),
            "p99_ttft_of_failed_over_ms": _p99_ms((first - workload.times)[[i for i in death.failed_over if done[i]]]),
        }
        for death in result.deaths
    ]
    figures["without_engine"] = int((result.lost & (result.engine_of < 0)).sum())
    return figures


def _p99_ms(seconds: np.ndarray) -> float | None:
    return float(np.percentile(seconds, 99)) * 1000 if len(seconds) else None


def engine_totals(result: ClusterResult) -> list[EngineTotals]:
    """By engine."""
    found = {number: totals for group in result.groups for number, totals in group.engines.items()}
    return [found[number] for number in sorted(found)]


def engine_table(result: ClusterResult, duration: float) -> str:
    """How evenly the engines were used: the least, the mean and the most of each figure."""
    engines = engine_totals(result)
    columns = {
        "requests": [engine.finished for engine in engines],
        "steps": [engine.steps for engine in engines],
        "device busy (%)": [100 * engine.busy_time / duration if duration else 0.0 for engine in engines],
        "hit rate (%)": [100 * engine.hits / engine.queries if engine.queries else 0.0 for engine in engines],
        "peak KV use (%)": [100 * engine.peak_usage for engine in engines],
        "preemptions": [engine.preemptions for engine in engines],
    }
    rows = [(name, float(min(v)), float(np.mean(v)), float(max(v))) for name, v in columns.items()]
    return table(("per engine", "least", "mean", "most"), rows, left=("per engine",))


def death_table(figures: Mapping[str, Any]) -> str:
    """What each engine's death did."""
    return table(
        ("engine", "died at (s)", "failed over", "lost", "P99 TTFT of failed over (ms)"),
        [(str(d["engine"]), d["time"], d["failed_over"], d["lost"], d["p99_ttft_of_failed_over_ms"]) for d in figures["deaths"]],
    )
