"""Sizes of the kernels: what is cut into tiles of which size, and which calls the kernels can serve."""

from dataclasses import dataclass

import jax.numpy as jnp

from kernels_pallas.fp8 import is_fp8

# Rows of a tensor-core tile that one warpgroup works on.
TILE_ROWS = 64
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64)


@dataclass(frozen=True)
class MosaicConfig:
    """Static sizes of the Mosaic GPU kernels.

    Attributes:
        tile, prefill_tile: keys of one step of the decode kernel and of the prefill kernel.
        decode_stages, prefill_stages: tiles of K, and of V, that a block has in flight; if the cache is of 8-bit numbers, tiles
            widened to 16.
        decode_raw_tiles, prefill_raw_tiles: tiles, of K and V together, that are then in flight; else 0.
        decode_slots: work items a KV head that fill the device; a call with that many or more rows has an item a row.
        min_tiles: fewest tiles worth an item of their own.
        prefill_consumers: warpgroups of a prefill block that compute.
        queries_per_warpgroup: queries of a prefill block that one of these works on.
    """

    tile: int
    decode_stages: int
    prefill_stages: int
    decode_raw_tiles: int
    prefill_raw_tiles: int
    prefill_consumers: int
    decode_slots: int
    min_tiles: int
    queries_per_warpgroup: int
    prefill_tile: int = 64


def mosaic_config(group: int, num_kv_heads: int, head_dim: int, platform: str, *, fp8_cache: bool = False) -> MosaicConfig:
    """Sizes for a Hopper GPU.

    Two decode blocks share a core (132 cores), so that one loads while the other computes: each may take 113 KiB of shared
    memory, of which a stage of K and V takes `2 * tile * D * 2` bytes. With 2 stages of 64 keys and D = 128 a core has
    128 KiB in flight, four times what its share of the memory's bandwidth times latency asks for. Prefill blocks have a core
    alone: 227 KiB for two tiles of queries, two of results and the stages.

    Tiles of a cache of 8-bit numbers are loaded into places of half the size, three of which leave room for two blocks of
    D = 128, and widened into the stages.

    Args:
        platform: on "cpu", where the kernels are interpreted, few items: each costs milliseconds, idle or not.
    """
    decode_stages, prefill_stages = (4 if head_dim <= 64 else 2), (3 if head_dim <= 128 else 2)
    decode_raw_tiles, prefill_raw_tiles = 0, 0
    if fp8_cache:
        decode_stages = prefill_stages = 2 if head_dim <= 128 else 1
        decode_raw_tiles, prefill_raw_tiles = (3 if head_dim == 128 else 6), 4
    return MosaicConfig(
        tile=64,
        decode_stages=decode_stages,
        prefill_stages=prefill_stages,
        decode_raw_tiles=decode_raw_tiles,
        prefill_raw_tiles=prefill_raw_tiles,
        prefill_consumers=2 if head_dim <= 128 else 1,
        decode_slots=2 if platform == "cpu" else max(1, 2 * 132 // num_kv_heads),
        min_tiles=1 if platform == "cpu" else 4,
        queries_per_warpgroup=TILE_ROWS // group,
    )


def mosaic_refusal(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype,
    max_decode_queries: int,
) -> str | None:
    """Why the Mosaic GPU kernels cannot serve such a call, on whatever device; None if they can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype).name} is not bfloat16 or float16"
    if jnp.dtype(cache_dtype) != jnp.dtype(dtype) and not is_fp8(cache_dtype):
        return f"the KV cache is {jnp.dtype(cache_dtype).name}, not {jnp.dtype(dtype).name} as the queries are"
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if block_size not in BLOCK_SIZES:
        return f"block size {block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}"
    group = num_heads // num_kv_heads
    if group > 16:
        return f"{group} query heads share a KV head, more than 16"
    if group * max_decode_queries > TILE_ROWS:
        return f"{max_decode_queries} queries of {group} heads are more than a tile of {TILE_ROWS}"
    return None
