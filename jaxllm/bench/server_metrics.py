"""What a vLLM-like server's own counters say of a run: speculative decoding and prefix cache, from GET /metrics."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

PREFIXES = ("jaxllm:", "vllm:")
_SAMPLE = re.compile(r"(?P<name>[^\s{]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'position="(\d+)"')
_ENGINE = re.compile(r'engine="(\d+)"')
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"

Counters = Mapping[str, float]


def parse_counters(text: str) -> dict[str, float]:
    """Counters of Prometheus text, by name without prefix and `_total`, summed over their labels but for `position`, which is
    added to the name as `:0`, `:1`, …"""
    counters: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or not match["name"].startswith(PREFIXES):
            continue
        name = match["name"].partition(":")[2].removesuffix("_total")
        if position := _POSITION.search(match["labels"] or ""):
            name += ":" + position[1]
        counters[name] += float(match["value"])
    return dict(counters)


def difference(before: str | None, after: str | None) -> Counters:
    """How much each counter grew between two texts; nothing if there are no counters."""
    if before is None or after is None:
        return {}
    old = parse_counters(before)
    return {name: value - old.get(name, 0.0) for name, value in parse_counters(after).items()}


def engine_result(before: str | None, after: str | None) -> dict[str, Any]:
    """How a run was shared out among a server's engines; nothing if there are not several.

    `engine_tokens` are prompt tokens and generated ones of each. `engine_imbalance` is in percent: how much less than the busiest
    the idlest had.
    """
    tokens = _tokens_by_engine(after)
    if before is None or len(tokens) < 2:
        return {}
    old = _tokens_by_engine(before)
    grown = [int(tokens[engine] - old.get(engine, 0.0)) for engine in sorted(tokens)]
    most = max(grown)
    return {"engine_tokens": grown, "engine_imbalance": 100 * (most - min(grown)) / most} if most else {}


def _tokens_by_engine(text: str | None) -> dict[int, float]:
    tokens: dict[int, float] = defaultdict(float)
    for line in (text or "").splitlines():
        match = _SAMPLE.match(line)
        name = match["name"].partition(":")[2] if match is not None and match["name"].startswith(PREFIXES) else ""
        if name in ("prompt_tokens_total", "generation_tokens_total") and (engine := _ENGINE.search(match["labels"] or "")):
            tokens[int(engine[1])] += float(match["value"])
    return tokens


def spec_decode_result(grown: Counters) -> dict[str, Any]:
    """vLLM's names for a result file; nothing if nothing was drafted.

    Acceptance rate is in percent; acceptance length is tokens a draft step gives, 1 + accepted / drafts.
    """
    drafts, drafted = grown.get("spec_decode_num_drafts", 0), grown.get("spec_decode_num_draft_tokens", 0)
    accepted = grown.get("spec_decode_num_accepted_tokens", 0)
    if drafts <= 0 or drafted <= 0:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(drafted),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [grown[name] / drafts for name in _positions(grown)],
    }


def _positions(grown: Iterable[str]) -> list[str]:
    names = [name for name in grown if name.startswith(_PER_POSITION + ":")]
    return sorted(names, key=lambda name: int(name.rpartition(":")[2]))


def prefix_cache_result(grown: Counters) -> dict[str, Any]:
    """The share, in percent, of the run's prompt tokens that the server found in its prefix cache; nothing if it does not say."""
    queries = grown.get("prefix_cache_queries", 0)
    return {"prefix_cache_hit_rate": 100 * grown.get("prefix_cache_hits", 0) / queries} if queries > 0 else {}
