"""`throughput` and `latency`: the engine alone, without a server."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.bench.datasets import SampleRequest, add_dataset_args, load_requests
from jaxllm.bench.prompts import Prompts, TextPrompts, TokenPrompts
from jaxllm.bench.report import write_json
from jaxllm.engine.cli_args import add_engine_args, engine_args_of, human_int
from jaxllm.engine.input_processor import TokensPrompt
from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_throughput_args(parser: argparse.ArgumentParser) -> None:
    add_dataset_args(parser)
    parser.add_argument("--n", type=human_int, default=1, metavar="N", help="outputs a prompt (default: 1)")
    parser.add_argument("--disable-detokenize", action="store_true", help="do not turn the tokens into text")
    _add_common_args(parser)


def add_latency_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=human_int, default=32, metavar="N", help="tokens of a prompt (default: 32)")
    parser.add_argument("--output-len", type=human_int, default=128, metavar="N", help="tokens to generate (default: 128)")
    parser.add_argument("--batch-size", type=human_int, default=8, metavar="N", help="prompts at once (default: 8)")
    parser.add_argument("--num-iters-warmup", type=human_int, default=10, metavar="N", help="(default: 10)")
    parser.add_argument("--num-iters", type=human_int, default=30, metavar="N", help="(default: 30)")
    parser.add_argument("--disable-detokenize", action="store_true", help="do not turn the tokens into text")
    _add_common_args(parser)
    # The same prompts are asked again and again.
    parser.set_defaults(enable_prefix_caching=False)


def _add_common_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-json", metavar="FILE", help="write the figures to a file")
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    add_engine_args(parser)


def run_throughput(args: argparse.Namespace) -> int:
    """The command: every request at once, one call."""
    if args.n < 1:
        raise ValueError(f"--n must be at least 1, got {args.n}")
    with LLM.from_engine(_engine(args)) as llm:
        prompts = _prompts(args, llm)
        requests = load_requests(args, prompts, seed=args.seed, as_text=False, apply_chat_template=_chat_template(args, llm))
        result = measure_throughput(
            llm, requests, n=args.n, detokenize=not args.disable_detokenize, use_tqdm=not args.disable_tqdm
        )
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens: {result['total_prompt_tokens']}")
    print(f"Total num output tokens: {result['total_output_tokens']}")
    if result["padding_share"] is not None:
        print(f"Padding: {100 * result['padding_share']:.1f}% of the tokens that the device computed")
    _write(args, result)
    return 0


def run_latency(args: argparse.Namespace) -> int:
    """The command: one batch, again and again."""
    for flag in ("input_len", "output_len", "batch_size", "num_iters"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, got {getattr(args, flag)}")
    if args.num_iters_warmup < 0:
        raise ValueError(f"--num-iters-warmup must be at least 0, got {args.num_iters_warmup}")
    with LLM.from_engine(_engine(args)) as llm:
        rng = np.random.default_rng(args.seed)
        prompts = TokenPrompts(llm.engine.config.model.decoder.vocab_size)
        requests = [
            SampleRequest(prompts.token_ids(rng, args.input_len), args.input_len, args.output_len) for _ in range(args.batch_size)
        ]
        latencies = [
            measure_throughput(llm, requests, detokenize=not args.disable_detokenize, use_tqdm=False)["elapsed_time"]
            for _ in range(args.num_iters_warmup + args.num_iters)
        ][args.num_iters_warmup :]
    result = latency_result(latencies)
    print(f"Avg latency: {result['avg_latency']:.4f} seconds")
    for percentile, value in result["percentiles"].items():
        print(f"{percentile}% percentile latency: {value:.4f} seconds")
    print(f"Output tokens/s at the median: {args.batch_size * args.output_len / result['percentiles']['50']:.2f}")
    _write(args, result)
    return 0


def measure_throughput(
    llm: LLM, requests: Sequence[SampleRequest], *, n: int = 1, detokenize: bool = True, use_tqdm: bool = True
) -> dict[str, Any]:
    """Generate all the tokens that the requests ask for, in one call.

    Returns:
        vLLM's names; `tokens_per_second` counts prompts and outputs, all times are seconds. `padding_share` is None where the
        engine keeps no statistics.

    Raises:
        ValueError: if a request does not fit in the model's context.
    """
    longest = llm.engine.config.model.max_model_len
    for request in requests:
        if request.prompt_len + request.output_len > longest:
            raise ValueError(
                f"a request of {request.prompt_len} + {request.output_len} tokens does not fit in --max-model-len {longest}"
            )
    prompts = [_as_prompt(request) for request in requests]
    params = [
        SamplingParams(
            n=n,
            temperature=1.0,
            top_p=1.0,
            ignore_eos=True,
            max_tokens=request.output_len,
            detokenize=detokenize and _has_text(llm),
        )
        for request in requests
    ]
    before = _step_tokens(llm)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    elapsed = time.perf_counter() - start
    computed, padding = (after - then for after, then in zip(_step_tokens(llm), before, strict=True))
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "total_num_tokens": num_prompt_tokens + num_output_tokens,
        "requests_per_second": len(requests) / elapsed,
        "tokens_per_second": (num_prompt_tokens + num_output_tokens) / elapsed,
        "output_tokens_per_second": num_output_tokens / elapsed,
        "total_prompt_tokens": num_prompt_tokens,
        "total_output_tokens": num_output_tokens,
        "padding_share": padding / (computed + padding) if computed else None,
    }


def _step_tokens(llm: LLM) -> tuple[float, float]:
    """Tokens that steps have computed for requests, and to fill buckets; zeros if the engine does not count."""
    metrics = llm.engine.metrics
    return (0.0, 0.0) if metrics is None else (metrics.computed_tokens.value, metrics.padding_tokens.value)


def latency_result(latencies: Sequence[float]) -> dict[str, Any]:
    """vLLM's names; seconds."""
    percentiles = np.percentile(latencies, LATENCY_PERCENTILES)
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": list(latencies),
        "percentiles": {str(p): float(value) for p, value in zip(LATENCY_PERCENTILES, percentiles, strict=True)},
    }


def _engine(args: argparse.Namespace) -> Any:
    from jaxllm.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(engine_args_of(args))
    engine.collective_rpc("finish_compilation")  # what is measured is the engine, not its start
    return engine


def _has_text(llm: LLM) -> bool:
    return llm.engine.tokenizer is not None


def _prompts(args: argparse.Namespace, llm: LLM) -> Prompts:
    if _has_text(llm) and args.dataset_name in ("sharegpt", "custom"):
        return TextPrompts(llm.get_tokenizer())
    return TokenPrompts(llm.engine.config.model.decoder.vocab_size)


def _chat_template(args: argparse.Namespace, llm: LLM) -> Callable[[str], str] | None:
    if args.dataset_name != "custom" or args.custom_skip_chat_template or not _has_text(llm):
        return None
    tokenizer = llm.get_tokenizer()
    if not tokenizer.chat_template:
        return None
    from jaxllm.tokenizer import apply_chat_template

    return lambda prompt: apply_chat_template(tokenizer, [{"role": "user", "content": prompt}])


def _as_prompt(request: SampleRequest) -> Any:
    return request.prompt if isinstance(request.prompt, str) else TokensPrompt(prompt_token_ids=request.prompt)


def _write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.output_json is not None:
        write_json(Path(args.output_json), result)
