"""One load test: find the server's model, make the requests, send them, sum up."""

import argparse
import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.bench.arrivals import arrival_times
from jaxllm.bench.client import NoServerError, OpenAIClient, RequestOptions
from jaxllm.bench.datasets import SampleRequest, load_requests
from jaxllm.bench.load import probing, progress_bar, run_load, warm_up
from jaxllm.bench.metrics import (
    RequestRecord,
    Summary,
    calculate_metrics,
    output_lens,
    parse_goodput,
    parse_latencies,
    parse_percentiles,
)
from jaxllm.bench.prompts import TextPrompts
from jaxllm.bench.serve_args import SAMPLING_FLAGS, ramp_up_of
from jaxllm.bench.server_metrics import difference, engine_result, prefix_cache_result, spec_decode_result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# Pause between two tries to reach a server that is not there yet.
_POLL_SECONDS = 0.5
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "queue_times", "generated_texts", "errors")


@dataclass(frozen=True)
class Target:
    """The server's model and what turns its text into tokens.

    Attributes:
        model: its name in requests.
        model_id: its name in results.
        tokenizer_id: whose tokenizer counts; None without one.
    """

    model: str
    model_id: str
    tokenizer_id: str | None
    tokenizer: "PreTrainedTokenizerFast | None"


@dataclass(frozen=True)
class Run:
    """What one load test gave.

    Attributes:
        result: vLLM's names; with one entry for each request under `input_lens`, `ttfts`, `itls`, ….
    """

    result: dict[str, Any]
    records: list[RequestRecord]


async def find_target(client: OpenAIClient, args: argparse.Namespace) -> Target:
    """Ask the server for its models, wait for it if that is wanted, and load the tokenizer.

    Raises:
        NoServerError: if nobody answers in time.
        ValueError: if there is no model or no tokenizer.
    """
    give_up = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            models = await client.models()
            break
        except NoServerError:
            if time.monotonic() >= give_up:
                raise
            await asyncio.sleep(_POLL_SECONDS)
    if args.model is None and not models:
        raise ValueError(f"{client.base_url} lists no model; name one with --model")
    served = args.served_model_name or args.model or models[0]["id"]
    if models and served not in [model["id"] for model in models]:
        logger.warning("the server lists %s, not %r", [model["id"] for model in models], served)
    model_id = args.model or models[0]["id"]
    if args.skip_tokenizer_init:
        return Target(served, model_id, None, None)
    roots = [str(model["root"]) for model in models if model["id"] == served and model.get("root")]
    named = args.tokenizer or args.model
    tokenizer_id, tokenizer = load_first_tokenizer([named] if named else list(dict.fromkeys([*roots, model_id])))
    return Target(served, model_id, tokenizer_id, tokenizer)


def load_first_tokenizer(names: Sequence[str]) -> "tuple[str, PreTrainedTokenizerFast]":
    """The tokenizer of the first name that has one. Raises ValueError if none has."""
    from jaxllm.tokenizer import load_tokenizer

    reasons = []
    for name in names:
        try:
            return name, load_tokenizer(name)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(
        f"no tokenizer found ({'; '.join(reasons)}); name one with --tokenizer, or go without by --skip-tokenizer-init"
    )


def make_requests(args: argparse.Namespace, target: Target, seed: int) -> list[SampleRequest]:
    """The requests of the data set."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        return load_requests(args, None, seed=seed, as_text=True)
    template: Callable[[str], str] | None = None
    if (
        args.dataset_name == "custom"
        and args.backend == "openai"
        and tokenizer.chat_template
        and not args.custom_skip_chat_template
    ):
        from jaxllm.tokenizer import apply_chat_template

        def template(prompt: str) -> str:
            return apply_chat_template(tokenizer, [{"role": "user", "content": prompt}])

    return load_requests(args, TextPrompts(tokenizer), seed=seed, as_text=True, apply_chat_template=template)


async def measure(
    client: OpenAIClient,
    args: argparse.Namespace,
    target: Target,
    requests: Sequence[SampleRequest],
    rate: float,
    max_concurrency: int | None,
    seed: int,
    latencies: Sequence[str] = (),
    percentiles: Sequence[float] = (),
) -> Run:
    """Warm up, send everything, and sum it up.

    Args:
        rate: requests a second.
        latencies, percentiles: to report besides those of the flags.
    """
    options = RequestOptions(
        model=target.model,
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
        sampling={name: getattr(args, name) for name in SAMPLING_FLAGS if getattr(args, name) is not None},
        extra_body=args.extra_body or {},
        openai_fields_only=args.openai_fields_only,
        request_id_prefix=args.request_id_prefix or f"bench-{uuid.uuid4().hex[:8]}-",
    )
    await warm_up(client, requests[0], options, args.num_warmups, max_concurrency)
    ramp_up = ramp_up_of(args)
    if args.self_timed:
        times: Sequence[float] = [request.timestamp or 0.0 for request in requests]
    else:
        rng = np.random.default_rng([seed, 1])
        times = arrival_times(len(requests), rate, rng, burstiness=args.burstiness, ramp_up=ramp_up).tolist()
    before = await client.get_text("/metrics")
    with contextlib.closing(progress_bar(len(requests), not args.disable_tqdm)) as bar:
        async with probing(client, options, args.probe_request_rate) as probes:
            records, duration = await run_load(
                client, requests, options, times, max_concurrency=max_concurrency, on_done=bar.update
            )
    after = await client.get_text("/metrics")
    grown = difference(before, after)

    names = parse_latencies(args.percentile_metrics)
    if max_concurrency is not None:
        names += ["client_queue_time"] + ([] if math.isinf(rate) else ["e2el_including_client_queue"])
    count_tokens = _token_counter(target)
    metrics = calculate_metrics(
        records,
        duration,
        count_tokens=count_tokens,
        latencies=list(dict.fromkeys([*names, *latencies])),
        percentiles=list(dict.fromkeys([*parse_percentiles(args.metric_percentiles), *percentiles])),
        goodput=parse_goodput(getattr(args, "goodput", None) or ()),
    )
    result = {
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": args.burstiness,
        "max_concurrency": max_concurrency,
    }
    if ramp_up is not None:
        result |= {
            "ramp_up_strategy": ramp_up.strategy,
            "ramp_up_start_rps": ramp_up.start,
            "ramp_up_end_rps": ramp_up.end,
        }
    result |= metrics.as_result()
    result |= _details(records, count_tokens) | _probe_result(probes) | spec_decode_result(grown) | prefix_cache_result(grown)
    result |= engine_result(before, after)
    _note_lengths(requests, records)
    return Run(result, records)


def _token_counter(target: Target) -> Callable[[str], int] | None:
    tokenizer = target.tokenizer
    return None if tokenizer is None else lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _details(records: Sequence[RequestRecord], count_tokens: Callable[[str], int] | None) -> dict[str, Any]:
    values = (
        [r.prompt_len for r in records],
        output_lens(records, count_tokens),
        [r.start for r in records],
        [r.ttft for r in records],
        [r.itls for r in records],
        [r.latency for r in records],
        [r.queue_time for r in records],
        [r.text for r in records],
        [r.error for r in records],
    )
    return dict(zip(DETAILS, values, strict=True))


def _probe_result(probes: Sequence[RequestRecord]) -> dict[str, Any]:
    """vLLM's names for the probes' results."""
    latencies = [record.latency for record in probes if record.success]
    if not latencies:
        return {"probe_completed": 0, "probe_failed": len(probes)} if probes else {}
    summary = Summary.of(latencies, (99.0, 100.0))
    return {
        "probe_completed": len(latencies),
        "probe_failed": len(probes) - len(latencies),
        "probe_median_e2el_ms": summary.median,
        "probe_p99_e2el_ms": summary.percentiles[0][1],
        "probe_max_e2el_ms": summary.percentiles[1][1],
    }


def _note_lengths(requests: Sequence[SampleRequest], records: Sequence[RequestRecord]) -> None:
    """Say so if the server counts other lengths than were asked for: another tokenizer, a chat template, or an early end."""
    done = [(request, record) for request, record in zip(requests, records, strict=True) if record.success]
    if not done:
        return
    asked, counted = (sum(n) / len(done) for n in zip(*((a.prompt_len, b.prompt_len) for a, b in done), strict=True))
    if asked != counted:
        logger.warning("the server counts %.1f prompt tokens a request, where the data set has %.1f", counted, asked)
    if any(record.output_len is None for _, record in done):
        logger.warning("the server does not say how many tokens it generated; they are counted here")
