"""Attention of a ragged batch of queries over a paged KV cache."""

import math

import jax
import jax.numpy as jnp

from kernels_pallas.dispatch import choose
from kernels_pallas.paged_attention.reference import paged_attention_reference

# Best first; an empty tuple of platforms means all.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"reference": ()}


def paged_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    decode_only: bool,
    implementation: str = "auto",
) -> jax.Array:
    """Causal attention of each row's queries over the row's keys and values, softmax and sums in float32.

    Row r's queries are tokens `query_start_loc[r]:query_start_loc[r + 1]`. They are the last of the row's `seq_lens[r]` tokens,
    whose keys and values are in the cache already. Query head h attends with KV head h // (H / K).

    What is not part of a row may hold anything, NaN included, and changes nothing: tokens from `query_start_loc[R]` on, blocks
    that no row uses, slots beyond a row's length, block table entries beyond a row's blocks.

    Args:
        q: [T, H, D], float32, bfloat16 or float16.
        kv_cache: [N, 2, K, B, D], same dtype as q.
        block_tables: int32 [R, P]; entry p holds tokens p * B to (p + 1) * B - 1 of the row.
        seq_lens: int32 [R], 0 for a padding row.
        query_start_loc: int32 [R + 1], not decreasing, starts at 0. A padding row has no tokens.
        num_decodes: int32 []; rows 0 to num_decodes - 1 have one query each, the others any number.
        scale: what the dot products are multiplied by, before cap and mask.
        sliding_window: the last tokens that a query can see, itself included; None for all.
        logit_soft_cap: c in c * tanh(s / c), applied to the scaled products; None for no cap.
        sinks: float32 [H], a logit a head that takes part in the softmax and has no value.
        decode_only: T == R and row r's only query is token r, for every row that is no padding; static.
        implementation: "auto" or "reference".

    Returns:
        [T, H, D], dtype of q; zeros for tokens of no row.

    Raises:
        ValueError: if a shape, dtype or option does not fit, or the implementation is unknown.
    """
    _check_arrays(q, kv_cache, block_tables, seq_lens, query_start_loc, num_decodes, sinks)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive, got {scale!r}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window!r}")
    if logit_soft_cap is not None and not (math.isfinite(logit_soft_cap) and logit_soft_cap > 0):
        raise ValueError(f"logit_soft_cap must be positive, got {logit_soft_cap!r}")
    if decode_only and q.shape[0] != block_tables.shape[0]:
        raise ValueError(f"decode_only needs as many tokens as rows, got {q.shape[0]} tokens and {block_tables.shape[0]} rows")
    run = {"reference": paged_attention_reference}[choose("paged_attention", implementation, IMPLEMENTATIONS)]
    return run(
        q,
        kv_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        num_decodes,
        scale=scale,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        sinks=sinks,
        decode_only=decode_only,
    )


def _check_arrays(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    sinks: jax.Array | None,
) -> None:
    if q.ndim != 3:
        raise ValueError(f"q must be [T, H, D], got {q.shape}")
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"q must be float32, bfloat16 or float16, got {q.dtype}")
    if kv_cache.ndim != 5 or kv_cache.shape[1] != 2:
        raise ValueError(f"kv_cache must be [N, 2, K, B, D], got {kv_cache.shape}")
    if kv_cache.dtype != q.dtype:
        raise ValueError(f"kv_cache must have the dtype of q, {q.dtype}, got {kv_cache.dtype}")
    if kv_cache.shape[4] != q.shape[2]:
        raise ValueError(f"kv_cache has head size {kv_cache.shape[4]}, q has {q.shape[2]}")
    if q.shape[1] % kv_cache.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads, which is no multiple of the {kv_cache.shape[2]} of kv_cache")
    if block_tables.ndim != 2:
        raise ValueError(f"block_tables must be [R, P], got {block_tables.shape}")
    num_rows = block_tables.shape[0]
    for name, array, shape in (
        ("block_tables", block_tables, block_tables.shape),
        ("seq_lens", seq_lens, (num_rows,)),
        ("query_start_loc", query_start_loc, (num_rows + 1,)),
        ("num_decodes", num_decodes, ()),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.dtype != jnp.float32):
        raise ValueError(f"sinks must be float32 [H] = {(q.shape[1],)}, got {sinks.dtype} {sinks.shape}")
