"""The metrics of several API servers as one page, whichever of them is asked.

Each writes its own into a file of a folder that they share, once a second and when it is asked itself; the page has the sums.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.engine.metrics import METRIC_PREFIX, Counter, Gauge, Histogram, Metric

INTERVAL_S = 1.0
# Of the gauges these are each server's own; the others say the same in all of them.
SUMMED_GAUGES = (METRIC_PREFIX + "server_load",)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def _pack(metric: Metric) -> tuple[Any, ...]:
    if isinstance(metric, Histogram):
        return "histogram", metric.name, metric.documentation, metric.labels, metric.bounds, metric.counts, metric.sum
    return type(metric).__name__.lower(), metric.name, metric.documentation, metric.labels, metric.value


def _unpack(packed: Any) -> Metric:
    kind, name, documentation, labels, *rest = packed
    if kind == "histogram":
        histogram = Histogram(name, documentation, rest[0], labels=labels)
        histogram.counts, histogram.sum = rest[1], rest[2]
        return histogram
    return {"counter": Counter, "gauge": Gauge}[kind](name, documentation, rest[0], labels)


def _copy(metric: Metric) -> Metric:
    return _unpack(_decode(_encode(_pack(metric))))


def merge(pages: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Counters and histograms added up; of a gauge the first page's value, unless it is among SUMMED_GAUGES.

    The arguments stay as they are.
    """
    found: dict[str, dict[tuple[tuple[str, str], ...], Metric]] = {}
    for page in pages:
        for metric in page:
            key = tuple(sorted(metric.labels.items()))
            of_name = found.setdefault(metric.name, {})
            total = of_name.get(key)
            if total is None:
                of_name[key] = _copy(metric)
            elif isinstance(total, Histogram):
                assert isinstance(metric, Histogram)
                total.counts = [a + b for a, b in zip(total.counts, metric.counts, strict=True)]
                total.sum += metric.sum
            else:
                assert not isinstance(metric, Histogram)
                if isinstance(total, Counter) or total.name in SUMMED_GAUGES:
                    total.value += metric.value
    return [metric for of_name in found.values() for metric in of_name.values()]


class SharedMetrics:
    """
    Args:
        folder: of the files.
        index, count: which of how many servers this one is.
    """

    def __init__(self, folder: str, index: int, count: int) -> None:
        self._paths = [Path(folder) / f"metrics-{server}" for server in range(count)]
        self._index = index

    def publish(self, metrics: Iterable[Metric]) -> None:
        """Let the others see this server's metrics."""
        path = self._paths[self._index]
        temporary = path.with_suffix(".new")
        # The others see all of it or what was there before. Without the folder the engines are gone, and this server soon.
        with contextlib.suppress(FileNotFoundError):
            temporary.write_bytes(_encode([_pack(metric) for metric in metrics]))
            os.replace(temporary, path)

    def merged(self, own: Iterable[Metric]) -> list[Metric]:
        """This server's metrics and what the others last published."""
        own = list(own)
        self.publish(own)
        pages: list[list[Metric]] = [own]
        for index, path in enumerate(self._paths):
            if index != self._index:
                with contextlib.suppress(FileNotFoundError):  # it has not published yet
                    pages.append([_unpack(packed) for packed in _decode(path.read_bytes())])
        return merge(pages)

    async def run(self, collect: Any) -> None:
        """Publish what `collect` returns, until cancelled."""
        while True:
            self.publish(collect())
            await asyncio.sleep(INTERVAL_S)
