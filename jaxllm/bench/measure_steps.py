"""`measure-steps`: how long the engine's steps take on this machine, by bucket; a table for `simulate`."""

import argparse
import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxllm.bench.report import write_json
from jaxllm.bench.sim.step_time import StepTable
from jaxllm.config import EngineConfig
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.core.types import EngineCoreRequest
from jaxllm.engine.cli_args import add_engine_args, engine_args_of, human_int
from jaxllm.engine.core import EngineCore
from jaxllm.executor.abstract import StepHandle
from jaxllm.executor.uniproc import UniProcExecutor
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker.buckets import Buckets


def add_measure_steps_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-json", required=True, metavar="FILE", help="where the table goes")
    parser.add_argument("--repeats", type=human_int, default=8, metavar="N", help="steps of each kind (default: 8)")
    parser.add_argument(
        "--max-context",
        type=human_int,
        default=2048,
        metavar="N",
        help="most tokens of all contexts of a decode step (default: 2048)",
    )
    add_engine_args(parser)


def run(args: argparse.Namespace) -> int:
    """The command."""
    for flag in ("repeats", "max_context"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, got {getattr(args, flag)}")
    config = engine_args_of(args).create_engine_config("server")
    table = measure_step_table(config, args.repeats, args.max_context)
    for kind, rows in (("decode", table.decode), ("mixed", table.mixed)):
        for size, (base, context, pair) in rows.items():
            each = f"{1e6 * context:.3f} us a context token" if kind == "decode" else f"{1e6 * pair:.4f} us a query-key pair"
            print(f"{kind} {size}: {1000 * base:.2f} ms and {each}")
    write_json(Path(args.output_json), table.to_json())
    return 0


@dataclass(frozen=True)
class StepSample:
    """One step that was run; see StepTime for the numbers."""

    num_tokens: int
    num_rows: int
    num_context_tokens: int
    num_pairs: int
    seconds: float


class _TimedHandle:
    def __init__(self, executor: "_TimedExecutor", handle: StepHandle, size: tuple[int, int, int, int]) -> None:
        self._executor, self._handle, self._size = executor, handle, size
        self._start = time.perf_counter()

    def result(self) -> ModelRunnerOutput:
        output = self._handle.result()
        end = time.perf_counter()
        if self._size[0]:
            # A step that was dispatched while another one ran began when that one ended.
            self._executor.samples.append(StepSample(*self._size, end - max(self._start, self._executor.last_end)))
        self._executor.last_end = end
        return output


class _TimedExecutor(UniProcExecutor):
    """Notes how large each step is and how long it takes."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.samples: list[StepSample] = []
        self.last_end = 0.0
        self._computed: dict[str, int] = {}

    def start_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        for new in scheduler_output.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        self._computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        counts = scheduler_output.num_scheduled_tokens
        context = sum(self._computed[request_id] + count for request_id, count in counts.items())
        pairs = sum(self._computed[request_id] * count + count * (count + 1) // 2 for request_id, count in counts.items())
        size = (scheduler_output.total_num_scheduled_tokens, len(counts), context, pairs)
        return _TimedHandle(self, super().start_model(scheduler_output), size)


def measure_step_table(config: EngineConfig, repeats: int, max_context: int) -> StepTable:
    """Run the engine at every decode size with short and long contexts, and prompts of every mixed size and longer.

    Args:
        max_context: most context tokens of a decode step, summed over its requests.
    """
    # A step whose bucket is not compiled yet would be timed as one of a larger bucket.
    core = EngineCore(dataclasses.replace(config, background_compilation=False), _TimedExecutor, log_stats=False)
    executor = core.executor
    assert isinstance(executor, _TimedExecutor)
    try:
        limits, longest = config.scheduler, config.model.max_model_len
        buckets = Buckets(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            decode_sizes=config.cudagraph_capture_sizes,
            mixed_sizes=config.compile_sizes,
        )
        rng = np.random.default_rng(0)
        vocab = config.model.decoder.vocab_size

        def generate(count: int, prompt_len: int, output_len: int) -> None:
            for _ in range(count):
                prompt = rng.integers(vocab, size=prompt_len).tolist()
                params = SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0.0)
                core.add_request(core.make_request(EngineCoreRequest(f"measure-{rng.integers(1 << 62)}", prompt, params)))
            while core.has_work():
                core.step()

        most = max(1, longest - repeats - 1)
        for bucket in buckets.decode:
            # The step after the prompts, and the last one, may not be full.
            for context in {min(8, most), max(min(8, most), min(max_context // bucket.num_rows, most))}:
                generate(bucket.num_rows, context, repeats + 2)
        for bucket in buckets.mixed:
            length = min(bucket.num_tokens, longest - 2)
            for _ in range(max(1, repeats // 2)):
                generate(1, length, 2)
        generate(1, min(4 * limits.max_num_batched_tokens, longest - 2), 2)
        table = fit(executor.samples, buckets)
    finally:
        executor.shutdown()
    about = {
        "model": config.model.model,
        "dtype": config.model.dtype,
        "max_model_len": longest,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "block_size": config.cache.block_size,
        "num_gpu_blocks_override": core.kv_cache_config.num_blocks,
    }
    return StepTable(table[0], table[1], about)


def fit(samples: Iterable[StepSample], buckets: Buckets) -> tuple[dict[int, tuple[float, float, float]], ...]:
    """Least squares: a base for each bucket, one slope for all decode buckets (by context), one for all mixed ones (by pairs).

    Steps whose contexts are within 64 tokens a row of each other count once, with their median.

    Returns:
        Decode and mixed rows of a StepTable.

    Raises:
        ValueError: if there is no sample of some kind.
    """
    groups: dict[tuple[bool, int, int], list[tuple[int, float]]] = defaultdict(list)
    for sample in samples:
        counts = np.ones(sample.num_rows, np.int64)
        counts[0] += sample.num_tokens - sample.num_rows
        bucket = buckets.choose(counts)
        amount = sample.num_context_tokens if bucket.decode_only else sample.num_pairs
        near = sample.num_context_tokens // (64 * sample.num_rows)
        groups[bucket.decode_only, bucket.num_tokens, near].append((amount, sample.seconds))
    return tuple(_fit_kind(groups, decode) for decode in (True, False))


def _fit_kind(
    groups: dict[tuple[bool, int, int], list[tuple[int, float]]], decode: bool
) -> dict[int, tuple[float, float, float]]:
    points = [
        (size, statistics.median(amount for amount, _ in found), statistics.median(seconds for _, seconds in found))
        for (kind, size, _), found in groups.items()
        if kind == decode
    ]
    if not points:
        raise ValueError(f"no {'decode' if decode else 'mixed'} step was measured")
    sizes = sorted({size for size, _, _ in points})
    amounts, seconds = (np.array([point[column] for point in points], np.float64) for column in (1, 2))
    is_of = np.array([[size == own for own in sizes] for size, _, _ in points], np.float64)
    means = is_of / is_of.sum(axis=0)
    # The slope is what is left within each bucket; it cannot be negative.
    amount_off, seconds_off = amounts - is_of @ (means.T @ amounts), seconds - is_of @ (means.T @ seconds)
    spread = float(amount_off @ amount_off)
    slope = max(0.0, float(amount_off @ seconds_off) / spread) if spread else 0.0
    bases = means.T @ (seconds - slope * amounts)
    return {
        size: (max(float(base), 1e-9), slope if decode else 0.0, 0.0 if decode else slope)
        for size, base in zip(sizes, bases, strict=True)
    }
