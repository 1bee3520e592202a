"""`simulate`: thousands of engines and millions of requests, with the real scheduler and no device."""

import argparse
import os
import time
from pathlib import Path

from jaxllm.bench.datasets import range_ratio
from jaxllm.bench.metrics import parse_goodput, parse_percentiles
from jaxllm.bench.report import serving_table, write_json
from jaxllm.bench.sim.cluster import Kill, simulate
from jaxllm.bench.sim.engine import EngineSpec, StepTime
from jaxllm.bench.sim.models import MODELS, model_shape
from jaxllm.bench.sim.result import death_table, engine_table, summarize
from jaxllm.bench.sim.step_time import DEVICES, Roofline, StepTable, num_kv_blocks
from jaxllm.bench.sim.workload import Workload, load_trace, sample, write_trace
from jaxllm.checks import check_at_least
from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheSpec, make_kv_cache_groups
from jaxllm.engine.cli_args import human_int
from jaxllm.worker.buckets import Buckets

DEFAULT_RATE = 16.0
# Below it, starting processes takes longer than what they save.
MIN_REQUESTS_FOR_PROCESSES = 20_000


def add_simulate_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engines")
    group.add_argument("--engines", type=human_int, default=1, metavar="N", help="behind load balancers (default: 1)")
    group.add_argument("--api-server-count", type=human_int, default=1, metavar="N", help="front ends (default: 1)")
    group.add_argument("--device", choices=tuple(DEVICES), default="h200", help="whose step times (default: h200)")
    group.add_argument(
        "--model-shape",
        default="llama-3.1-8b",
        metavar="NAME",
        help=f"{', '.join(MODELS)}, or a config.json (default: llama-3.1-8b)",
    )
    group.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(default: bfloat16)")
    group.add_argument("--tensor-parallel-size", type=human_int, default=1, metavar="N", help="devices an engine (default: 1)")
    group.add_argument(
        "--step-table", metavar="FILE", help="measured step times and engine limits, instead of the device's; see measure-steps"
    )
    group.add_argument(
        "--host-time", type=float, default=0.0, metavar="S", help="seconds of host work before a step (default: 0)"
    )
    group.add_argument(
        "--request-time", type=float, default=0.0, metavar="S", help="seconds from a request's arrival to its engine (default: 0)"
    )
    group.add_argument("--max-model-len", type=human_int, metavar="N", help="(default: 8192, or the table's)")
    group.add_argument("--max-num-seqs", type=human_int, metavar="N", help="(default: 256, or the table's)")
    group.add_argument("--max-num-batched-tokens", type=human_int, metavar="N", help="(default: 2048, or the table's)")
    group.add_argument("--block-size", type=human_int, metavar="N", help="(default: 32, or the table's)")
    group.add_argument(
        "--num-gpu-blocks-override", type=human_int, metavar="N", help="(default: what the device holds, or the table's)"
    )
    group.add_argument("--gpu-memory-utilization", type=float, default=0.92, metavar="X", help="(default: 0.92)")
    group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="(default: yes)")
    group.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction, default=True, help="(default: yes)")
    group.add_argument(
        "--kill", nargs="+", metavar="ENGINE@S", default=(), help="engines that die, each with the second at which it does"
    )
    group.add_argument("--restart-after", type=float, metavar="S", help="seconds until a dead engine is back (default: never)")

    group = parser.add_argument_group("requests")
    group.add_argument("--requests", type=human_int, metavar="N", help="(default: 1000, or all of --trace)")
    group.add_argument(
        "--request-rate", type=float, metavar="R", help=f"requests a second, to all engines (default: {DEFAULT_RATE:g} an engine)"
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X", help="shape of the gamma distribution (default: 1, Poisson)"
    )
    group.add_argument("--input-len", type=human_int, default=1024, metavar="N", help="tokens of a prompt (default: 1024)")
    group.add_argument("--output-len", type=human_int, default=256, metavar="N", help="tokens to generate (default: 256)")
    group.add_argument(
        "--range-ratio", type=range_ratio, default=(0.5, 0.5), metavar="R",
        help='lengths are uniform between (1 - R) and (1 + R) times the length; or {"input": R, "output": R} (default: 0.5)',
    )  # fmt: skip
    group.add_argument(
        "--num-prefixes", type=human_int, default=100, metavar="N", help="prompts begin with one of these (default: 100)"
    )
    group.add_argument(
        "--prefix-len", type=human_int, default=256, metavar="N", help="tokens of each, part of the prompt (default: 256)"
    )
    group.add_argument("--trace", metavar="FILE", help="JSON lines as of the data set timed_trace, instead of distributions")
    group.add_argument(
        "--trace-chunk-hash-size", type=human_int, default=16, metavar="N", help="tokens a hash id stands for (default: 16)"
    )
    group.add_argument("--trace-sec-multiplier", type=float, default=1.0, metavar="X", help="0.001 for milliseconds (default: 1)")
    group.add_argument(
        "--write-trace", metavar="FILE", help="write the requests as such a file, for `serve --dataset-name timed_trace`"
    )
    group.add_argument("--seed", type=human_int, default=0, metavar="N", help="(default: 0)")

    group = parser.add_argument_group("results")
    group.add_argument("--metric-percentiles", default="50,90,99", metavar="P,…", help="(default: 50,90,99)")
    group.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS", help="objectives of a good request: ttft, tpot, e2el, such as ttft:200"
    )
    group.add_argument("--output-json", metavar="FILE", help="write the figures to a file")
    group.add_argument(
        "--processes", type=human_int, metavar="N", help="that share the engines; 0 for none but this one (default: one a core)"
    )


def run(args: argparse.Namespace) -> int:
    """The command. Returns 1 if no request ended."""
    percentiles = parse_percentiles(args.metric_percentiles)
    goodput = parse_goodput(args.goodput or ())
    for flag in ("engines", "api_server_count", "tensor_parallel_size"):
        check_at_least("--" + flag.replace("_", "-"), getattr(args, flag), 1)
    for flag in ("host_time", "request_time", "restart_after"):
        if getattr(args, flag) is not None and not 0 <= getattr(args, flag) < float("inf"):
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 0 and finite, got {getattr(args, flag)}")
    kills = [_parse_kill(text) for text in args.kill]
    workload = make_workload(args)
    spec, step_time = make_engine(args)
    if args.write_trace is not None:
        write_trace(args.write_trace, workload, args.trace_chunk_hash_size)
    begin = time.perf_counter()
    result = simulate(
        workload,
        spec,
        step_time,
        num_engines=args.engines,
        num_front_ends=args.api_server_count,
        request_time=args.request_time,
        kills=kills,
        restart_after=args.restart_after,
        num_processes=_num_processes(args, len(workload)),
    )
    elapsed = time.perf_counter() - begin
    figures = summarize(workload, result, percentiles, goodput) | {"wall_time": elapsed, "seed": args.seed}
    if args.trace is None:
        figures["request_rate"] = _rate(args)
    print(_headline(args, spec, workload))
    print(serving_table(figures, percentiles).replace(" Serving Benchmark Result ", " Simulated Serving Result "))
    print(engine_table(result, figures["duration"]))
    if figures["deaths"]:
        print(death_table(figures))
    if figures["without_engine"]:
        print(f"{figures['without_engine']} requests found no engine alive")
    print(f"Simulated {figures['duration']:.0f} s and {figures['steps']} steps in {elapsed:.1f} s")
    if args.output_json is not None:
        write_json(Path(args.output_json), figures)
    return 0 if figures["completed"] else 1


def make_workload(args: argparse.Namespace) -> Workload:
    """The requests that the flags describe. Raises ValueError naming the flag."""
    if args.trace is not None:
        if args.trace_chunk_hash_size < 1 or not 0 < args.trace_sec_multiplier < float("inf"):
            raise ValueError(
                "--trace-chunk-hash-size must be at least 1 and --trace-sec-multiplier above 0, "
                f"got {args.trace_chunk_hash_size} and {args.trace_sec_multiplier}"
            )
        if args.request_rate is not None:
            raise ValueError(f"--trace has its own times and excludes --request-rate, got {args.request_rate}")
        return load_trace(args.trace, args.requests, args.trace_chunk_hash_size, args.trace_sec_multiplier)
    return sample(
        1000 if args.requests is None else args.requests,
        _rate(args),
        args.seed,
        input_len=args.input_len,
        output_len=args.output_len,
        ratios=args.range_ratio,
        num_prefixes=args.num_prefixes,
        prefix_len=args.prefix_len,
        burstiness=args.burstiness,
    )


def make_engine(args: argparse.Namespace) -> tuple[EngineSpec, StepTime]:
    """What each engine is, and its step times. Raises ValueError naming the flag."""
    step_table = StepTable.load(args.step_table) if args.step_table is not None else None
    about = {} if step_table is None else step_table.about

    def limit(name: str, default: int) -> int:
        given = getattr(args, name)
        return int(about.get(name, default)) if given is None else given

    scheduler = SchedulerConfig(
        max_num_seqs=limit("max_num_seqs", 256),
        max_num_batched_tokens=limit("max_num_batched_tokens", 2048),
        max_model_len=limit("max_model_len", 8192),
        async_scheduling=args.async_scheduling,
    )
    block_size = limit("block_size", 32)
    cache = CacheConfig(
        block_size=block_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=args.enable_prefix_caching,
    )
    if step_table is not None:
        num_blocks = limit("num_gpu_blocks_override", 1 + 256 * scheduler.max_model_len // block_size)
        groups = make_kv_cache_groups([KVCacheSpec(block_size, 1, 2, 2)])
        return EngineSpec(scheduler, cache, KVCacheConfig(num_blocks, groups), args.host_time), step_table
    model, device, ranks = model_shape(args.model_shape), DEVICES[args.device], args.tensor_parallel_size
    step_time = Roofline(device, model, args.dtype, ranks, Buckets(scheduler.max_num_seqs, scheduler.max_num_batched_tokens))
    num_blocks = args.num_gpu_blocks_override
    if num_blocks is None:
        num_blocks = num_kv_blocks(device, model, args.dtype, ranks, block_size, args.gpu_memory_utilization)
    layer = KVCacheSpec(block_size, model.num_kv_heads, model.head_dim, 2)
    groups = make_kv_cache_groups([layer] * model.num_layers)
    return EngineSpec(scheduler, cache, KVCacheConfig(num_blocks, groups), args.host_time), step_time


def _rate(args: argparse.Namespace) -> float:
    return DEFAULT_RATE * args.engines if args.request_rate is None else args.request_rate


def _num_processes(args: argparse.Namespace, num_requests: int) -> int:
    if args.processes is not None:
        check_at_least("--processes", args.processes, 0)
        return args.processes
    if args.engines == 1 or num_requests < MIN_REQUESTS_FOR_PROCESSES:
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parse_kill(text: str) -> Kill:
    engine, _, seconds = text.partition("@")
    try:
        return Kill(int(engine), float(seconds))
    except ValueError:
        raise ValueError(f"--kill takes ENGINE@SECONDS, such as 3@12.5, got {text!r}") from None


def _headline(args: argparse.Namespace, spec: EngineSpec, workload: Workload) -> str:
    what = f"step times of {args.step_table}"
    if args.step_table is None:
        ranks = "" if args.tensor_parallel_size == 1 else f"{args.tensor_parallel_size} x "
        what = f"{args.model_shape}, {args.dtype}, on {ranks}{args.device} by the roofline model"
    return (
        f"{args.engines} engines ({what}; {spec.scheduler.max_num_seqs} requests, {spec.scheduler.max_num_batched_tokens} tokens "
        f"a step, {spec.kv_cache.num_blocks} blocks of {spec.cache.block_size})\n"
        f"{len(workload)} requests of {workload.prompt_lens.mean():.0f} + {workload.output_lens.mean():.0f} tokens on average"
    )
