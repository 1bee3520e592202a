"""`python -m jaxllm.bench.gpu --out DIR`: what a GPU makes of the engine, in one go of nine minutes.

Parts, each with its own file of figures written as soon as it is done, so that nothing is lost when time runs out: the device
itself (copy bandwidth, matrix products); the attention kernels against float64; their decode bandwidth and prefill rate; whole
steps of a Llama 8B; greedy tokens of a real model against the CPU's. `--smoke` runs it all on small shapes, on a CPU in a minute.
"""

import functools
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bench import gpu_engine
from jaxllm.bench.attention_case import AttentionCase
from jaxllm.engine.cli_args import ArgumentParser
from kernels_pallas.paged_attention import IMPLEMENTATIONS, paged_attention
from kernels_pallas.paged_attention.implementations import choose_implementation

PROG = "python -m jaxllm.bench.gpu"
BUDGET_SECONDS = 540.0
# What one more measurement may take at most; with less time left none is begun.
RESERVE_SECONDS = 40.0


class OutOfTime(Exception):
    """Raised where another measurement would begin too late."""


class Run:
    """The clock and the results of one call.

    Args:
        out: folder for the results.
        budget: seconds from now.
        smoke: small shapes.
    """

    def __init__(self, out: Path, budget: float, smoke: bool) -> None:
        self.out, self.smoke = out, smoke
        self._end = time.monotonic() + budget
        self.device: dict[str, float] = {}
        out.mkdir(parents=True, exist_ok=True)

    def check_time(self) -> None:
        """Raise OutOfTime unless there is time for another measurement."""
        if time.monotonic() > self._end - (0 if self.smoke else RESERVE_SECONDS):
            raise OutOfTime

    def part(self, name: str, function: Callable[["Run", list[dict[str, Any]]], None]) -> bool:
        """Run a part and write what it found, also if it fails or time runs out. Returns whether it succeeded."""
        rows: list[dict[str, Any]] = []
        start, status = time.monotonic(), "done"
        try:
            self.check_time()
            function(self, rows)
        except OutOfTime:
            status = "out of time"
        except Exception as error:  # the other parts can still tell something
            status = "".join(traceback.format_exception_only(error)).strip()
            traceback.print_exc()
        seconds = round(time.monotonic() - start, 1)
        result = {"part": name, "status": status, "seconds": seconds, "rows": rows}
        (self.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {status}, {seconds} s", flush=True)
        for row in rows:
            print("  " + ", ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        return status in ("done", "out of time")


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def seconds_of(function: Callable[..., jax.Array], *arguments: jax.Array, times: int, repeats: int) -> float:
    """Seconds a call: the best of `repeats` runs of a program that makes `times` calls, each depending on the last."""

    @jax.jit
    def many(first: jax.Array, *rest: jax.Array) -> jax.Array:
        def once(_: int, x: jax.Array) -> jax.Array:
            # Too small to change a value, and not known to be so when the program is compiled.
            return x + (function(x, *rest) * 1e-30).astype(x.dtype).reshape(x.shape)

        return jax.lax.fori_loop(0, times, once, first)

    jax.block_until_ready(many(*arguments))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(many(*arguments))
        best = min(best, time.perf_counter() - start)
    return best / times


def measure_device(run: Run, rows: list[dict[str, Any]]) -> None:
    """Copy bandwidth and the rate of matrix products: what all other figures are measured against."""
    device = jax.devices()[0]
    rows.append({"jax": jax.__version__, "platform": device.platform, "kind": device.device_kind})
    rows[0]["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    count = 2**16 if run.smoke else 2**29
    x = jnp.zeros(count, jnp.bfloat16)
    seconds = _seconds_of_update(lambda x: x + 1, x, 20)
    run.device["copy"] = 2 * x.nbytes / seconds
    rows.append({"copy_gb_per_s": run.device["copy"] / 1e9})
    size = 128 if run.smoke else 8192
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    seconds = _seconds_of_update(lambda x: x @ a, a, 20)
    run.device["flops"] = 2 * size**3 / seconds
    rows.append({"matmul_tflops": run.device["flops"] / 1e12})


def _seconds_of_update(function: Callable[[jax.Array], jax.Array], x: jax.Array, times: int) -> float:
    step = jax.jit(function, donate_argnums=0)
    x = jax.block_until_ready(step(x + 0))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(times):
            x = step(x)
        jax.block_until_ready(x)
        best = min(best, time.perf_counter() - start)
    return best / times


def implementations(case: AttentionCase) -> list[str]:
    """The attention kernels that can serve a case on the default device; on a CPU none but the reference is quick enough."""
    if jax.default_backend() == "cpu":
        return ["reference"]
    found = []
    for name in IMPLEMENTATIONS:
        try:
            found.append(choose_implementation(name, case.shapes))
        except ValueError as error:
            print(f"  {name} is left out: {error}", flush=True)
    return found


def check_kernels(run: Run, rows: list[dict[str, Any]]) -> None:
    """Largest difference of each kernel from attention in float64; raises at the end if one is wrong."""
    shapes = [(16, 128, 8, 4, None), (32, 128, 8, 4, None), (64, 64, 4, 8, None), (32, 128, 8, 1, 100)]
    if run.smoke:
        shapes = [(16, 32, 2, 4, None), (32, 32, 2, 2, 20)]
    wrong = []
    for block_size, head_dim, kv_heads, group, window in shapes:
        lens = (1, 31, 70) if run.smoke else (1, block_size - 1, block_size, block_size + 1, 700, 2049)
        for decode in (True, False):
            queries = (1,) * len(lens) if decode else (1, *(min(length, 130) for length in lens[1:]))
            case = AttentionCase.random(lens, queries, kv_heads, group, head_dim, block_size)
            expected = case.in_float64(window)
            row: dict[str, Any] = {"block_size": block_size, "D": head_dim, "K": kv_heads, "group": group, "window": window}
            row["decode"] = decode
            for name in implementations(case):
                run.check_time()
                got = case.attend(paged_attention, name, window)
                row[name] = float(np.abs(np.asarray(got, np.float64)[: len(expected)] - expected).max())
                # Values are averages of normal ones, rounded to bfloat16, as are the weights.
                if not row[name] < 0.05:
                    wrong.append(f"{name} is off by {row[name]} for {row}")
            rows.append(row)
    if wrong:
        raise AssertionError("; ".join(wrong))


DECODE_SHAPES = (  # requests, context, KV heads, query heads a KV head, block size
    (1, 8192, 8, 4, 32),
    (1, 131072, 8, 4, 32),
    (16, 4096, 8, 4, 32),
    (64, 1024, 8, 4, 32),
    (64, 4096, 8, 4, 16),
    (64, 4096, 8, 4, 32),
    (64, 4096, 8, 4, 64),
    (256, 1024, 8, 4, 32),
    (64, 8192, 1, 8, 32),
)
PREFILL_SHAPES = (  # requests, new tokens of each, context, KV heads, query heads a KV head, block size
    (1, 8192, 8192, 8, 4, 32),
    (8, 1024, 1024, 8, 4, 32),
    (4, 2048, 16384, 8, 4, 32),
    (4, 2048, 16384, 8, 4, 64),
)


def measure_decode(run: Run, rows: list[dict[str, Any]]) -> None:
    """Bytes of KV cache read a second, and their share of the copy bandwidth."""
    for requests, context, kv_heads, group, block_size in ((2, 100, 2, 4, 16),) if run.smoke else DECODE_SHAPES:
        # Every other request is shorter by a quarter: kernels must cope with rows of different length.
        lens = [context if row % 2 == 0 else max(3 * context // 4, 1) for row in range(requests)]
        case = AttentionCase.random(lens, [1] * requests, kv_heads, group, 128, block_size, shuffled=not run.smoke)
        num_bytes = sum(lens) * kv_heads * 128 * 2 * 2
        row: dict[str, Any] = {"requests": requests, "context": context, "K": kv_heads, "group": group}
        row |= {"block_size": block_size, "kv_mb": num_bytes / 1e6}
        rows.append(row)
        for name in implementations(case):
            run.check_time()
            attend = functools.partial(case.call, paged_attention, name, None)
            seconds = seconds_of(attend, case.q, case.kv_cache, times=1 if run.smoke else 10, repeats=1 if run.smoke else 5)
            row[f"{name}_us"] = 1e6 * seconds
            row[f"{name}_gb_per_s"] = num_bytes / seconds / 1e9
            row[f"{name}_percent_of_copy"] = 100 * num_bytes / seconds / run.device["copy"]


def measure_prefill(run: Run, rows: list[dict[str, Any]]) -> None:
    """Operations a second, beside those of cuDNN's dense attention where there are no earlier tokens."""
    for requests, new, context, kv_heads, group, block_size in ((2, 40, 60, 2, 4, 16),) if run.smoke else PREFILL_SHAPES:
        case = AttentionCase.random([context] * requests, [new] * requests, kv_heads, group, 128, block_size)
        flops = 4.0 * kv_heads * group * 128 * requests * (new * (context - new) + new * (new + 1) / 2)
        row: dict[str, Any] = {"requests": requests, "new": new, "context": context, "block_size": block_size}
        rows.append(row)
        timing = {"times": 1 if run.smoke else 4, "repeats": 1 if run.smoke else 3}
        for name in implementations(case):
            run.check_time()
            attend = functools.partial(case.call, paged_attention, name, None)
            row[f"{name}_tflops"] = flops / seconds_of(attend, case.q, case.kv_cache, **timing) / 1e12
        if new == context and jax.default_backend() == "gpu":
            run.check_time()
            k, v = (jax.random.normal(jax.random.key(i), (requests, new, kv_heads, 128), jnp.bfloat16) for i in (0, 1))

            def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

            q = case.q.reshape(requests, new, kv_heads * group, 128)
            row["cudnn_tflops"] = flops / seconds_of(dense, q, k, v, **timing) / 1e12
        row["matmul_tflops"] = run.device["flops"] / 1e12


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts; the exit code is 1 if one of them failed."""
    parser = ArgumentParser(prog=PROG, description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the figures go, a file a part")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, metavar="S", help="seconds in all (default: 540)")
    parser.add_argument("--smoke", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="X", help=", ".join(PARTS))
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if jax.default_backend() != "gpu" and not args.smoke:
        print(f"{PROG}: error: jax found no GPU, only {jax.devices()}; --smoke runs on a CPU", file=sys.stderr)
        return 2
    run = Run(args.out, args.budget, args.smoke)
    # Attention is measured against the device, so that part goes first whatever is asked for.
    names = ["device", *(name for name in args.parts if name != "device")]
    succeeded = [run.part(name, PARTS[name]) for name in names]  # all of them, whether or not one fails
    return int(not all(succeeded))


PARTS: dict[str, Callable[[Run, list[dict[str, Any]]], None]] = {
    "device": measure_device,
    "correct": check_kernels,
    "decode": measure_decode,
    "step": gpu_engine.measure_steps,
    "prefill": measure_prefill,
    "engine": gpu_engine.check_engine,
}

if __name__ == "__main__":
    sys.exit(main())
