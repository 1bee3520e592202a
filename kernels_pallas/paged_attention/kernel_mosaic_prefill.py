"""Prefill attention in Mosaic GPU: blocks of one row's queries, causal, over the row's pages.

A block takes 64 rows (queries times the query heads that share a KV head) for each of its two consumer warpgroups, which share
the tiles of K and V that a producer warpgroup loads. With D = 256 there is one consumer, for the registers.

    block (b, k):  producer warpgroup      pages of the row ──TMA──> ring of K and V tiles
                   consumer warpgroup 0    q, first half  ──┐
                   consumer warpgroup 1    q, second half ──┴ wgmma, online softmax ──> output rows ──TMA──> memory
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.compat import Interpret
from kernels_pallas.paged_attention.config import TILE_ROWS
from kernels_pallas.paged_attention.kernel_mosaic import LAYOUT, LOG2_E, Ring, Span, attend, load_tiles, ring_scratch, tiling
from kernels_pallas.paged_attention.kernel_mosaic_fp8 import RawRing, load_and_widen_tiles, raw_scratch
from kernels_pallas.paged_attention.reference import Options, Scales

# Registers of a thread where there are three warpgroups of 128 threads, which share 65536.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
# Where the producer also widens tiles.
WIDENING_PRODUCER_REGISTERS, WIDENED_CONSUMER_REGISTERS = 72, 216


def prefill_rows(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    blocks: jax.Array,
    sinks: jax.Array | None,
    *,
    group: int,
    queries_per_warpgroup: int,
    consumers: int,
    tile: int,
    stages: int,
    raw_tiles: int,
    scales: Scales | None,
    options: Options,
    interpret: Interpret = None,
) -> jax.Array:
    """Attention of the queries of some rows.

    Args:
        q: [K, T * group + 64, D]: of each KV head, the query heads of token 0, of token 1, …, then 64 rows of anything.
        kv_cache, block_tables, seq_lens, query_start_loc: as in `paged_attention`.
        blocks: int32 [Q, 2], `prefill_blocks` of an `AttentionPlan`.
        sinks: float32 [K, group] or None.
        stages, raw_tiles: as in `decode_parts`.
        scales: of a cache of 8-bit numbers; None for 1.
        consumers: warpgroups that compute, 1 or 2; with 2 a thread has 168 registers to start with, with 1 it has 255.

    Returns:
        As q; anything for tokens of rows that are in no block.
    """
    num_kv_heads, _, head_dim = q.shape
    block_size, dtype = kv_cache.shape[3], q.dtype
    rows_used = queries_per_warpgroup * group
    is_fp8 = kv_cache.dtype != dtype
    registers = (PRODUCER_REGISTERS, CONSUMER_REGISTERS)
    if is_fp8:
        registers = (WIDENING_PRODUCER_REGISTERS, WIDENED_CONSUMER_REGISTERS)

    def kernel(blocks_ref, starts_ref, lens_ref, tables_ref, q_ref, kv_ref, *refs):
        rest = list(refs)
        sinks_ref = None if sinks is None else rest.pop(0)
        k_scale_ref, v_scale_ref = (None, None) if scales is None else (rest.pop(0), rest.pop(0))
        out_ref, q_tiles, plain_tiles, k_ref, v_ref, k_full, v_full, k_free, v_free, q_full, wiped, *scratch = rest
        raw, sink_scratch = scratch[: 2 * is_fp8], scratch[2 * is_fp8 :]
        ring = Ring(k_ref, v_ref, k_full, v_full, k_free, v_free)
        block, head, warpgroup = lax.axis_index("block"), lax.axis_index("head"), lax.axis_index("warpgroup")
        row, first_query = jnp.maximum(blocks_ref[block, 0], 0), blocks_ref[block, 1]
        first_token, num_tokens = starts_ref[row], lens_ref[row]
        num_queries = starts_ref[row + 1] - first_token
        lowest = num_tokens - num_queries + first_query
        highest = lowest + (consumers * queries_per_warpgroup - 1)
        first_key = jnp.int32(0)
        if options.sliding_window is not None:
            first_key = jnp.maximum(lowest - options.sliding_window + 1, 0)
        first_tile = lax.div(first_key, jnp.int32(tile))
        stop_tile = lax.div(jnp.minimum(highest + 1, num_tokens) + (tile - 1), jnp.int32(tile))
        span = Span(first_tile, stop_tile - first_tile, lowest, highest, num_tokens)
        busy = first_query >= 0

        @pl.when((warpgroup < consumers) & busy)
        def _() -> None:
            if consumers == 2:
                plgpu.set_max_registers(registers[1], action="increase")
            own_query = first_query + warpgroup * queries_per_warpgroup
            # The second warpgroup may have no queries; it keeps step with the first on the row's own memory.
            place = (first_token + own_query) * group
            # A copy into tiled memory must start at a multiple of 8 rows, which the rows of a ragged batch do not: they land in
            # plain memory and are laid out from there.
            plain, tiled = plain_tiles.at[warpgroup], q_tiles.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[head, pl.ds(place, TILE_ROWS)], plain, q_full.at[warpgroup])
            plgpu.barrier_wait(q_full.at[warpgroup])
            tiled[...] = plgpu.load(plain, layout=LAYOUT, optimized=False)
            plgpu.commit_smem()
            start = None
            if sinks_ref is not None:
                sink_tiles, sinks_full = sink_scratch
                sink_tile = sink_tiles.at[warpgroup]
                plgpu.copy_gmem_to_smem(sinks_ref.at[head], sink_tile, sinks_full.at[warpgroup])
                plgpu.barrier_wait(sinks_full.at[warpgroup])
                logits = plgpu.load(sink_tile, layout=LAYOUT.reduce(1), optimized=False)
                start = (logits * LOG2_E, plgpu.layout_cast(jnp.ones((TILE_ROWS,), jnp.float32), LAYOUT.reduce(1)))

            def wipe(wipe_tile: Callable[[], None]) -> None:
                """One warpgroup does it, the other waits. It happens once: only the last tile reaches beyond the row."""
                if consumers == 1:
                    wipe_tile()
                    return

                @pl.when(warpgroup == 0)
                def _() -> None:
                    wipe_tile()
                    plgpu.barrier_arrive(wiped)

                @pl.when(warpgroup != 0)
                def _() -> None:
                    plgpu.barrier_wait(wiped)

            acc, _, total = attend(
                tiled,
                ring,
                span,
                options,
                query_of_row=lambda rows: lowest + warpgroup * queries_per_warpgroup + lax.div(rows, jnp.int32(group)),
                start=start,
                k_scale=None if k_scale_ref is None else k_scale_ref[head],
                wipe=None if is_fp8 else wipe,
                interpret=interpret,
            )
            share = jnp.where(total > 0.0, total, 1.0)
            if v_scale_ref is not None:
                share = share / v_scale_ref[head]
            plain[...] = (acc / lax.broadcast_in_dim(share, acc.shape, [0])).astype(dtype)
            plgpu.commit_smem()
            num_own = jnp.clip(num_queries - own_query, 0, queries_per_warpgroup)

            @pl.when(num_own == queries_per_warpgroup)
            def _() -> None:
                plgpu.copy_smem_to_gmem(plain.at[pl.ds(0, rows_used)], out_ref.at[head, pl.ds(place, rows_used)])

            @pl.when(num_own < queries_per_warpgroup)
            def _() -> None:
                @pl.loop(0, num_own)
                def _(query: jax.Array) -> None:
                    rows = pl.ds(query * group, group)
                    plgpu.copy_smem_to_gmem(plain.at[rows], out_ref.at[head, pl.ds(place + query * group, group)])

            plgpu.wait_smem_to_gmem(0)

        @pl.when((warpgroup == consumers) & busy)
        def _() -> None:
            if consumers == 2:
                plgpu.set_max_registers(registers[0], action="decrease")
            if is_fp8:
                load_and_widen_tiles(kv_ref, tables_ref.at[row], head, RawRing(*raw), ring, span)
            else:
                load_tiles(kv_ref, tables_ref.at[row], head, ring, span)

    tiled = tiling(head_dim, dtype)
    scratch = [
        plgpu.SMEM((consumers, TILE_ROWS, head_dim), dtype, transforms=tiled),
        plgpu.SMEM((consumers, TILE_ROWS, head_dim), dtype),
        plgpu.SMEM((stages, tile, head_dim), dtype, transforms=tiled),
        *ring_scratch(stages, tile, 1 if is_fp8 else tile // block_size, head_dim, dtype, consumers=consumers),
        plgpu.Barrier(num_barriers=consumers),
        plgpu.Barrier(),
        *(raw_scratch(raw_tiles, tile, block_size, head_dim, kv_cache.dtype) if is_fp8 else ()),
    ]
    operands = []
    if sinks is not None:
        scratch += [plgpu.SMEM((consumers, TILE_ROWS), jnp.float32), plgpu.Barrier(num_barriers=consumers)]
        operands.append(sinks[:, jnp.arange(TILE_ROWS) % group])
    if scales is not None:
        operands += scales
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=scratch,
        grid=(blocks.shape[0], num_kv_heads),
        grid_names=("block", "head"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(blocks, query_start_loc, seq_lens, block_tables, q, kv_cache, *operands)
