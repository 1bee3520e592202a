"""What both Mosaic GPU kernels are made of: a warpgroup that loads pages, and warpgroups that attend to them.

        pages of the cache --TMA--> ring of tiles of K, ring of tiles of V --wgmma--> scores, weights, sums in registers
        producer warpgroup          full / free barriers a tile                      consumer warpgroup(s)

A span is worked on from its last tile to its first. The softmax is the online one (Milakov and Gimelshein, 2018, arXiv
1805.02867), in powers of 2. Tiles that every query sees whole take no mask; those at the edge of causality, window or row do.

Each synchronisation is a statement on a line of its own: the tests remove them one at a time.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.compat import Interpret, add_product, product_with_transposed
from kernels_pallas.paged_attention.config import TILE_ROWS
from kernels_pallas.paged_attention.reference import Options

LOG2_E = math.log2(math.e)
# The largest logit of no logits. Finite, so that differences of two of them are no NaN.
NO_LOGIT = -1e30
LAYOUT = plgpu.Layout.WGMMA


class Ring(NamedTuple):
    """Tiles in shared memory, and the barriers that say who may touch them."""

    k_ref: Any  # [stages, tile, D]
    v_ref: Any
    k_full: Any  # [stages] barriers, completed by the copies of a tile's pages, or by who writes it
    v_full: Any
    k_free: Any  # [stages] barriers, completed by the consumers; nobody arrives for a tile that has no successor
    v_free: Any


class Span(NamedTuple):
    """int32 scalars: which tiles of a row a block works on, and what its queries see.

    `lowest` and `highest` are the positions of its first and last query, `num_tokens` the row's length.
    """

    first_tile: jax.Array
    num_tiles: jax.Array
    lowest: jax.Array
    highest: jax.Array
    num_tokens: jax.Array


def tiling(head_dim: int, dtype: jnp.dtype, most: int = 128) -> tuple[Any, ...]:
    """How rows of `head_dim` values lie in shared memory for copies and tensor cores, in columns of at most `most` bytes."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = min(plgpu.find_swizzle(head_dim * bits), most)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


def ring_scratch(stages: int, tile: int, copies: int, head_dim: int, dtype: jnp.dtype, consumers: int) -> list[Any]:
    """Scratch of all of a `Ring` but k_ref, in its order; `copies` fill a tile."""
    return [
        plgpu.SMEM((stages, tile, head_dim), dtype, transforms=tiling(head_dim, dtype)),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    ]


def load_tiles(kv_ref: Any, table_ref: Any, head: jax.Array, ring: Ring, span: Span) -> None:
    """The producer: copy the pages of each tile into the ring as places in it come free.

    Args:
        kv_ref: [N, 2, K, B, D].
        table_ref: int32 [P], the row's block table. Entries beyond its last block are not read.
    """
    stages, tile, _ = ring.k_ref.shape
    block_size = kv_ref.shape[3]
    pages = tile // block_size
    last = lax.div(span.num_tokens - 1, jnp.int32(block_size))

    @pl.loop(0, span.num_tiles)
    def _(step: jax.Array) -> None:
        slot = lax.rem(step, jnp.int32(stages))
        first = (span.first_tile + span.num_tiles - 1 - step) * pages
        for plane, tiles, full, free in ((0, ring.k_ref, ring.k_full, ring.k_free), (1, ring.v_ref, ring.v_full, ring.v_free)):

            @pl.when(step >= stages)
            def _(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            # More than two pages written out one after the other cost registers, and with a window a block's place on the core.
            @pl.loop(0, pages, unroll=pages <= 2)
            def _(page: jax.Array, plane: int = plane, tiles: Any = tiles, full: Any = full) -> None:
                block = table_ref[jnp.minimum(first + page, last)]
                place = tiles.at[slot, pl.ds(page * block_size, block_size)]
                plgpu.copy_gmem_to_smem(kv_ref.at[block, plane, head], place, full.at[slot])


def attend(
    q_ref: Any,
    ring: Ring,
    span: Span,
    options: Options,
    *,
    query_of_row: Callable[[jax.Array], jax.Array] | None,
    start: tuple[jax.Array, jax.Array] | None,
    k_scale: jax.Array | None,
    wipe: Callable[[Callable[[], None]], None] | None,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A consumer: attention of the 64 rows of q over a span of tiles.

    Args:
        q_ref: [64, D] in shared memory.
        query_of_row: rows int32 [64, tile] -> positions of their queries; None where all rows are of one query.
        start: float32 [64] each: largest logit (of powers of 2) and sum of the weights so far; None for none.
        k_scale: float32 scalar, what all keys are to be multiplied by; None for nothing.
        wipe: called if the last tile reaches beyond the row, with a function that makes the values there 0; None if they are.

    Returns:
        float32: weighted sums [64, D], largest logits [64] and sums of weights [64].
    """
    stages, tile, head_dim = ring.k_ref.shape
    cap, window = options.logit_soft_cap, options.sliding_window
    factor: float | jax.Array = 1.0
    scale: float | jax.Array = options.scale * LOG2_E if cap is None else options.scale / cap
    if k_scale is not None:
        scale = k_scale * scale
    if cap is None:
        factor = scale
    stop_tile = span.first_tile + span.num_tiles
    # Whether the row ends inside the first tile worked on. What lies behind its end may be NaN, which a weight of 0 does not
    # undo; it is wiped here, before the loops, while hardly any registers are in use.
    ragged = stop_tile * tile > span.num_tokens

    if wipe is not None:

        @pl.when(ragged)
        def _() -> None:
            plgpu.barrier_wait(ring.v_full.at[0])
            wipe(partial(_wipe, ring.v_ref.at[0], span.num_tokens - (stop_tile - 1) * tile))

    def body(step: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        acc, best, total = carry
        slot = lax.rem(step, jnp.int32(stages))
        first_key = (stop_tile - 1 - step) * tile
        has_successor = step + stages < span.num_tiles
        plgpu.barrier_wait(ring.k_full.at[slot])
        scores = product_with_transposed(q_ref, ring.k_ref.at[slot], interpret)

        @pl.when(has_successor)
        def _() -> None:
            plgpu.barrier_arrive(ring.k_free.at[slot])

        if cap is not None:
            scores = jnp.tanh(scores * scale) * (cap * LOG2_E)
        if masked:
            keys = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS, tile), 1, layout=LAYOUT) + first_key
            queries = span.highest
            if query_of_row is not None:
                queries = query_of_row(plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS, tile), 0, layout=LAYOUT))
            seen = keys <= queries
            if window is not None:
                seen = seen & (keys > queries - window)
            scores = jnp.where(seen, scores, -jnp.inf)
        new_best = jnp.maximum(best, scores.max(axis=1) * factor)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_best, scores.shape, [0]))
        keep = jnp.exp2(best - new_best)
        total = total * keep + weights.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
        if masked and wipe is not None:

            @pl.when((step > 0) | ~ragged)
            def _() -> None:
                plgpu.barrier_wait(ring.v_full.at[slot])
        else:
            plgpu.barrier_wait(ring.v_full.at[slot])
        acc = add_product(acc, weights.astype(ring.v_ref.dtype), ring.v_ref.at[slot], interpret)

        @pl.when(has_successor)
        def _() -> None:
            plgpu.barrier_arrive(ring.v_free.at[slot])

        return acc, new_best, total

    acc = plgpu.layout_cast(jnp.zeros((TILE_ROWS, head_dim), jnp.float32), LAYOUT)
    if start is None:
        best = plgpu.layout_cast(jnp.full((TILE_ROWS,), NO_LOGIT, jnp.float32), LAYOUT.reduce(1))
        total = plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.float32), LAYOUT.reduce(1))
    else:
        best, total = start
    # Steps from whole_start to whole_stop have tiles that every query sees whole.
    whole_start = jnp.clip(stop_tile - lax.div(span.lowest + 1, jnp.int32(tile)), 0, span.num_tiles)
    whole_stop = span.num_tiles
    if window is not None:
        left = jnp.maximum(span.highest - window + 1, 0)
        whole_stop = jnp.clip(stop_tile - lax.div(left + (tile - 1), jnp.int32(tile)), whole_start, span.num_tiles)
    carry = lax.fori_loop(0, whole_start, partial(body, masked=True), (acc, best, total))
    carry = lax.fori_loop(whole_start, whole_stop, partial(body, masked=False), carry)
    if window is not None:
        carry = lax.fori_loop(whole_stop, span.num_tiles, partial(body, masked=True), carry)
    return carry


def _wipe(v_ref: Any, num_filled: jax.Array) -> None:
    """Zeros in rows from `num_filled` on of v [tile, D]."""
    tile, head_dim = v_ref.shape
    width = 64 if head_dim % 64 == 0 else head_dim  # a part at a time, for the registers
    rows = plgpu.broadcasted_iota(jnp.int32, (tile, width), 0, layout=LAYOUT)
    for column in range(0, head_dim, width):
        part = v_ref.at[:, pl.ds(column, width)]
        values = plgpu.load(part, layout=LAYOUT, optimized=False)
        part[...] = jnp.where(rows < num_filled, values, jnp.zeros_like(values))
    plgpu.commit_smem()
