"""`trace`: what a folder of traces says, as a table, and as one file to look at."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.trace import MERGED_NAME, durations, read_trace

_SPANS = (
    ("engine core", "schedule"),
    ("engine core", "dispatch"),
    ("engine core", "wait"),
    ("engine core", "update"),
    ("front end", "detokenize"),
    ("worker", "dispatch"),
    ("device", "step"),
    ("device", "idle"),
)


def add_trace_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="what --profile was given")


def run(args: argparse.Namespace) -> int:
    """The command."""
    events = read_trace(args.folder)
    print(trace_table(events))
    merged = Path(args.folder) / MERGED_NAME
    merged.write_text(json.dumps({"traceEvents": events}))
    print(f"\n{merged}: open it at https://ui.perfetto.dev")
    return 0


def trace_table(events: list[dict[str, Any]]) -> str:
    """Count, total and length of each kind of span, and how much of its time the device was idle with work to do."""
    lines = [f"{'track':<12} {'span':<10} {'count':>8} {'total s':>9} {'mean ms':>9} {'p50 ms':>9} {'p99 ms':>9}"]
    for track, name in _SPANS:
        seconds = np.asarray(durations(events, track, name))
        if not len(seconds):
            lines.append(f"{track:<12} {name:<10} {0:>8}")
            continue
        p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
        lines.append(
            f"{track:<12} {name:<10} {len(seconds):>8} {seconds.sum():>9.3f} {seconds.mean() * 1e3:>9.3f} {p50:>9.3f} {p99:>9.3f}"
        )
    gaps, ahead = idle_gaps(events), dispatched_ahead(events)
    busy = sum(durations(events, "device", "step"))
    share = 100 * sum(gaps) / (busy + sum(gaps)) if busy else 0.0
    lines.append(f"\nidle gaps of the device: {len(gaps)}, {sum(gaps) * 1e3:.3f} ms in all, {share:.2f}% of its time")
    lines.append(f"steps dispatched before the step before them ended: {100 * ahead:.1f}%")
    return "\n".join(lines)


def idle_gaps(events: list[dict[str, Any]]) -> list[float]:
    """Seconds of each time that the device had ended a step and the next was not dispatched yet, although there was work."""
    return durations(events, "device", "idle")


def dispatched_ahead(events: list[dict[str, Any]]) -> float:
    """The share of steps, but the first, that were dispatched before the device had ended the step before them."""
    dispatched = _ends(events, "dispatch")
    ended = _ends(events, "step")
    steps = [key for key in dispatched if (key[0], key[1] - 1) in ended]
    if not steps:
        return 0.0
    return sum(dispatched[pid, step] < ended[pid, step - 1] for pid, step in steps) / len(steps)


def _ends(events: list[dict[str, Any]], name: str) -> dict[tuple[int, int], float]:
    """(process, step) → end of the worker's spans of this name, microseconds."""
    spans = [event for event in events if event["ph"] == "X" and event["name"] == name and "step" in event["args"]]
    return {(event["pid"], event["args"]["step"]): event["ts"] + event["dur"] for event in spans}
