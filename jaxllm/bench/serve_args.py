"""Flags of the commands that load a server: which server is asked what, when, and what is reported."""

import argparse
import math
from typing import Any

from jaxllm.bench.arrivals import RampUp
from jaxllm.bench.client import DEFAULT_TIMEOUT, ENDPOINTS, OpenAIClient
from jaxllm.bench.datasets import add_dataset_args
from jaxllm.bench.metrics import parse_latencies
from jaxllm.bench.report import parse_pairs
from jaxllm.engine.cli_args import human_int, json_object

SAMPLING_FLAGS = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
DEFAULT_LATENCIES = "ttft,tpot,itl,e2el"


def add_target_args(parser: argparse.ArgumentParser) -> None:
    """Flags that say which server is asked what, with the data set's."""
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=tuple(ENDPOINTS), default="openai", help="completions or chat (default: openai)")
    group.add_argument("--base-url", metavar="URL", help="instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", metavar="HOST", help="(default: 127.0.0.1)")
    group.add_argument("--port", type=human_int, default=8000, metavar="N", help="(default: 8000)")
    group.add_argument("--endpoint", metavar="PATH", help="(default: that of the backend)")
    group.add_argument("--header", nargs="*", metavar="KEY=VALUE", help="sent with each request")
    group.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    group.add_argument(
        "--request-timeout", type=float, default=DEFAULT_TIMEOUT, metavar="S", help="seconds for one request (default: 6 hours)"
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="S", help="wait so long for a server to answer (default: 0)"
    )
    group.add_argument(
        "--model", metavar="MODEL", help="name or folder, for requests and tokenizer (default: the server's first)"
    )
    group.add_argument("--served-model-name", metavar="NAME", help="the model's name in requests, if it is another")
    group.add_argument("--tokenizer", metavar="NAME", help="name or folder (default: that of the model)")
    group.add_argument("--skip-tokenizer-init", action="store_true", help="do without a tokenizer; made-up prompts need one")
    add_dataset_args(parser)
    group.add_argument("--seed", type=human_int, default=0, metavar="N", help="of data set and arrivals (default: 0)")

    body = parser.add_argument_group("requests", "what is left out is up to the server")
    for name in SAMPLING_FLAGS:
        body.add_argument("--" + name.replace("_", "-"), type=int if name == "top_k" else float, metavar="X")
    body.add_argument("--logprobs", type=int, metavar="N", help="log probabilities to ask for")
    body.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate all the tokens asked for (default: for random and timed_trace only)",
    )
    body.add_argument("--extra-body", type=json_object, metavar="JSON", help="more fields for each request")
    body.add_argument(
        "--openai-fields-only",
        action="store_true",
        help="send no ignore_eos and no repetition_penalty, for servers that refuse them",
    )
    body.add_argument("--request-id-prefix", metavar="TEXT", help="of the header x-request-id (default: bench-RANDOM-)")


def add_traffic_args(parser: argparse.ArgumentParser) -> Any:
    """Flags of when requests are sent; gives the group for more of them."""
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="shape of the gamma distribution; 1 is Poisson, inf an even beat",
    )
    group.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate grow, instead of --request-rate"
    )
    group.add_argument("--ramp-up-start-rps", type=float, metavar="R", help="requests a second at first")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="R", help="and at last")
    group.add_argument(
        "--self-timed", action=argparse.BooleanOptionalAction, help="send at the times of the trace (default: for timed_trace)"
    )
    group.add_argument(
        "--num-warmups", type=human_int, default=0, metavar="N", help="requests before the measurement (default: 0)"
    )
    group.add_argument(
        "--probe-request-rate",
        type=float,
        default=0.0,
        metavar="R",
        help="ask for one token so often meanwhile, and report it apart",
    )
    return group


def add_result_args(group: Any) -> None:
    """Flags of what is reported, and where."""
    group.add_argument("--percentile-metrics", default=DEFAULT_LATENCIES, metavar="NAMES", help=f"(default: {DEFAULT_LATENCIES})")
    group.add_argument("--metric-percentiles", default="99", metavar="P,…", help="(default: 99)")
    group.add_argument("--result-dir", metavar="DIR", help="(default: here)")
    group.add_argument("--label", metavar="TEXT", help="first part of the file's name (default: the backend)")
    group.add_argument("--metadata", nargs="*", metavar="KEY=VALUE", help="put into the JSON file")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def base_url(args: argparse.Namespace) -> str:
    if args.base_url is not None:
        return args.base_url.rstrip("/").removesuffix("/v1")
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"http://{host}:{args.port}"


def make_client(args: argparse.Namespace, url: str | None = None) -> OpenAIClient:
    return OpenAIClient(
        url or base_url(args),
        args.backend,
        args.endpoint,
        parse_pairs("--header", args.header),
        timeout=args.request_timeout,
        insecure=args.insecure,
    )


def check_args(args: argparse.Namespace) -> None:
    """Raise ValueError for what can be seen to be wrong before anybody is asked, or correct it where it follows from the rest."""
    parse_latencies(args.percentile_metrics)
    if args.num_warmups < 0:
        raise ValueError(f"--num-warmups must be at least 0, got {args.num_warmups}")
    if not 0 <= args.probe_request_rate < math.inf:
        raise ValueError(f"--probe-request-rate must be at least 0 and finite, got {args.probe_request_rate}")
    timed = args.dataset_name == "timed_trace"
    if args.self_timed and not timed:
        raise ValueError(f"--self-timed needs --dataset-name timed_trace, got {args.dataset_name}")
    if timed and args.backend != "openai":
        raise ValueError(f"--dataset-name timed_trace sends token ids, which need --backend openai, got {args.backend}")
    ramp_up = ramp_up_of(args)
    if ramp_up is not None and getattr(args, "request_rate", math.inf) != math.inf:
        raise ValueError(f"--ramp-up-strategy excludes --request-rate, got {args.request_rate}")
    if args.self_timed is None:
        args.self_timed = timed
    if args.ignore_eos is None:
        args.ignore_eos = args.dataset_name in ("random", "timed_trace")


def ramp_up_of(args: argparse.Namespace) -> RampUp | None:
    if args.ramp_up_strategy is None:
        if args.ramp_up_start_rps is not None or args.ramp_up_end_rps is not None:
            raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if args.ramp_up_start_rps is None or args.ramp_up_end_rps is None:
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    return RampUp(args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
