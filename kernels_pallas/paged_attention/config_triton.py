"""Sizes of the Triton kernels, and which calls they can serve."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from kernels_pallas.fp8 import is_fp8

MAX_GROUP = 32
KIB = 1024


class _Sizes(NamedTuple):
    """Keys of a decode step and most rows of a decode block, keys of a prefill step and rows of a prefill block."""

    decode_tile: int
    max_decode_rows: int
    prefill_tile: int
    prefill_rows: int


# By bytes of a value and head size, up to which: the largest with which no register is spilled, from Ampere to Hopper. The masks
# of head sizes that are no power of 2 take registers too.
_SIZES = {
    2: {64: _Sizes(64, 32, 64, 128), 112: _Sizes(64, 32, 32, 64), 128: _Sizes(64, 32, 32, 128), 256: _Sizes(32, 32, 32, 64)},
    4: {
        32: _Sizes(32, 32, 32, 64),
        48: _Sizes(16, 16, 16, 32),
        64: _Sizes(32, 32, 16, 64),
        128: _Sizes(16, 16, 16, 32),
        256: _Sizes(16, 16, 16, 32),
    },
}
# The same with a cache of 8-bit numbers, by bytes of a query's value. Its tiles are widened on their way from one place in shared
# memory to another, and wait there for the threads: the queries are all in registers by then.
_FP8_SIZES = {
    2: {**_SIZES[2], 256: _Sizes(32, 32, 32, 32)},
    4: {head_dim: sizes for head_dim, sizes in _SIZES[4].items() if head_dim <= 128},
}


@dataclass(frozen=True)
class TritonConfig:
    """Static sizes of the Triton kernels.

    Attributes:
        decode_tile, prefill_tile: keys of one step of a kernel.
        decode_rows, prefill_rows: rows (queries times the query heads of a KV head) of a block; powers of 2, at least 16.
        decode_warps, decode_stages, prefill_warps, prefill_stages: as in `Launch`.
        decode_slots: work items a KV head that fill the device.
        min_tiles: fewest tiles worth an item of their own.
        precision: of products of float32; see `triton.language.dot`.
    """

    decode_tile: int
    decode_rows: int
    decode_warps: int
    decode_stages: int
    prefill_tile: int
    prefill_rows: int
    prefill_warps: int
    prefill_stages: int
    decode_slots: int
    min_tiles: int
    precision: str


def triton_config(
    *,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    fp8_cache: bool,
    max_decode_queries: int,
    num_cores: int | None,
    shared_memory: int,
) -> TritonConfig:
    """Sizes for a GPU.

    Of the stages of its pipeline Triton spends two on the lookup in the block table: with 5 of them two tiles of K and V are in
    shared memory, one that is worked on and one on its way; with 4 there is one. With D = 128 a decode block takes 72 KiB, so
    that two share a core of an A100, and a prefill block 66 KiB.

    Args:
        dtype: of the queries; the cache's too unless `fp8_cache`.
        num_cores: of the device; None on a CPU, where the kernels are interpreted: few items then.
        shared_memory: bytes that a block may have.
    """
    itemsize = jnp.dtype(dtype).itemsize
    table = (_FP8_SIZES if fp8_cache else _SIZES)[itemsize]
    sizes = next(sizes for largest, sizes in table.items() if head_dim <= largest)
    rows = 16
    while rows < min(group * max_decode_queries, sizes.max_decode_rows):
        rows *= 2
    return TritonConfig(
        decode_tile=sizes.decode_tile,
        decode_rows=rows,
        decode_warps=4,
        decode_stages=5,
        prefill_tile=sizes.prefill_tile,
        prefill_rows=sizes.prefill_rows,
        prefill_warps=8,
        prefill_stages=5 if head_dim <= 128 or fp8_cache or (itemsize == 2 and shared_memory > 132 * KIB) else 4,
        decode_slots=2 if num_cores is None else max(1, 2 * num_cores // num_kv_heads),
        min_tiles=1 if num_cores is None else -(-256 // sizes.decode_tile),
        # With three products of tf32 the wide heads would need more registers than there are.
        precision="tf32x3" if head_dim <= 128 else "ieee",
    )


def triton_refusal(*, num_heads: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype, cache_dtype: jnp.dtype) -> str | None:
    """Why the Triton kernels cannot serve such a call, on whatever device; None if they can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"dtype {jnp.dtype(dtype).name} is not bfloat16, float16 or float32"
    if jnp.dtype(cache_dtype) != jnp.dtype(dtype) and not is_fp8(cache_dtype):
        return f"the KV cache is {jnp.dtype(cache_dtype).name}, not {jnp.dtype(dtype).name} as the queries are"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f"head size {head_dim} is not a multiple of 16 up to 256"
    if is_fp8(cache_dtype) and jnp.dtype(dtype) == jnp.float32 and head_dim > 128:
        return f"head size {head_dim} is more than 128, with float32 queries and a KV cache of 8-bit numbers"
    group = num_heads // num_kv_heads
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head, more than {MAX_GROUP}"
    return None
