"""What is counted, as Prometheus text, and a line of it in the log."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from jaxllm.engine.metrics import METRIC_PREFIX, Counter, Gauge, Histogram, Metric

if TYPE_CHECKING:
    from jaxllm.serve.context import Context

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOG_INTERVAL = 10.0  # seconds


def render(metrics: Iterable[Metric], labels: Mapping[str, str], prefix: str = METRIC_PREFIX) -> str:
    """Prometheus' text format, version 0.0.4.

    Args:
        metrics: those of one name must stand together.
        labels: that all of them get.
        prefix: instead of METRIC_PREFIX.
    """
    lines: list[str] = []
    last = ""
    for metric in metrics:
        name = prefix + metric.name.removeprefix(METRIC_PREFIX)
        kind = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}[type(metric)]
        sample = name + "_total" if kind == "counter" and not name.endswith("_total") else name
        if name != last:
            documentation = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {sample} {documentation}", f"# TYPE {sample} {kind}"]
            last = name
        all_labels = {**labels, **metric.labels}
        if isinstance(metric, Histogram):
            lines += [
                f"{name}_bucket{_braces({**all_labels, 'le': bound})} {_number(count)}" for bound, count in metric.buckets.items()
            ]
            lines.append(f"{name}_sum{_braces(all_labels)} {_number(metric.sum)}")
            lines.append(f"{name}_count{_braces(all_labels)} {_number(metric.count)}")
        else:
            lines.append(f"{sample}{_braces(all_labels)} {_number(metric.value)}")
    return "\n".join(lines) + "\n"


def _braces(labels: Mapping[str, str]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    return str(float(value))


def engine_metrics(context: "Context") -> list[Metric]:
    """The engine's, or none if it keeps none."""
    if not context.config.log_stats:
        return []
    return context.engine.get_metrics()


def server_metrics(context: "Context") -> list[Metric]:
    """What the HTTP server counts itself."""
    cache = context.config.cache
    info = {
        "block_size": str(cache.block_size),
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "gpu_memory_utilization": str(cache.gpu_memory_utilization),
        "num_gpu_blocks_override": str(cache.num_gpu_blocks_override),
    }
    return [
        Gauge(METRIC_PREFIX + "cache_config_info", "How the KV cache is configured.", 1, info),
        Gauge(METRIC_PREFIX + "server_load", "HTTP requests that are being answered.", context.num_open),
        *sorted(context.http_requests.values(), key=lambda counter: sorted(counter.labels.items())),
    ]


def metrics_page(context: "Context") -> str:
    """What GET /metrics answers."""
    labels = {"model_name": context.model_names[0], "engine": "0"}
    prefix = "vllm:" if context.args.vllm_metric_names else METRIC_PREFIX
    metrics = all_metrics(context)
    return render(metrics if context.shared_metrics is None else context.shared_metrics.merged(metrics), labels, prefix)


def all_metrics(context: "Context") -> list[Metric]:
    """This server's own."""
    return [*engine_metrics(context), *server_metrics(context)]


class StatsLogger:
    """A line about the engine every LOG_INTERVAL seconds, as long as something happens."""

    def __init__(self, context: "Context", interval: float = LOG_INTERVAL) -> None:
        self.context = context
        self.interval = interval
        self.last: dict[str, float] = {}
        self.last_time = time.monotonic()
        self.was_idle = True

    async def run(self) -> None:
        """Until cancelled."""
        self.last = self._totals()
        while True:
            await asyncio.sleep(self.interval)
            if (line := self.line()) is not None:
                logger.info(line)

    def _totals(self) -> dict[str, float]:
        """Of all engines together; of the KV cache their mean."""
        totals: dict[str, float] = {}
        for metric in engine_metrics(self.context):
            if isinstance(metric, Counter | Gauge) and not metric.labels.keys() - {"engine"}:
                name = metric.name.removeprefix(METRIC_PREFIX)
                totals[name] = totals.get(name, 0.0) + metric.value
        if "kv_cache_usage_perc" in totals:
            totals["kv_cache_usage_perc"] /= self.context.engine.num_engines
        return totals

    def line(self) -> str | None:
        """What happened since the last one; None if nothing did, twice in a row."""
        now, totals = time.monotonic(), self._totals()
        seconds = max(now - self.last_time, 1e-9)
        new = {name: value - self.last.get(name, 0.0) for name, value in totals.items()}
        self.last, self.last_time = totals, now
        running, waiting = totals.get("num_requests_running", 0), totals.get("num_requests_waiting", 0)
        prompt, generation = new.get("prompt_tokens", 0), new.get("generation_tokens", 0)
        was_idle, self.was_idle = self.was_idle, not (running or waiting or prompt or generation)
        if was_idle and self.was_idle:
            return None
        padding = new.get("padding_tokens", 0)
        computed = padding + new.get("computed_tokens", 0)
        queries, hits = new.get("prefix_cache_queries", 0), new.get("prefix_cache_hits", 0)
        return (
            f"running {running:.0f}, waiting {waiting:.0f}, KV cache {100 * totals.get('kv_cache_usage_perc', 0):.1f}% in use, "
            f"prompt {prompt / seconds:.1f} tokens/s, generation {generation / seconds:.1f} tokens/s, "
            f"prefix cache hits {100 * hits / queries if queries else 0:.1f}%, "
            f"padding {100 * padding / computed if computed else 0:.1f}%"
        )
