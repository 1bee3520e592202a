"""The device blocks: how many fit, and the arrays that hold them."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxllm.core.kv_cache_interface import KVCacheConfig


def kv_cache_shape(config: KVCacheConfig) -> tuple[int, int, int, int, int]:
    """[N, 2, K, B, D] of each array of the cache: K plane and V plane, heads before tokens."""
    spec = config.groups[0].spec
    return (config.num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)


def array_dtype(dtype: str, platform: str) -> str:
    """The type of the arrays whose numbers are of `dtype`. On a CPU, uint8 with the bits of 8-bit floating point numbers, which
    XLA leaves in place there; see `kernels_pallas.fp8`."""
    return "uint8" if dtype == "float8_e4m3fn" and platform == "cpu" else dtype


def abstract_kv_caches(
    config: KVCacheConfig, dtype: str, sharding: jax.sharding.Sharding, num_arrays: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`num_arrays` arrays of the cache without their memory, to compile with."""
    array = jax.ShapeDtypeStruct(kv_cache_shape(config), jnp.dtype(dtype), sharding=sharding)
    return (array,) * num_arrays


def allocate_kv_caches(
    config: KVCacheConfig, dtype: str, sharding: jax.sharding.Sharding, num_arrays: int
) -> tuple[jax.Array, ...]:
    """The arrays, all zero: a kernel multiplies what it masks by 0, so a block must never hold NaN from uninitialised memory."""
    make = _zeros_program(kv_cache_shape(config), dtype, sharding)
    return tuple(make() for _ in range(num_arrays))


@functools.lru_cache
def _zeros_program(shape: tuple[int, ...], dtype: str, sharding: jax.sharding.Sharding) -> Callable[[], jax.Array]:
    # Kept, so that a cache allocated anew after a sleep compiles nothing.
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def max_blocks_per_request(max_model_len: int, block_size: int) -> int:
    """P, the width of a block table."""
    return -(-max_model_len // block_size)


def num_blocks_in(
    budget_bytes: int, config: KVCacheConfig, num_devices: int, max_model_len: int, num_arrays: int | None = None
) -> int:
    """How many blocks fit in `budget_bytes` a device, the null block included.

    Args:
        num_devices: that share the heads.
        num_arrays: that such a device holds a part of; None for all.

    Raises:
        ValueError: if they do not hold one request of `max_model_len` tokens.
    """
    num_arrays = config.num_arrays if num_arrays is None else num_arrays
    per_device = config.block_bytes // config.num_arrays * num_arrays // num_devices
    num_blocks = max(budget_bytes, 0) // per_device
    check_num_blocks(
        num_blocks, config, max_model_len, f"{budget_bytes / 2**20:.0f} MiB are left for the KV cache, {num_blocks} blocks"
    )
    return num_blocks


def check_num_blocks(num_blocks: int, config: KVCacheConfig, max_model_len: int, what: str) -> None:
    """Raise ValueError unless the blocks hold one request of `max_model_len` tokens beside the null block."""
    block_size = config.groups[0].spec.block_size
    needed = 1 + sum(_blocks_of_one_request(group.spec.sliding_window, max_model_len, block_size) for group in config.groups)
    if num_blocks < needed:
        raise ValueError(
            f"{what}, but one request of max_model_len {max_model_len} needs {needed} blocks; "
            f"raise gpu_memory_utilization or kv_cache_memory_bytes, or lower max_model_len"
        )


def _blocks_of_one_request(sliding_window: int | None, max_model_len: int, block_size: int) -> int:
    del sliding_window  # a chunk in flight may need all of its blocks at once, so the window saves nothing in the worst case
    return max_blocks_per_request(max_model_len, block_size)


def total_bytes(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """Bytes on one device, of arrays or of their shapes."""
    return sum(math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays)
