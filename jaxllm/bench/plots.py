"""Pictures of results. Needs matplotlib, which is imported when one is drawn."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.bench.metrics import RequestRecord, concurrency_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = "pip install 'jaxllm[bench]'"
_WAIT, _DECODE, _ACCENT, _BAD = "#c9ced6", "#3b82c4", "#d9822b", "#c23030"
# More bars than this are thinner than a pixel.
_MAX_BARS = 400
_RATE_BINS = 100


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_plots(path: str) -> None:
    """Raise ValueError if a picture cannot be written, before anything is measured."""
    if not can_plot():
        raise ValueError(f"--plot {path} needs matplotlib: {INSTALL}")
    if not Path(path).suffix:
        raise ValueError(f"--plot must name a .png, .svg or .pdf file, got {path!r}")


def plot_timeline(path: Path, records: Sequence[RequestRecord], title: str) -> None:
    """Token timeline of a run: when each request waited and when its tokens came, tokens a second, and the latencies' spread."""
    done = sorted((record for record in records if record.success), key=lambda record: record.start)
    figure = _figure(11, 9, title)
    axes = figure.subplots(3, 1, height_ratios=(2.2, 1.2, 1.2))
    if not done:
        axes[0].set_title("no request succeeded")
    else:
        first = done[0].start
        _draw_requests(axes[0], done, first)
        _draw_rates(axes[1], done, first)
        _draw_latencies(axes[2], done)
    figure.savefig(path)


def _draw_requests(axes: "Axes", records: Sequence[RequestRecord], first: float) -> None:
    shown = records[:: -(-len(records) // _MAX_BARS)]
    rows = np.arange(len(shown))
    starts = np.asarray([record.start - first for record in shown])
    axes.barh(rows, [r.ttft for r in shown], left=starts, height=0.8, color=_WAIT, label="until the first token")
    axes.barh(
        rows,
        [r.latency - r.ttft for r in shown],
        left=[r.start - first + r.ttft for r in shown],
        height=0.8,
        color=_DECODE,
        alpha=0.45,
        label="until the last",
    )
    times = np.concatenate([np.asarray(r.chunk_times) - first for r in shown])
    of_row = np.repeat(rows, [len(r.chunk_times) for r in shown])
    axes.plot(times, of_row, "|", color=_DECODE, markersize=max(1.0, min(6.0, 240 / len(shown))), markeredgewidth=0.5)
    axes.invert_yaxis()
    axes.set_ylabel("request" if len(shown) == len(records) else f"request ({len(shown)} of {len(records)})")
    axes.set_xlim(0, _end(records, first))
    axes.legend(loc="upper right", fontsize="small", framealpha=0.8)


def _draw_rates(axes: "Axes", records: Sequence[RequestRecord], first: float) -> None:
    times = np.asarray([time - first for record in records for time in record.chunk_times])
    edges = np.linspace(0, _end(records, first), _RATE_BINS + 1)
    counts, _ = np.histogram(times, edges)
    axes.stairs(counts / (edges[1] - edges[0]), edges, fill=True, color=_DECODE, alpha=0.45)
    axes.set_ylabel("chunks of output/s", color=_DECODE)
    axes.set_xlabel("seconds since the first request")
    axes.set_xlim(0, edges[-1])
    beside = axes.twinx()
    steps = concurrency_steps(records)
    beside.step([time - first for time, _ in steps], [n for _, n in steps], where="post", color=_ACCENT)
    beside.set_ylabel("requests under way", color=_ACCENT)
    beside.set_ylim(bottom=0)


def _end(records: Sequence[RequestRecord], first: float) -> float:
    """Where the time axis ends."""
    return max(1e-3, max(record.chunk_times[-1] for record in records) - first)


def _draw_latencies(axes: "Axes", records: Sequence[RequestRecord]) -> None:
    """Share of values that are at most so long."""
    values = {"TTFT": [r.ttft for r in records], "ITL": [gap for r in records for gap in r.itls]}
    for (name, seconds), color in zip(values.items(), (_ACCENT, _DECODE), strict=True):
        if seconds:
            ordered = np.sort(np.asarray(seconds) * 1000)
            axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=color, label=name)
    # Chunks that came together are 0 ms apart; a logarithmic axis has no place for them but its edge.
    _logarithmic(axes, "x")
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share of values up to")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")


def plot_sweep(
    path: Path,
    points: Sequence[Mapping[str, Any]],
    *,
    labels: Sequence[str],
    axis: str,
    fields: Sequence[str],
    knee: Mapping[str, Any] | None,
    best: Mapping[str, Any] | None,
    title: str,
) -> None:
    """Latency against load, and throughput against inter-token latency.

    Args:
        points: results of serve, each with "within_slo".
        labels: of the points.
        axis: what the labels say, such as "request rate".
        fields: latencies to draw, such as "p99_ttft_ms".
        knee, best: points to mark.
    """
    figure = _figure(12, 5, title)
    left, right = figure.subplots(1, 2)
    # Infinity has no place among numbers, so the values stand at equal distances, in their order.
    for field, marker in zip(fields, "osD^v*Px" * len(fields), strict=False):
        left.plot(range(len(points)), [point[field] for point in points], marker=marker, label=field)
    left.set_xticks(range(len(points)), labels)
    left.set_xlabel(axis)
    left.set_ylabel("milliseconds")
    if all(point[field] > 0 for point in points for field in fields):
        _logarithmic(left, "y")
    left.grid(alpha=0.3)
    left.legend(fontsize="small")

    for met, color, label in ((True, _DECODE, "within the objectives"), (False, _BAD, "outside")):
        chosen = [point for point in points if point["within_slo"] is met]
        if chosen:
            right.plot(
                [p["mean_itl_ms"] for p in chosen], [p["output_throughput"] for p in chosen], "o", color=color, label=label
            )
    right.plot([p["mean_itl_ms"] for p in points], [p["output_throughput"] for p in points], color=_WAIT, zorder=0)
    for point, label in zip(points, labels, strict=True):
        right.annotate(
            label, (point["mean_itl_ms"], point["output_throughput"]), xytext=(4, 4), textcoords="offset points", fontsize=7
        )
    for point, marker, color, label in (
        (knee, "o", _ACCENT, "knee"),
        (best, "*", "#2e8b57", "best within the objectives"),
    ):
        if point is not None:
            name = f"{label} (B_sat ≈ {point['mean_concurrent_requests']:.1f})" if label == "knee" else label
            right.plot(
                point["mean_itl_ms"],
                point["output_throughput"],
                marker,
                markersize=15,
                fillstyle="none",
                color=color,
                label=name,
                linestyle="none",
            )
    right.set_xlabel("mean inter-token latency, ms")
    right.set_ylabel("output tokens/s")
    right.set_ylim(bottom=0)
    right.grid(alpha=0.3)
    right.legend(fontsize="small")
    figure.savefig(path)


def _logarithmic(axes: "Axes", which: str) -> None:
    """A logarithmic axis whose ticks are 1, 2, 5, 10, ..."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _figure(width: float, height: float, title: str) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # without a window, whatever the user's configuration says
    figure.suptitle(title)
    return figure
