"""A producer for caches of 8-bit numbers: it loads pages, and makes 16-bit tiles of them for the tensor cores.

pages --TMA--> ring of 8-bit tiles, --registers--> ring of tiles of K, ring of tiles of V
               of K and V in turn                  as any producer's
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention.kernel_mosaic import LAYOUT, Ring, Span, tiling

# Columns that are widened at a time, for the registers.
PART = 64


class RawRing(NamedTuple):
    """Tiles of 8-bit numbers in shared memory. Only the producer touches them, so no barrier says that a place is free."""

    ref: Any  # [places, tile, D]
    full: Any  # [places] barriers, completed by the copies of a tile's pages


def raw_scratch(places: int, tile: int, block_size: int, head_dim: int, dtype: jnp.dtype) -> list[Any]:
    """Scratch of a `RawRing`, in its order."""
    # Rows of 80 bytes do not divide into columns of 32, the narrowest that there are.
    transforms = tiling(head_dim, dtype, most=PART) if head_dim % 32 == 0 else ()
    return [
        plgpu.SMEM((places, tile, head_dim), dtype, transforms=transforms),
        plgpu.Barrier(num_arrivals=tile // block_size, num_barriers=places),
    ]


def load_and_widen_tiles(kv_ref: Any, table_ref: Any, head: jax.Array, raw: RawRing, ring: Ring, span: Span) -> None:
    """The producer: copies of pages are under way for as many tiles as the raw ring has places, and the oldest is widened into
    the ring as places in it come free. What lies behind the row's end, which may be NaN, becomes 0 in v.

    Args:
        kv_ref: [N, 2, K, B, D], float8_e4m3fn.
        table_ref: int32 [P], the row's block table. Entries beyond its last block are not read.
    """
    places, tile, _ = raw.ref.shape
    stages, _, _ = ring.k_ref.shape
    block_size = kv_ref.shape[3]
    pages = tile // block_size
    last = lax.div(span.num_tokens - 1, jnp.int32(block_size))

    def load(step: jax.Array, plane: int, place: jax.Array) -> None:
        first = (span.first_tile + span.num_tiles - 1 - step) * pages
        for page in range(pages):
            block = table_ref[jnp.minimum(first + page, last)]
            to = raw.ref.at[place, pl.ds(page * block_size, block_size)]
            plgpu.copy_gmem_to_smem(kv_ref.at[block, plane, head], to, raw.full.at[place])

    # Copy number n is of tile n // 2, K or V, into place n % places.
    for number in range(places):

        @pl.when(number < 2 * span.num_tiles)
        def _(number: int = number) -> None:
            load(jnp.int32(number // 2), number % 2, jnp.int32(number))

    @pl.loop(0, span.num_tiles)
    def _(step: jax.Array) -> None:
        slot = lax.rem(step, jnp.int32(stages))
        num_filled = span.num_tokens - (span.first_tile + span.num_tiles - 1 - step) * tile
        for plane, tiles, full, free in ((0, ring.k_ref, ring.k_full, ring.k_free), (1, ring.v_ref, ring.v_full, ring.v_free)):
            place = lax.rem(2 * step + plane, jnp.int32(places))
            plgpu.barrier_wait(raw.full.at[place])

            @pl.when(step >= stages)
            def _(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            _widen(raw.ref.at[place], tiles.at[slot], num_filled if plane == 1 else None)
            # Also says that the place has been read.
            plgpu.commit_smem()
            plgpu.barrier_arrive(full.at[slot])
            following = lax.div(2 * step + plane + places, jnp.int32(2))

            @pl.when(following < span.num_tiles)
            def _(following: jax.Array = following, plane: int = (plane + places) % 2, place: jax.Array = place) -> None:
                load(following, plane, place)


def _widen(raw_ref: Any, out_ref: Any, num_filled: jax.Array | None) -> None:
    """[tile, D] of 8-bit numbers to 16 bits, with zeros in rows from `num_filled` on."""
    tile, head_dim = raw_ref.shape
    width = PART if head_dim % PART == 0 else head_dim
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    for column in range(0, head_dim, width):
        values = plgpu.load(raw_ref.at[:, pl.ds(column, width)], layout=layout, optimized=False)
        # The device converts to float16 alone, which holds every number of 8 bits, as bfloat16 does.
        values = values.astype(jnp.float16)
        if out_ref.dtype != jnp.float16:
            values = values.astype(jnp.float32).astype(out_ref.dtype)
        if num_filled is not None:
            rows = plgpu.broadcasted_iota(jnp.int32, (tile, width), 0, layout=layout)
            values = jnp.where(rows < num_filled, values, jnp.zeros_like(values))
        out_ref[:, pl.ds(column, width)] = plgpu.layout_cast(values, LAYOUT)
