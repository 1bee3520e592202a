"""Decode attention in Mosaic GPU: split-K flash decoding over a list of work items.

A block takes one item (a stretch of one row's keys) and one KV head. The query heads that share the KV head, times the queries
of the row (more than one when tokens are speculated), are the rows of one 64-row tile, so that K and V are read once. Every item
gives a partial result and the logarithm of its sum of weights; `merge` joins those of a row.

    block (w, k):  producer warpgroup   pages of item w ──TMA──> ring of K and V tiles
                   consumer warpgroup   q tile ──┐ wgmma, online softmax ──> partial [M, D], log sum [M] ──TMA──> memory
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.compat import Interpret
from kernels_pallas.paged_attention.config import TILE_ROWS
from kernels_pallas.paged_attention.kernel_mosaic import (
    LOG2_E,
    NO_LOGIT,
    Ring,
    Span,
    attend,
    load_tiles,
    ring_scratch,
    tiling,
)
from kernels_pallas.paged_attention.kernel_mosaic_fp8 import RawRing, load_and_widen_tiles, raw_scratch
from kernels_pallas.paged_attention.plan import AttentionPlan
from kernels_pallas.paged_attention.reference import Options


def decode_parts(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    work: jax.Array,
    *,
    group: int,
    single_query: bool,
    tile: int,
    stages: int,
    raw_tiles: int,
    k_scale: jax.Array | None,
    options: Options,
    interpret: Interpret = None,
) -> tuple[jax.Array, jax.Array]:
    """The items' partial results.

    Args:
        q: [R, K, M, D], row m holds the KV head's head m % group of the row's query m // group; M a multiple of 8, at most 64.
        kv_cache, block_tables, seq_lens: as in `paged_attention`.
        work: int32 [W, 4], of an `AttentionPlan`.
        single_query: every row has one query.
        stages: tiles of K, and of V, that a block has in flight, or widened if the cache is of 8-bit numbers.
        raw_tiles: tiles, of K and V together, that it then has in flight.
        k_scale: float32 [K], of such a cache; v's scale is left to the caller.

    Returns:
        float32 [W, K, M, D] and, as logarithms to base 2, [W, K, M]; anything for idle items.
    """
    _, num_kv_heads, num_queries, head_dim = q.shape
    num_items, block_size, dtype = work.shape[0], kv_cache.shape[3], q.dtype
    is_fp8 = kv_cache.dtype != dtype

    def kernel(q_ref, kv_ref, tables_ref, lens_ref, work_ref, *refs):
        if k_scale is None:
            scale_ref, (out_ref, lse_ref, *scratch) = None, refs
        else:
            scale_ref, out_ref, lse_ref, *scratch = refs
        union, v_ref, k_full, v_full, k_free, v_free, q_full, *raw = scratch
        (q_tile, k_ref), (out_tile, lse_tile) = union
        ring = Ring(k_ref, v_ref, k_full, v_full, k_free, v_free)
        item, head, warpgroup = lax.axis_index("item"), lax.axis_index("head"), lax.axis_index("warpgroup")
        row, first_tile, queries = work_ref[item, 0], work_ref[item, 1], work_ref[item, 3]
        num_tokens = lens_ref[row]
        lowest = num_tokens - queries
        span = Span(first_tile, work_ref[item, 2] - first_tile, lowest, num_tokens - 1, num_tokens)

        @pl.when((warpgroup == 0) & (span.num_tiles > 0))
        def _() -> None:
            plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_tile.at[pl.ds(0, num_queries)], q_full)
            plgpu.barrier_wait(q_full)
            acc, best, total = attend(
                q_tile,
                ring,
                span,
                options,
                query_of_row=None if single_query else lambda rows: lowest + lax.div(rows, jnp.int32(group)),
                start=None,
                k_scale=None if scale_ref is None else scale_ref[head],
                wipe=None if is_fp8 else lambda wipe: wipe(),
                interpret=interpret,
            )
            safe = jnp.where(total > 0.0, total, 1.0)
            # The results lie where q and K did: all copies into K have been waited for.
            out_tile[...] = acc / lax.broadcast_in_dim(safe, acc.shape, [0])
            lse_tile[...] = jnp.where(total > 0.0, best + jnp.log(safe) * LOG2_E, NO_LOGIT)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, num_queries)], out_ref.at[item, head])
            plgpu.copy_smem_to_gmem(lse_tile.at[pl.ds(0, num_queries)], lse_ref.at[item, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when((warpgroup == 1) & (span.num_tiles > 0))
        def _() -> None:
            if is_fp8:
                load_and_widen_tiles(kv_ref, tables_ref.at[row], head, RawRing(*raw), ring, span)
            else:
                load_tiles(kv_ref, tables_ref.at[row], head, ring, span)

    tiled = tiling(head_dim, dtype)
    queries_and_keys: tuple[Any, ...] = (
        plgpu.SMEM((TILE_ROWS, head_dim), dtype, transforms=tiled),
        plgpu.SMEM((stages, tile, head_dim), dtype, transforms=tiled),
    )
    results: tuple[Any, ...] = (
        plgpu.SMEM((TILE_ROWS, head_dim), jnp.float32, transforms=tiling(head_dim, jnp.float32)),
        plgpu.SMEM((TILE_ROWS,), jnp.float32),
    )
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_items, num_kv_heads, num_queries, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_items, num_kv_heads, num_queries), jnp.float32),
        ),
        scratch_types=[
            plgpu.RefUnion(queries_and_keys, results),
            *ring_scratch(stages, tile, 1 if is_fp8 else tile // block_size, head_dim, dtype, consumers=1),
            plgpu.Barrier(),
            *(raw_scratch(raw_tiles, tile, block_size, head_dim, kv_cache.dtype) if is_fp8 else ()),
        ],
        grid=(num_items, num_kv_heads),
        grid_names=("item", "head"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, kv_cache, block_tables, seq_lens, work, *(() if k_scale is None else (k_scale,)))


def merge(parts: jax.Array, lse: jax.Array, plan: AttentionPlan, sinks: jax.Array | None) -> jax.Array:
    """Join the partial results of each row, weighted by their sums of weights.

    Args:
        parts, lse: of `decode_parts`.
        sinks: float32 [K, M] or None.

    Returns:
        float32 [R, K, M, D]; zeros for rows without items.
    """
    nth = jnp.arange(plan.max_items, dtype=jnp.int32)
    used = nth < plan.num_items[:, None]
    # Places without an item read the row's last one again, which is in the cache then.
    items = plan.first_item[:, None] + jnp.minimum(nth, jnp.maximum(plan.num_items[:, None] - 1, 0))
    sums = jnp.where(used[:, :, None, None], lse[items], NO_LOGIT)
    best = jnp.max(sums, axis=1)
    if sinks is not None:
        best = jnp.maximum(best, sinks * LOG2_E)
    weights = jnp.where(used[:, :, None, None], jnp.exp2(sums - best[:, None]), 0.0)
    total = jnp.sum(weights, axis=1)
    if sinks is not None:
        total += jnp.exp2(sinks * LOG2_E - best)
    values = jnp.where(used[:, :, None, None, None], parts[items], 0.0)
    return jnp.sum(values * weights[..., None], axis=1) / jnp.where(total > 0, total, 1.0)[..., None]
