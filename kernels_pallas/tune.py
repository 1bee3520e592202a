"""`python -m kernels_pallas.tune OP`: measures a kernel with several sizes on this GPU, and keeps the quickest for its launches.

For each call every candidate is first compared with the reference. One takes the place of the rules in code where it is quicker
by 2 % at least; if none is, the call has no row in `kernels_pallas/tuned`. Rows are written after each call, so that nothing is
lost.
"""

import argparse
import dataclasses
import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import Call, launch_config, paged_attention, plan_attention
from kernels_pallas.paged_attention.implementations import choose_implementation
from kernels_pallas.tuned import FOLDER, SIZES, Row, Table, table, write_rows

PROG = "python -m kernels_pallas.tune"
# What a candidate must gain on the rules in code to be worth a row: more than measurements differ by.
GAIN = 0.02
# What a block may ask for on the GPUs that the kernels run on, less what barriers take.
SHARED_BYTES = 226 * 1024
# Query heads and KV heads of a device, head size: Llama 3 8B and Qwen3 8B, 70B on 4 and on 8 devices, SmolLM2, Gemma 2 2B.
HEADS = ((32, 8, 128), (16, 2, 128), (8, 1, 128), (9, 3, 64), (8, 4, 256))
CALLS = tuple(Call(heads, kv_heads, size, block, "bfloat16") for heads, kv_heads, size in HEADS for block in (16, 32, 64))

Timer = Callable[[str, Call], float]


def choices(op: str, call: Call) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Sizes worth measuring, in groups that are searched one after the other; those of a group depend on one another."""
    if op == "mosaic_prefill":
        return ({"prefill_tile": (64, 128), "prefill_stages": (2, 3, 4)},)
    slots = tuple(max(1, blocks * 132 // call.num_kv_heads) for blocks in (1, 2, 3, 4))
    return {"tile": (64, 128), "decode_stages": (2, 3, 4, 6)}, {"decode_slots": slots}, {"min_tiles": (1, 2, 4, 8)}


def candidates(op: str, call: Call, sizes: dict[str, int], group: dict[str, tuple[int, ...]]) -> Iterator[dict[str, int]]:
    """`sizes` with those of one group exchanged for others, as far as a block finds the shared memory."""
    for values in itertools.product(*group.values()):
        found = sizes | dict(zip(group, values, strict=True))
        if found != sizes and _shared_bytes(op, call, found) <= SHARED_BYTES:
            yield found


def _shared_bytes(op: str, call: Call, sizes: dict[str, int]) -> int:
    """Of a block: tiles of queries and results, and stages of K and V."""
    if op == "mosaic_decode":
        rows = 64 + 2 * sizes["tile"] * sizes["decode_stages"]
    else:
        consumers = launch_config(call).prefill_consumers
        rows = 2 * 64 * consumers + 2 * sizes["prefill_tile"] * sizes["prefill_stages"]
    return rows * call.head_dim * jnp.dtype(call.dtype).itemsize


def search(op: str, call: Call, device_kind: str, seconds_of: Timer, tuned: Table) -> Row | None:
    """Find the quickest sizes for a call and leave them in `tuned`.

    Args:
        seconds_of: of a call of the operation with the sizes that `tuned` has at the time. What it raises rules a candidate out;
            for the sizes by rule it is passed on.

    Returns:
        The new row; None if no candidate is better than the rules by `GAIN`.
    """
    tuned.put(device_kind, call, None, op)
    untuned = seconds_of(op, call)
    config = launch_config(call)
    sizes = {name: getattr(config, name) for name in SIZES[op]}
    best, row = untuned * (1 - GAIN), None
    for group in choices(op, call):
        for tried in candidates(op, call, sizes, group):
            found = Row(op, call._asdict(), tried, 0.0, 1e6 * untuned, jax.__version__)
            tuned.put(device_kind, call, found, op)
            try:
                seconds = seconds_of(op, call)
            except Exception as error:  # whatever a compiler or a driver may raise: other sizes may do
                print(f"  {_short(tried)}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                continue
            print(f"  {_short(tried)}: {1e6 * seconds:.1f} us", flush=True)
            if seconds < best:
                best, row = seconds, dataclasses.replace(found, microseconds=1e6 * seconds)
        sizes = sizes if row is None else row.sizes
    tuned.put(device_kind, call, row, op)
    return row


def _short(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def tune(op: str, calls: Sequence[Call], device_kind: str, seconds_of: Timer, tuned: Table) -> None:
    """Search for each call, and write the device's file after each."""
    for call in calls:
        print(f"{op} of {call}", flush=True)
        row = search(op, call, device_kind, seconds_of, tuned)
        path = write_rows(device_kind, tuned.rows(device_kind), tuned.folder)
        if row is None:
            print("  the rules in code are best", flush=True)
        else:
            gain = row.untuned_microseconds / row.microseconds
            print(f"  {_short(row.sizes)}: {gain:.2f} times as quick as by rule, in {path}", flush=True)


def measure(
    op: str,
    call: Call,
    small: Sequence[int] | None = None,
    large: Sequence[int] | None = None,
    num_layers: int = 16,
    repeats: int = 5,
) -> float:
    """Seconds of a call on the first device: the best of some runs, after its values were compared with the reference's.

    Args:
        small, large: tokens of the rows whose values are compared, and of those whose time is taken.
        num_layers: calls in one program.
        repeats: runs of it.

    Raises:
        ArithmeticError: if the values differ.
    """
    decode = op == "mosaic_decode"
    options = {"scale": call.head_dim**-0.5, "decode_only": decode}
    q, cache, *integers = _batch(op, call, small or ((300, 65) if decode else (300,)))
    found, expected = (
        np.asarray(jax.jit(partial(paged_attention, **options, implementation=name))(q, cache, *integers), np.float32)
        for name in ("mosaic", "reference")
    )
    worst = float(np.abs(found - expected).max())
    if not worst < 0.05:
        raise ArithmeticError(f"it differs from the reference by {worst:.3g}")

    q, cache, tables, *lens = _batch(op, call, large or ((8192,) * (32 if decode else 1)))
    # A step plans once for all layers, so the plan is no part of what is measured.
    plan = plan_attention(
        *lens,
        num_tokens=q.shape[0],
        max_context=tables.shape[1] * call.block_size,
        call=call,
        sliding_window=None,
        decode_only=decode,
        implementation="mosaic",
    )

    @jax.jit
    def layers(q: jax.Array, cache: jax.Array) -> jax.Array:
        def layer(_: int, x: jax.Array) -> jax.Array:
            # Each layer's queries depend on the result of the last, by a factor that is not known to change no value.
            attended = paged_attention(x, cache, tables, *lens, **options, plan=plan, implementation="mosaic")
            return x + attended * jnp.asarray(1e-30, x.dtype)

        return jax.lax.fori_loop(0, num_layers, layer, q)

    jax.block_until_ready(layers(q, cache))
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(layers(q, cache))
        best = min(best, time.perf_counter() - start)
    return best / num_layers


def _batch(op: str, call: Call, lengths: Sequence[int]) -> tuple[jax.Array, ...]:
    """Arguments of `paged_attention`: rows of these lengths, decodes or whole prompts, their blocks scattered over the cache."""
    rng = np.random.default_rng(0)
    queries = [1] * len(lengths) if op == "mosaic_decode" else lengths
    pages = -(-max(lengths) // call.block_size)
    num_blocks = 1 + len(lengths) * pages
    blocks = rng.permutation(np.arange(1, num_blocks)).reshape(len(lengths), pages)
    starts = np.concatenate([[0], np.cumsum(queries)])
    keys = jax.random.split(jax.random.key(0))
    shape = (num_blocks, 2, call.num_kv_heads, call.block_size, call.head_dim)
    integers = (blocks, np.asarray(lengths), starts, np.asarray(len(lengths) if op == "mosaic_decode" else 0))
    return (
        jax.random.normal(keys[0], (int(starts[-1]), call.num_heads, call.head_dim), call.dtype),
        jax.random.normal(keys[1], shape, call.dtype),
        *(jnp.asarray(array, jnp.int32) for array in integers),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Tune and return the exit code; 2 and one line on standard error where there is nothing to measure on."""
    parser = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("op", choices=list(SIZES), metavar="OP", help=" or ".join(SIZES))
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="folder of the files (default: the package's)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(
            f"{PROG}: error: measuring needs a Hopper GPU (compute capability 9) that jax can use, through its CUDA plugin "
            f"and NVIDIA's driver; jax found {device.platform}: {device.device_kind}",
            file=sys.stderr,
        )
        return 2
    try:
        for call in CALLS:
            choose_implementation("mosaic", call)
        tuned = table()
        # Launches look into the table that comes with the kernels, wherever its files are written.
        tuned.folder = args.out
        tune(args.op, CALLS, device.device_kind, measure, tuned)
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
