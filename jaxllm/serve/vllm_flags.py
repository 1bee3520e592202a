"""Flags of `vllm serve` that jaxllm has no use for: some are accepted with a note, others refused by name."""

import argparse
import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)

# Flag → what there is instead. They change how vLLM works, not what it answers.
NOTED: dict[str, str] = {
    "--tokenizer-mode": "tokenizers are always the fast ones",
    "--trust-remote-code": "no code of a model is ever run",
    "--enable-chunked-mm-input": "models take text only",
    "--disable-chunked-mm-input": "models take text only",
    "--limit-mm-per-prompt": "models take text only",
    "--mm-processor-kwargs": "models take text only",
    "--media-io-kwargs": "models take text only",
    "--language-model-only": "models take text only",
    "--compilation-config": "every step is compiled, a program a bucket",
    "--optimization-level": "every step is compiled, a program a bucket",
    "--max-cudagraph-capture-size": "every step is compiled, a program a bucket",
    "--performance-mode": "every step is compiled, a program a bucket",
    "--disable-custom-all-reduce": "XLA chooses its collectives",
    "--disable-cascade-attn": "there is no cascade attention",
    "--max-parallel-loading-workers": "weights are loaded shard by shard",
    "--model-loader-extra-config": "weights are read by jaxllm's own readers",
    "--ignore-patterns": "only what a model needs is downloaded",
    "--hf-token": "set HF_TOKEN in the environment",
    "--config-format": "the format is recognised",
    "--code-revision": "no code of a model is ever run",
    "--tokenizer-revision": "the tokenizer comes with the model",
    "--prefix-caching-hash-algo": "blocks are known by their SHA-256",
    "--disable-frontend-multiprocessing": "the engine runs in a process of its own",
    "--disable-hybrid-kv-cache-manager": "sliding windows have groups of their own where a model has them",
    "--prefill-schedule-interval": "prefills are scheduled at every step",
    "--show-hidden-metrics-for-version": "no metrics are hidden",
    "--kv-cache-metrics": "the lives of blocks are not timed",
    "--enable-mfu-metrics": "FLOPs are not counted",
    "--cudagraph-metrics": "steps have no CUDA graphs",
    "--enable-server-load-tracking": "/load always counts",
    "--enable-sleep-mode": "/sleep works under --dev-mode",
    "--enable-ssl-refresh": "restart the server for a new certificate",
    "--ssl-cert-reqs": "clients' certificates are not asked for",
    "--h11-max-incomplete-event-size": "headers have the limit of the HTTP parser",
    "--h11-max-header-count": "headers have the limit of the HTTP parser",
    "--enable-tokenizer-info-endpoint": "there is no /tokenizer_info",
    "--enable-log-deltas": "answers are logged whole",
    "--log-error-stack": "errors that nobody foresaw are logged with their stack",
    "--disable-log-requests": "requests are logged only with --enable-log-requests",
    "--log-config-file": "logs go to standard error",
}  # fmt: skip

# Flag → (values that ask for nothing, why all others are refused).
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "--quantization": (("none", "None", "auto"), "weights are served as they are stored"),
    "--calculate-kv-scales": ((), "the scales of an fp8 KV cache come from the checkpoint"),
    "--runner": (("auto", "generate"), "models generate text"),
    "--convert": (("auto", "none"), "models generate text"),
    "--task": (("auto", "generate"), "models generate text"),
    "--decode-context-parallel-size": (("1",), "contexts are not split over devices"),
    "--prefill-context-parallel-size": (("1",), "contexts are not split over devices"),
    "--enable-eplb": ((), "no model here has experts"),
    "--enable-dbo": ((), "no model here has experts"),
    "--enable-elastic-ep": ((), "no model here has experts"),
    "--cpu-offload-gb": (("0",), "weights stay on the devices"),
    "--swap-space": (("0", "4"), "KV blocks stay on the devices"),
    "--kv-offloading-size": ((), "KV blocks stay on the devices"),
    "--enable-lora": ((), "adapters are not supported"),
    "--lora-modules": ((), "adapters are not supported"),
    "--max-loras": ((), "adapters are not supported"),
    "--max-lora-rank": ((), "adapters are not supported"),
    "--max-cpu-loras": ((), "adapters are not supported"),
    "--fully-sharded-loras": ((), "adapters are not supported"),
    "--speculative-config": ((), "speculative decoding is not supported"),
    "--spec-method": ((), "speculative decoding is not supported"),
    "--spec-model": ((), "speculative decoding is not supported"),
    "--spec-tokens": ((), "speculative decoding is not supported"),
    "--structured-outputs-config": ((), "structured outputs are not supported"),
    "--guided-decoding-backend": ((), "structured outputs are not supported"),
    "--kv-transfer-config": ((), "KV blocks are not handed to other engines"),
    "--kv-events-config": ((), "KV events are not published"),
    "--ec-transfer-config": ((), "KV blocks are not handed to other engines"),
    "--enable-prompt-embeds": ((), "prompts are text or token ids"),
    "--logits-processors": ((), "the sampler runs no code of its users"),
    "--middleware": ((), "the server runs no code of its users"),
    "--tool-parser-plugin": ((), "the server runs no code of its users"),
    "--reasoning-parser-plugin": ((), "the server runs no code of its users"),
    "--tool-server": ((), "the server calls no tools itself"),
    "--worker-cls": ((), "there is one kind of worker"),
    "--scheduler-cls": ((), "there is one scheduler"),
    "--otlp-traces-endpoint": ((), "traces are not exported"),
    "--collect-detailed-traces": ((), "traces are not exported"),
    "--profiler-config": ((), "there is no profiler endpoint"),
    "--enable-scale-out": ((), "one engine serves"),
    "--enable-return-routed-experts": ((), "no model here has experts"),
}  # fmt: skip

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-cc": "--compilation-config",
    "-asc": "--api-server-count",
    "-O": "--optimization-level",
}


class _Note(argparse.Action):
    """Takes any values and says that they change nothing."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        why = NOTED[self.option_strings[0]]
        namespace.notes = [*getattr(namespace, "notes", []), f"{option} has no effect{': ' if why else ''}{why}"]


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        neutral, why = REFUSED[self.option_strings[0]]
        if not values or any(value not in neutral for value in values):
            raise argparse.ArgumentError(self, f"not supported: {why}")


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Know the flags that jaxllm itself has not. --help does not list them."""
    known = {option for action in parser._actions for option in action.option_strings}
    for flags, action in ((NOTED, _Note), (REFUSED, _Refuse)):
        for flag in flags:
            if flag not in known:
                parser.add_argument(flag, nargs="*", action=action, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


def long_flags(argv: Sequence[str]) -> list[str]:
    """vLLM's short flags spelled out: -tp 2, -O3."""
    result = []
    for arg in argv:
        if arg.startswith("-O") and arg[2:].isdecimal():
            result += [SHORT["-O"], arg[2:]]
        else:
            flag, equals, value = arg.partition("=")
            result.append(SHORT.get(flag, flag) + equals + value)
    return result
