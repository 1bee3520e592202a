"""Sizes of the Triton kernels, and which calls they can serve."""

from dataclasses import dataclass

import jax.numpy as jnp

MAX_GROUP = 64


@dataclass(frozen=True)
class TritonConfig:
    """Static sizes of the Triton kernels.

    Attributes:
        tile: keys of one step of a kernel.
        decode_rows, prefill_rows: rows (queries times the query heads of a KV head) of a block; powers of 2, at least 16.
        decode_warps, prefill_warps, decode_stages, prefill_stages: as in `Launch`.
        decode_slots: work items a KV head that fill the device.
        min_tiles: fewest tiles worth an item of their own.
    """

    tile: int
    decode_rows: int
    decode_warps: int
    decode_stages: int
    prefill_rows: int
    prefill_warps: int
    prefill_stages: int
    decode_slots: int
    min_tiles: int


def triton_config(
    *, group: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype, max_decode_queries: int, num_cores: int | None
) -> TritonConfig:
    """Sizes for a GPU that gives a block 99 KiB of shared memory, the least that those from Ampere on give.

    Args:
        num_cores: of the device; None on a CPU, where the kernels are interpreted: few items then.
    """
    wide, single = head_dim > 128, jnp.dtype(dtype).itemsize == 4
    rows = 16
    while rows < min(group * max_decode_queries, 16 if single else 32 if wide else 64):
        rows *= 2
    return TritonConfig(
        tile=32 if wide or single else 64,
        decode_rows=rows,
        decode_warps=4,
        decode_stages=2 if wide or single else 3,
        prefill_rows=64,
        prefill_warps=8,
        prefill_stages=2,
        decode_slots=2 if num_cores is None else max(1, 2 * num_cores // num_kv_heads),
        min_tiles=1 if num_cores is None else 4,
    )


def triton_refusal(*, num_heads: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why the Triton kernels cannot serve such a call, on whatever device; None if they can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"dtype {jnp.dtype(dtype).name} is not bfloat16, float16 or float32"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f"head size {head_dim} is not a multiple of 16 up to 256"
    group = num_heads // num_kv_heads
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head, more than {MAX_GROUP}"
    return None
