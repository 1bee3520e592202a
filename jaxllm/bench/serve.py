"""`serve`: load an OpenAI server and measure how it answers."""

import argparse
import asyncio
import math
from datetime import datetime
from pathlib import Path

from jaxllm.bench import plots
from jaxllm.bench.measure import DETAILS, Run, Target, find_target, make_requests, measure
from jaxllm.bench.metrics import parse_goodput, parse_percentiles
from jaxllm.bench.report import make_result_directory, parse_pairs, result_path, serving_table, write_json
from jaxllm.bench.serve_args import add_result_args, add_target_args, add_traffic_args, check_args, make_client
from jaxllm.engine.cli_args import human_int


def add_serve_args(parser: argparse.ArgumentParser) -> None:
    add_target_args(parser)
    traffic = add_traffic_args(parser)
    traffic.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R", help="requests a second (default: inf, all at once)"
    )
    traffic.add_argument("--max-concurrency", type=human_int, metavar="N", help="most requests under way (default: no limit)")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS", help="objectives of a good request: ttft, tpot, e2el, such as ttft:200"
    )
    results.add_argument(
        "--save-result", action=argparse.BooleanOptionalAction, default=True, help="write a JSON file (default: yes)"
    )
    results.add_argument("--save-detailed", action="store_true", help="with each request's times and texts")
    results.add_argument("--append-result", action="store_true", help="append a line to --result-filename")
    results.add_argument("--result-filename", metavar="FILE", help="(default: BACKEND-RATEqps-MODEL-DATE.json)")
    results.add_argument("--plot", metavar="FILE", help="token timeline as .png, .svg or .pdf (default: beside the JSON file)")
    results.add_argument("--no-plot", action="store_true", help="draw nothing")
    add_result_args(results)


def run(args: argparse.Namespace) -> int:
    """The command. Returns 1 if no request succeeded."""
    percentiles = parse_percentiles(args.metric_percentiles)
    check_args(args)
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    parse_goodput(args.goodput or ())
    metadata = parse_pairs("--metadata", args.metadata)
    if args.plot is not None:
        plots.require_plots(args.plot)
    if args.append_result and args.result_filename is None:
        raise ValueError("--append-result needs --result-filename")
    if args.save_result or args.append_result:
        make_result_directory(args.result_dir, args.result_filename)
    done, target = asyncio.run(_run(args))
    print(serving_table(done.result | {"max_concurrency": args.max_concurrency}, percentiles))
    failures = [record.error for record in done.records if not record.success]
    for text in dict.fromkeys(failures):
        print(f"{failures.count(text)} failed: {text}")
    _save(args, done, target, metadata)
    return 0 if done.result["completed"] else 1


async def _run(args: argparse.Namespace) -> tuple[Run, Target]:
    async with make_client(args) as client:
        target = await find_target(client, args)
        requests = make_requests(args, target, args.seed)
        return await measure(client, args, target, requests, args.request_rate, args.max_concurrency, args.seed), target


def _save(args: argparse.Namespace, done: Run, target: Target, metadata: dict[str, str]) -> None:
    now = datetime.now()
    setup = {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": target.model_id,
        "tokenizer_id": target.tokenizer_id,
        "num_prompts": args.num_prompts,
    }
    kept = {name: value for name, value in done.result.items() if args.save_detailed or name not in DETAILS}
    path = result_path(args.result_dir, args.result_filename, _stem(args, target), now)
    if args.save_result or args.append_result:
        write_json(path, setup | metadata | kept, append=args.append_result)
        print(f"Result: {path}")
    picture = Path(args.plot) if args.plot is not None else path.with_suffix(".png") if args.save_result else None
    if picture is None or args.no_plot:
        return
    if not plots.can_plot():
        print(f"Plot: none, since matplotlib is not installed ({plots.INSTALL})")
        return
    plots.plot_timeline(picture, done.records, f"{target.model_id}: {_traffic(args)}, {len(done.records)} requests")
    print(f"Plot: {picture}")


def _traffic(args: argparse.Namespace) -> str:
    if args.self_timed:
        return "timed trace"
    if args.ramp_up_strategy is not None:
        return f"{args.ramp_up_start_rps:g} to {args.ramp_up_end_rps:g} requests/s"
    limit = "" if args.max_concurrency is None else f", at most {args.max_concurrency} at once"
    return ("all at once" if math.isinf(args.request_rate) else f"{args.request_rate:g} requests/s") + limit


def _stem(args: argparse.Namespace, target: Target) -> str:
    """vLLM's name of a result file, but for the date."""
    limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    model = Path(target.model_id).name
    if args.ramp_up_strategy is not None:
        rate = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps:g}qps-{args.ramp_up_end_rps:g}qps"
    else:
        rate = f"{args.request_rate}qps"
    return f"{args.label or args.backend}-{rate}{limit}-{model}"
