"""`startup`: how long a fresh process takes until its first token, with an empty compilation cache and with a filled one."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.bench.report import table, write_json
from jaxllm.engine.cli_args import ArgumentParser, add_engine_args, engine_args_of, human_int

# In the order in which they happen; what lies between them is "other".
PHASES = {
    "python": "start the interpreter",
    "imports": "import jaxllm and jax",
    "config": "find the model, check the configuration",
    "tokenizer": "load the tokenizer",
    "init_device": "start jax and its devices",
    "build_model": "build the model without its weights",
    "load_weights": "put the weights on the devices, beside the next two",
    "determine_available_memory": "size the KV cache: needs the largest step",
    "compile_first": "compile the steps, or load them from disk; the largest if the others follow in the background",
    "init_kv_cache": "allocate the KV cache",
    "compile_and_warm_up": "first runs, and compile what is not part of a step",
    "other": "the rest",
    "first_token": "generate one token",
    "all_programs": "until the programs compiled in the background are there too, after the first token",
}
WORKER_PHASES = (
    "init_device", "build_model", "load_weights", "determine_available_memory", "compile_first", "init_kv_cache",
    "compile_and_warm_up",
)  # fmt: skip
# What happens at the same time as other phases, and what after the engine is ready.
_BESIDE, _AFTER = ("load_weights",), ("first_token", "all_programs")
_LOG_LINES = 20


def add_startup_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-iters-cold", type=human_int, default=1, metavar="N", help="starts with an empty cache (default: 1)"
    )
    parser.add_argument("--num-iters-warm", type=human_int, default=3, metavar="N", help="starts with a filled one (default: 3)")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures to a file")
    add_engine_args(parser)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """The command.

    Args:
        argv: its flags as they were given; those of the engine are handed to each process.
    """
    if args.num_iters_cold < 0 or args.num_iters_warm < 0 or not args.num_iters_cold + args.num_iters_warm:
        raise ValueError(
            "--num-iters-cold and --num-iters-warm must not be negative nor both 0, "
            f"got {args.num_iters_cold} and {args.num_iters_warm}"
        )
    if args.compilation_cache_dir == "":
        raise ValueError("--compilation-cache-dir must name a folder here, got ''")
    engine_args_of(args).create_engine_config()  # what is wrong is said before a process is started
    flags = engine_flags(argv)
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="jaxllm-startup-") as folder:
        caches = [str(Path(folder) / f"cold-{i}") for i in range(args.num_iters_cold)]
        runs["cold"] = [start_once(flags, cache) for cache in caches]
        if args.num_iters_warm:
            filled = args.compilation_cache_dir or (caches[0] if caches else str(Path(folder) / "warm"))
            if filled not in caches:
                start_once(flags, filled)
            runs["warm"] = [start_once(flags, filled) for _ in range(args.num_iters_warm)]
    result = {kind: {phase: float(np.median([run[phase] for run in of])) for phase in of[0]} for kind, of in runs.items() if of}
    print(startup_table(result))
    if args.output_json is not None:
        write_json(Path(args.output_json), result | {"runs": runs})
    return 0


def startup_table(result: Mapping[str, Mapping[str, float]]) -> str:
    """Seconds of each phase, medians over the runs, a column for each kind of cache."""
    kinds = list(result)
    rows: list[list[Any]] = [[phase, *(result[kind][phase] for kind in kinds), meaning] for phase, meaning in PHASES.items()]
    rows.append(["ready", *(result[kind]["ready"] for kind in kinds), "from the start of the process, before the first token"])
    return table(["seconds", *kinds, ""], rows, left=("seconds", ""))


def engine_flags(argv: Sequence[str]) -> list[str]:
    """The flags without this command's own and without the cache, which each process gets by itself."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--num-iters-cold", "--num-iters-warm", "--output-json", "--compilation-cache-dir"):
        parser.add_argument(flag)
    return parser.parse_known_args(argv)[1]


def start_once(flags: Sequence[str], cache: str) -> dict[str, float]:
    """Start an engine in a process of its own.

    Returns:
        Seconds by phase, and "ready": from the start of the process until it could take requests.

    Raises:
        ValueError: with the end of its log, if it fails.
    """
    command = [sys.executable, "-m", "jaxllm.bench.startup", repr(time.time()), *flags, "--compilation-cache-dir", cache]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ValueError(f"the engine did not start (exit code {done.returncode}):\n" + _tail(done.stderr))
    return json.loads(done.stdout.splitlines()[-1])


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_LOG_LINES:])


def measure_here(argv: Sequence[str], started: float) -> dict[str, float]:
    """Start an engine in this process, and time it.

    Args:
        argv: flags of the engine.
        started: `time.time()` at which the process was started.
    """
    clock = _Clock(started)
    clock.note("python")
    from jaxllm.engine.llm_engine import LLMEngine
    from jaxllm.executor.uniproc import UniProcExecutor
    from jaxllm.sampling_params import SamplingParams
    from jaxllm.tokenizer import load_tokenizer

    clock.note("imports")
    parser = ArgumentParser()
    add_engine_args(parser)
    args = engine_args_of(parser.parse_args(argv))
    config = args.create_engine_config()
    clock.note("config")
    # A revision is the model's own.
    name, revision = (args.model, args.revision) if args.tokenizer is None else (args.tokenizer, None)
    tokenizer = None if args.skip_tokenizer_init else load_tokenizer(name, revision=revision, download_dir=args.download_dir)
    clock.note("tokenizer")

    class TimedExecutor(UniProcExecutor):
        """Its worker's steps towards readiness are timed, whatever their order."""

        def initialize(self) -> Any:
            for phase in WORKER_PHASES:
                setattr(self.worker, phase, clock.timed(phase, getattr(self.worker, phase)))
            return super().initialize()

    engine = LLMEngine(config, tokenizer, TimedExecutor)
    ready = time.time() - started
    begin = time.perf_counter()
    engine.add_request("first", {"prompt_token_ids": [1]}, SamplingParams(max_tokens=1, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    clock.seconds["first_token"] = time.perf_counter() - begin
    begin = time.perf_counter()
    engine.collective_rpc("finish_compilation")
    clock.seconds["all_programs"] = time.perf_counter() - begin
    engine.shutdown()
    known = sum(seconds for phase, seconds in clock.seconds.items() if phase not in (*_BESIDE, *_AFTER))
    found = clock.seconds | {"other": ready - known, "ready": ready}
    return {name: found[name] for name in (*PHASES, "ready")}


class _Clock:
    """Seconds of each phase."""

    def __init__(self, started: float) -> None:
        self.last = started
        self.seconds: dict[str, float] = {}

    def note(self, phase: str) -> None:
        """A phase that has lasted since the last note."""
        now = time.time()
        self.seconds[phase], self.last = now - self.last, now

    def timed(self, phase: str, function: Any) -> Any:
        """The function, and how long its call takes."""

        def call() -> Any:
            begin = time.perf_counter()
            try:
                return function()
            finally:
                # The first call counts: what is called again finds its work done.
                self.seconds.setdefault(phase, time.perf_counter() - begin)

        return call


if __name__ == "__main__":
    print(json.dumps(measure_here(sys.argv[2:], started=float(sys.argv[1]))))
