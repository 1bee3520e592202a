"""Results as a table and as files."""

import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxllm.bench.metrics import LATENCIES, percentile_word

_WIDTH = 50
_COUNTS = (
    ("completed", "Successful requests:"),
    ("failed", "Failed requests:"),
    ("max_concurrency", "Maximum request concurrency:"),
    ("request_rate", "Request rate configured (RPS):"),
    ("duration", "Benchmark duration (s):"),
    ("total_input_tokens", "Total input tokens:"),
    ("total_output_tokens", "Total generated tokens:"),
    ("request_throughput", "Request throughput (req/s):"),
    ("request_goodput", "Request goodput (req/s):"),
    ("output_throughput", "Output token throughput (tok/s):"),
    ("max_output_tokens_per_s", "Peak output token throughput (tok/s):"),
    ("max_concurrent_requests", "Peak concurrent requests:"),
    ("mean_concurrent_requests", "Mean concurrent requests:"),
    ("total_token_throughput", "Total token throughput (tok/s):"),
    ("prefix_cache_hit_rate", "Prefix cache hit rate (%):"),
)
_SPEC_DECODE = (
    ("spec_decode_acceptance_rate", "Acceptance rate (%):"),
    ("spec_decode_acceptance_length", "Acceptance length:"),
    ("spec_decode_num_drafts", "Drafts:"),
    ("spec_decode_draft_tokens", "Draft tokens:"),
    ("spec_decode_accepted_tokens", "Accepted tokens:"),
)
_PROBES = (
    ("probe_completed", "Probe requests completed:"),
    ("probe_failed", "Probe requests failed:"),
    ("probe_median_e2el_ms", "Median probe E2EL (ms):"),
    ("probe_p99_e2el_ms", "P99 probe E2EL (ms):"),
    ("probe_max_e2el_ms", "Max probe E2EL (ms):"),
)


def serving_table(result: Mapping[str, Any], percentiles: Sequence[float]) -> str:
    """The result of a load test, in the order and words of vLLM's table. What the result has not is left out."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += _rows(result, _COUNTS)
    for title, rows in (("Probe Requests", _PROBES), ("Speculative Decoding", _SPEC_DECODE)):
        if found := _rows(result, rows):
            lines += [title.center(_WIDTH, "-"), *found]
    if engines := result.get("engine_tokens"):
        per_engine = {f"engine_{index}": count for index, count in enumerate(engines)}
        rows = [(name, f"Tokens of engine {index}:") for index, name in enumerate(per_engine)]
        rows.append(("engine_imbalance", "Less than the busiest (%):"))
        lines += ["Engines".center(_WIDTH, "-"), *_rows({**result, **per_engine}, rows)]
    for name, (label, title) in LATENCIES.items():
        rows = [(f"mean_{name}_ms", f"Mean {label} (ms):"), (f"median_{name}_ms", f"Median {label} (ms):")]
        rows += [(f"p{word}_{name}_ms", f"P{word} {label} (ms):") for word in map(percentile_word, percentiles)]
        if found := _rows(result, rows):
            lines += [title.center(_WIDTH, "-"), *found]
    return "\n".join([*lines, "=" * _WIDTH])


def _rows(result: Mapping[str, Any], rows: Sequence[tuple[str, str]]) -> list[str]:
    found = []
    for field, label in rows:
        value = result.get(field)
        if value is not None and value != "inf":
            found.append(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")
    return [row.rstrip() for row in found]


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, left: Sequence[str] = ()) -> str:
    """Columns under a header, flush right but for those named in `left`."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) and math.isfinite(value) else str(value)


def result_path(directory: str | None, filename: str | None, stem: str, date: datetime) -> Path:
    """Where a result goes."""
    return Path(directory or ".") / (filename or f"{stem}-{date:%Y%m%d-%H%M%S}.json")


def make_result_directory(directory: str | None, filename: str | None) -> None:
    """Make the directory of `result_path`, before anything is measured in vain.

    Raises:
        ValueError: if nothing can be written there.
    """
    parent = result_path(directory, filename, "", datetime.now()).parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the directory {parent}: {error.strerror}") from error
    if not os.access(parent, os.W_OK):
        raise ValueError(f"cannot write into {parent}: {os.strerror(errno.EACCES)}")


def write_json(path: Path, result: Any, *, append: bool = False) -> None:
    """Write a result.

    Args:
        append: to a file that has results already; each is a line then.

    Raises:
        ValueError: if it cannot be written.
    """
    try:
        if append:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result, ensure_ascii=False) + "\n")
        else:
            path.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def parse_pairs(flag: str, pairs: Sequence[str] | None) -> dict[str, str]:
    """["a=1"] → {"a": "1"}. Raises ValueError naming the flag and the pair."""
    found = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{flag} takes KEY=VALUE, got {pair!r}")
        found[key.strip()] = value.strip()
    return found
