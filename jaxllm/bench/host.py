"""`host`: what the host does in a step, at many numbers of running requests, with a device that costs nothing."""

import argparse
import dataclasses
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.bench.host_peer import peer_table, start_peer
from jaxllm.bench.report import table, write_json
from jaxllm.config import EngineConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec
from jaxllm.core.output import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput, SchedulerOutput, WorkerStepStats
from jaxllm.engine.cli_args import add_engine_args, engine_args_of, human_int
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.metrics import IterationStats
from jaxllm.executor.abstract import Executor, FinishedStep, StepHandle
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

SIZES = (1, 4, 16, 64, 256, 1024)
PARTS = ("schedule", "pack", "read", "update", "output", "total", "cpu")
# Ordinary text, of which the requests' outputs are made, so that detokenization has ordinary work.
_TEXT = "The quick brown fox jumps over the lazy dog, and nobody in the village by the sea was surprised to see it there. "


def add_host_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=human_int, nargs="+", default=list(SIZES), metavar="N", help="requests at once")
    parser.add_argument("--num-steps", type=human_int, default=200, metavar="N", help="steps of each size (default: 200)")
    parser.add_argument("--input-len", type=human_int, default=128, metavar="N", help="tokens of a prompt (default: 128)")
    parser.add_argument(
        "--peer", metavar="PYTHON", help="an interpreter that has vLLM, whose scheduler and output processor are measured too"
    )
    parser.add_argument("--output-json", metavar="FILE", help="write the figures to a file")
    add_engine_args(parser)


def run(args: argparse.Namespace) -> int:
    """The command."""
    for flag, values in (("sizes", args.sizes), ("num-steps", [args.num_steps]), ("input-len", [args.input_len])):
        if min(values) < 1:
            raise ValueError(f"--{flag} must be at least 1, got {min(values)}")
    if args.num_decode_steps > 1:
        raise ValueError(f"--num-decode-steps must be 1 here, got {args.num_decode_steps}: what is measured is one decode")
    engine_args = dataclasses.replace(engine_args_of(args), load_format="dummy")
    tokenizer = engine_args.load_tokenizer()
    ids = [1] if tokenizer is None else tokenizer.encode(_TEXT, add_special_tokens=False)
    results, peer_results = {}, {}
    with ExitStack() as stack:
        peer = None
        if args.peer is not None:
            longest = max(args.input_len + _num_output_tokens(size, args.num_steps, args.input_len) for size in args.sizes)
            model = engine_args.create_engine_config().model.decoder
            peer = stack.enter_context(start_peer(args.peer, model, longest, tokenizer))
        for size in args.sizes:
            length = args.input_len + _num_output_tokens(size, args.num_steps, args.input_len)
            num_blocks = size * -(-length // engine_args.block_size) + 2
            config = dataclasses.replace(
                engine_args, max_num_seqs=size, max_num_batched_tokens=size + _PREFILL_TOKENS, max_model_len=length,
                num_gpu_blocks_override=num_blocks,
            ).create_engine_config()  # fmt: skip
            results[size] = measure(config, tokenizer, size, args.num_steps, args.input_len, ids)
            if peer is not None:
                peer_results[size] = peer.measure(
                    {
                        "prompts": list(_prompts(config.model.decoder.vocab_size, size, args.input_len)),
                        "output_ids": ids,
                        "max_tokens": length - args.input_len,
                        "num_steps": args.num_steps,
                        "num_warm_up_steps": _WARM_UP_STEPS,
                        "max_model_len": length,
                        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
                        "block_size": config.cache.block_size,
                        "num_blocks": num_blocks,
                        "detokenize": tokenizer is not None,
                    }
                )
    print(host_table(results))
    if peer is not None:
        print(peer_table(results, peer_results, peer.name))
    if args.output_json is not None:
        write_json(Path(args.output_json), {**results, "peer": peer_results} if peer_results else results)
    return 0


_WARM_UP_STEPS = 20
_PREFILL_TOKENS = 8192


def _num_output_tokens(num_requests: int, num_steps: int, input_len: int) -> int:
    """So many that the first request still runs in the last step: it gives tokens while the others are prefilled."""
    return num_steps + _WARM_UP_STEPS + -(-num_requests * input_len // _PREFILL_TOKENS) + 2


def _prompts(vocab_size: int, num_requests: int, input_len: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(0)
    return (rng.integers(0, vocab_size, input_len).tolist() for _ in range(num_requests))


def host_table(results: Mapping[int, Mapping[str, float]]) -> str:
    """A row for each number of requests, medians of milliseconds; the last column is microseconds a request."""
    rows = [[size, *(f"{result[part]:.3f}" for part in PARTS), result["total"] * 1e3 / size] for size, result in results.items()]
    return table(["requests", *(f"{part} ms" for part in PARTS), "us/request"], rows)


def measure(
    config: EngineConfig, tokenizer: Any, num_requests: int, num_steps: int, input_len: int, output_ids: Sequence[int]
) -> dict[str, float]:
    """Decode steps of an engine on a null device.

    Args:
        config: takes `num_requests` at once.
        output_ids: what every request "samples", again and again.

    Returns:
        Milliseconds, medians of the steps: schedule; pack (rows, bucket, the packed batch); read (the ids as the scheduler wants
        them); update (of the scheduler); output (detokenization, statistics, outputs of delta streams); total, with what lies
        between these; and cpu, the thread's own time of it, which others on the machine do not change.
    """
    engine = LLMEngine(config, tokenizer, null_executor(output_ids))
    params = SamplingParams(
        temperature=0,
        max_tokens=_num_output_tokens(num_requests, num_steps, input_len),
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        detokenize=tokenizer is not None,
    )
    for i, prompt in enumerate(_prompts(config.model.decoder.vocab_size, num_requests, input_len)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    steps: list[dict[str, float]] = []
    while len(steps) < num_steps + _WARM_UP_STEPS:
        figures = _step(engine)
        if figures is not None and figures.pop("outputs") == num_requests:
            steps.append(figures)
        assert engine.has_unfinished_requests(), "the requests ended before the steps were timed"
        if len(steps) == _WARM_UP_STEPS:
            gc.collect()
            gc.freeze()  # as an engine core's process does
    gc.unfreeze()
    engine.shutdown()
    steps = steps[_WARM_UP_STEPS:]
    return {part: float(np.median([step[part] for step in steps])) * 1e3 for part in PARTS}


def _step(engine: LLMEngine) -> dict[str, float] | None:
    """What LLMEngine.step does, in seconds by part; None for a step that only fills the pipeline."""
    start, cpu = time.perf_counter(), time.thread_time()
    outputs = engine.engine_core.get_output()
    stepped = time.perf_counter()
    iteration = IterationStats(time.time())
    processed = engine.output_processor.process_outputs(outputs.outputs, outputs.timestamp, iteration)
    assert engine.metrics is not None
    engine.metrics.record(outputs.scheduler_stats, iteration)
    end = time.perf_counter()
    stats = None if outputs.scheduler_stats is None else outputs.scheduler_stats.step
    if stats is None:
        return None
    return {
        "schedule": stats.schedule_time,
        "pack": stats.dispatch_time,
        "read": stats.wait_time,
        "update": stats.update_time,
        "output": end - stepped,
        "total": end - start,
        "cpu": time.thread_time() - cpu,
        "outputs": len(processed.request_outputs),
    }


def null_executor(output_ids: Sequence[int]) -> type[Executor]:
    """An executor that does all that the model runner does on the host, and nothing on a device; "samples" `output_ids`."""
    from jaxllm.worker.batch import BatchLayout
    from jaxllm.worker.buckets import Buckets
    from jaxllm.worker.input_batch import InputBatch
    from jaxllm.worker.kv_cache import max_blocks_per_request

    class NullStep:
        def __init__(self, req_ids: list[str], sampled: np.ndarray, num: int, dispatch_time: float, num_padding: int) -> None:
            self.req_ids, self.sampled, self.num = req_ids, sampled, num
            self.dispatch_time, self.num_padding = dispatch_time, num_padding

        def result(self) -> ModelRunnerOutput:
            start = time.monotonic()
            token_ids = np.full(len(self.req_ids), output_ids[self.num % len(output_ids)]).tolist()
            output = ModelRunnerOutput(
                req_ids=self.req_ids,
                req_id_to_index={req_id: row for row, req_id in enumerate(self.req_ids)},
                sampled_token_ids=[[token] if used else [] for token, used in zip(token_ids, self.sampled, strict=True)],
            )
            output.stats = WorkerStepStats(self.dispatch_time, time.monotonic() - start, self.num_padding, 0)
            return output

    class NullExecutor(Executor):
        def initialize(self) -> KVCacheConfig:
            scheduler, cache, model = self.config.scheduler, self.config.cache, self.config.model
            assert cache.num_gpu_blocks_override is not None, "there is no memory to size the cache by"
            self.buckets = Buckets(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
            self.max_blocks = max_blocks_per_request(model.max_model_len, cache.block_size)
            self.batch = InputBatch(scheduler.max_num_seqs, 1, self.max_blocks)
            self.num_steps = 0
            spec = KVCacheSpec(cache.block_size, model.decoder.num_kv_heads, model.decoder.head_dim, 2)
            return KVCacheConfig(cache.num_gpu_blocks_override, (KVCacheGroup((0,), spec),))

        def start_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
            start = time.monotonic()
            for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
                self.batch.remove(req_id)
            for request in scheduler_output.scheduled_new_reqs:
                self.batch.add(request)
                self.batch.block_table(request)
            if not scheduler_output.total_num_scheduled_tokens:
                return FinishedStep(EMPTY_MODEL_RUNNER_OUTPUT)
            req_ids, counts = self.batch.order(scheduler_output)
            bucket = self.buckets.choose(counts)
            layout = BatchLayout(bucket, self.config.cache.block_size, self.batch.max_num_rows, 1, self.max_blocks)
            _, sampled = self.batch.pack(layout, scheduler_output, req_ids, counts)
            self.num_steps += 1
            num_padding = bucket.num_tokens - scheduler_output.total_num_scheduled_tokens
            return NullStep(req_ids, sampled, self.num_steps, time.monotonic() - start, num_padding)

        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            return self.start_model(scheduler_output).result()

        def collective_rpc(
            self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, timeout: float | None = None
        ) -> list[Any]:
            raise AttributeError(f"a null device has no method {method!r}")

        def shutdown(self) -> None:
            return

    return NullExecutor
