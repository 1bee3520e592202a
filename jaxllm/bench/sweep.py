"""`sweep`: a load test at each point of a grid, the best point within given objectives, and where throughput stops paying."""

import argparse
import asyncio
import itertools
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxllm.bench import plots
from jaxllm.bench.measure import DETAILS, Target, find_target, make_requests, measure
from jaxllm.bench.metrics import Objective, parse_percentiles, percentile_word
from jaxllm.bench.report import make_result_directory, parse_pairs, result_path, table, write_json
from jaxllm.bench.serve_args import add_result_args, add_target_args, add_traffic_args, check_args, make_client
from jaxllm.bench.servers import free_port, running_server
from jaxllm.engine.cli_args import human_int

ENGINE_AXES = ("max_num_seqs", "max_num_batched_tokens")
LOAD_AXES = ("request_rate", "max_concurrency")
_COLUMNS = {
    "request_throughput": "req/s",
    "output_throughput": "out tok/s",
    "total_token_throughput": "total tok/s",
    "mean_concurrent_requests": "concurrent",
    "median_ttft_ms": "TTFT ms",
    "mean_itl_ms": "ITL ms",
    "median_tpot_ms": "TPOT ms",
}
# Height of the knee above the diagonal, below which measurements' noise would decide.
_MIN_BEND = 0.1
_PLACEHOLDERS = ("port", *ENGINE_AXES)

Point = dict[str, Any]


def add_sweep_args(parser: argparse.ArgumentParser) -> None:
    grid = parser.add_argument_group("grid", "each value with each of the others")
    grid.add_argument("--request-rate", default="inf", metavar="R,…", help="requests a second (default: inf)")
    grid.add_argument("--max-concurrency", metavar="N,…", help="most requests under way")
    for name in ENGINE_AXES:
        grid.add_argument("--" + name.replace("_", "-"), metavar="N,…", help="start a server for each")
    grid.add_argument(
        "--serve-cmd",
        metavar="COMMAND",
        help="how to start one; {port}, {max_num_seqs} and {max_num_batched_tokens} are replaced (default: jaxllm.serve)",
    )
    grid.add_argument("--serve-args", default="", metavar="FLAGS", help="more flags for jaxllm.serve")
    grid.add_argument(
        "--server-timeout", type=float, default=900.0, metavar="S", help="seconds a server has to start (default: 900)"
    )
    grid.add_argument(
        "--slo",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="what a point must keep: p99_ttft:500, mean_itl:30, e2el:9000 (of the 99th percentile)",
    )
    add_target_args(parser)
    add_traffic_args(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--result-filename", metavar="FILE", help="(default: LABEL-sweep-MODEL-DATE.json)")
    results.add_argument("--plot", metavar="FILE", help="latency, and throughput against ITL (default: beside the JSON file)")
    results.add_argument("--no-plot", action="store_true", help="draw nothing")
    add_result_args(results)


def run(args: argparse.Namespace) -> int:
    """The command. Returns 1 if no point keeps the objectives."""
    objectives = [Objective.parse(pair) for pair in args.slo]
    if args.ramp_up_strategy is not None or args.dataset_name == "timed_trace":
        raise ValueError("a sweep has one rate a point: --ramp-up-strategy and timed traces are for serve")
    check_args(args)
    parse_percentiles(args.metric_percentiles)
    metadata = parse_pairs("--metadata", args.metadata)
    if args.plot is not None:
        plots.require_plots(args.plot)
    grid = Grid(args)
    if grid.starts_servers and args.base_url is not None:
        raise ValueError(f"servers are started for this grid, so it takes no --base-url, got {args.base_url!r}")
    make_result_directory(args.result_dir, args.result_filename)
    points, target = asyncio.run(_run(args, grid, objectives))
    return _report(args, points, target, grid.varying, objectives, metadata)


class Grid:
    """The values of each axis.

    Attributes:
        starts_servers: whether the engine has to be started anew for some of them.
        varying: axes with more than one value; request_rate if there is none.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.axes: dict[str, list[Any]] = {
            "max_num_seqs": _integers("--max-num-seqs", args.max_num_seqs),
            "max_num_batched_tokens": _integers("--max-num-batched-tokens", args.max_num_batched_tokens),
            "request_rate": _rates(args.request_rate),
            "max_concurrency": _integers("--max-concurrency", args.max_concurrency),
        }
        self.starts_servers = any(self.axes[name] != [None] for name in ENGINE_AXES) or args.serve_cmd is not None
        self.varying = [name for name, values in self.axes.items() if len(values) > 1] or ["request_rate"]

    def engines(self) -> list[dict[str, int | None]]:
        return self._product(ENGINE_AXES)

    def loads(self) -> list[dict[str, Any]]:
        return self._product(LOAD_AXES)

    def _product(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*(self.axes[name] for name in names))]


def _integers(flag: str, text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    try:
        values = [human_int(part.strip()) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{flag}: {error}") from error
    if min(values) < 1:
        raise ValueError(f"{flag} must be at least 1, got {text!r}")
    return list(dict.fromkeys(values))


def _rates(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--request-rate must be numbers separated by commas, got {text!r}") from None
    if not all(value > 0 for value in values):
        raise ValueError(f"--request-rate must be above 0, got {text!r}")
    return list(dict.fromkeys(values))


def server_command(args: argparse.Namespace, engine: Mapping[str, int | None], port: int) -> list[str]:
    """How to start a server at a point of the grid.

    Raises:
        ValueError: for a placeholder that the grid has no value for.
    """
    values = {"port": port, **{name: value for name, value in engine.items() if value is not None}}
    if args.serve_cmd is None:
        command = [sys.executable, "-m", "jaxllm.serve", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model", args.model] if args.model else []
        for name in ENGINE_AXES:
            command += [f"--{name.replace('_', '-')}", str(values[name])] if name in values else []
        return command + shlex.split(args.serve_args)
    if args.serve_args:
        raise ValueError("--serve-args is for jaxllm.serve; put the flags into --serve-cmd")
    words = []
    for word in shlex.split(args.serve_cmd):
        for name in _PLACEHOLDERS:
            if "{" + name + "}" in word and name not in values:
                raise ValueError(f"--serve-cmd has {{{name}}}, but the grid has no --{name.replace('_', '-')}")
            word = word.replace("{" + name + "}", str(values.get(name)))
        words.append(word)
    return words


async def _run(args: argparse.Namespace, grid: Grid, objectives: Sequence[Objective]) -> tuple[list[Point], Target]:
    task = asyncio.current_task()
    assert task is not None
    # So that servers started here are ended here.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    points: list[Point] = []
    target = None
    for engine in grid.engines():
        async with AsyncExitStack() as stack:
            port = free_port() if grid.starts_servers else None
            client = await stack.enter_async_context(make_client(args, None if port is None else f"http://127.0.0.1:{port}"))
            if port is not None:
                command = server_command(args, engine, port)
                print("Starting", shlex.join(command), flush=True)
                await stack.enter_async_context(running_server(command, client, args.server_timeout))
            target = target or await find_target(client, args)
            for load in grid.loads():
                # Other prompts at each point, and an empty cache if the server lets us: no point profits from the last one.
                seed = args.seed + len(points)
                await client.post("/reset_prefix_cache")
                done = await measure(
                    client,
                    args,
                    target,
                    make_requests(args, target, seed),
                    load["request_rate"],
                    load["max_concurrency"],
                    seed,
                    ["ttft", "tpot", "itl", *(objective.latency for objective in objectives)],
                    [objective.percentile for objective in objectives if objective.percentile is not None],
                )
                point = {**engine, **{name: value for name, value in done.result.items() if name not in DETAILS}}
                point["within_slo"] = within(point, objectives)
                points.append(point)
                print(_line(point, grid.varying), flush=True)
    assert target is not None
    return points, target


def within(point: Point, objectives: Sequence[Objective]) -> bool:
    """Whether a point keeps all objectives. One where a request failed does not."""
    return point["completed"] > 0 and point["failed"] == 0 and all(objective.met_by(point) for objective in objectives)


def best_point(points: Sequence[Point]) -> Point | None:
    """The highest output throughput among those within the objectives."""
    return max((point for point in points if point["within_slo"]), key=lambda point: point["output_throughput"], default=None)


def find_knee(points: Sequence[Point]) -> Point | None:
    """Where more load begins to cost more inter-token latency than it brings throughput.

    With mean ITL and output throughput both scaled to [0, 1], the point that is highest above the diagonal (Satopää et al.,
    "Finding a Kneedle in a Haystack", 2011). The requests under way there are B_sat, the batch that saturates the device.

    Returns:
        None with fewer than three points, or if the curve does not bend: if no point is `_MIN_BEND` above.
    """
    done = [point for point in points if point["completed"]]
    if len(done) < 3:
        return None
    xs, ys = ([point[name] for point in done] for name in ("mean_itl_ms", "output_throughput"))
    if max(xs) == min(xs) or max(ys) == min(ys):
        return None
    above = [(y - min(ys)) / (max(ys) - min(ys)) - (x - min(xs)) / (max(xs) - min(xs)) for x, y in zip(xs, ys, strict=True)]
    highest = max(range(len(done)), key=above.__getitem__)
    return done[highest] if above[highest] >= _MIN_BEND else None


def label_of(point: Point, axes: Sequence[str]) -> str:
    """Where a point is: its values of these axes."""
    return ", ".join(
        "-" if point[name] is None else f"{point[name]:g}" if isinstance(point[name], float) else str(point[name])
        for name in axes
    )


def _line(point: Point, axes: Sequence[str]) -> str:
    figures = f"{point['output_throughput']:.1f} output tok/s, mean ITL {point['mean_itl_ms']:.2f} ms"
    return f"{', '.join(axes)} = {label_of(point, axes)}: {figures}" + (f", {point['failed']} failed" if point["failed"] else "")


def _report(
    args: argparse.Namespace,
    points: list[Point],
    target: Target,
    axes: Sequence[str],
    objectives: Sequence[Objective],
    metadata: Mapping[str, str],
) -> int:
    best, knee = best_point(points), find_knee(points)
    fields = {objective.field: objective.field for objective in objectives} | _COLUMNS
    print(
        table(
            [*(axis.replace("_", " ") for axis in axes), *fields.values(), "failed", "within SLOs"],
            [
                [*(point[axis] for axis in axes), *(point[f] for f in fields), point["failed"], point["within_slo"]]
                for point in points
            ],
        )
    )
    wanted = f" within {' '.join(args.slo)}" if args.slo else ""
    print(
        f"Best{wanted}: "
        + (
            "none"
            if best is None
            else f"{', '.join(axes)} = {label_of(best, axes)}: {best['output_throughput']:.2f} output tok/s"
        )
    )
    if knee is not None:
        print(
            f"Knee: {', '.join(axes)} = {label_of(knee, axes)}: {knee['output_throughput']:.2f} output tok/s at a mean ITL of "
            f"{knee['mean_itl_ms']:.2f} ms; B_sat ≈ {knee['mean_concurrent_requests']:.1f} requests under way"
        )
    else:
        print("Knee: none in this grid")
    now = datetime.now()
    path = result_path(
        args.result_dir, args.result_filename, f"{args.label or args.backend}-sweep-{Path(target.model_id).name}", now
    )
    result = {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "backend": args.backend,
        "label": args.label,
        "model_id": target.model_id,
        "tokenizer_id": target.tokenizer_id,
        "num_prompts": args.num_prompts,
        **metadata,
        "axes": list(axes),
        "slo": args.slo,
        "best": None if best is None else points.index(best),
        "knee": None if knee is None else points.index(knee),
        "b_sat": None if knee is None else knee["mean_concurrent_requests"],
        "points": points,
    }
    write_json(path, result)
    print(f"Result: {path}")
    _draw(args, path, points, target, axes, objectives, best, knee)
    return 0 if best is not None else 1


def _draw(
    args: argparse.Namespace,
    path: Path,
    points: Sequence[Point],
    target: Target,
    axes: Sequence[str],
    objectives: Sequence[Objective],
    best: Point | None,
    knee: Point | None,
) -> None:
    if args.no_plot:
        return
    if not plots.can_plot():
        print(f"Plot: none, since matplotlib is not installed ({plots.INSTALL})")
        return
    picture = Path(args.plot) if args.plot is not None else path.with_suffix(".png")
    word = percentile_word(parse_percentiles(args.metric_percentiles)[-1])
    fields = ["median_ttft_ms", f"p{word}_ttft_ms", "mean_itl_ms", f"p{word}_itl_ms", *(o.field for o in objectives)]
    plots.plot_sweep(
        picture,
        points,
        labels=[label_of(point, axes) for point in points],
        axis=", ".join(axes).replace("_", " "),
        fields=list(dict.fromkeys(fields)),
        knee=knee,
        best=best,
        title=f"{target.model_id}: {args.num_prompts} requests a point",
    )
    print(f"Plot: {picture}")
