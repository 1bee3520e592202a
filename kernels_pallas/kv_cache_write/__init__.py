"""Writing keys and values into the paged KV cache."""

import jax
import jax.numpy as jnp

from kernels_pallas.kv_cache_write.reference import write_kv_reference


def write_kv(kv_cache: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Put the keys and values of T tokens into their slots; in place if `kv_cache` is donated.

    Args:
        kv_cache: [N, 2, K, B, D]: N blocks, a K plane and a V plane, K heads, B tokens a block.
        k, v: [T, K, D], dtype of kv_cache.
        slot_mapping: int32 [T], block * B + offset. Tokens with a slot below 0 or from N * B on are dropped (padding). Slots
            that are not dropped must differ from each other.

    Returns:
        The cache, [N, 2, K, B, D].

    Raises:
        ValueError: if a shape or dtype does not fit.
    """
    if kv_cache.ndim != 5 or kv_cache.shape[1] != 2:
        raise ValueError(f"kv_cache must be [N, 2, K, B, D], got {kv_cache.shape}")
    num_tokens = slot_mapping.shape[0] if slot_mapping.ndim == 1 else -1
    expected = (num_tokens, kv_cache.shape[2], kv_cache.shape[4])
    if num_tokens < 0:
        raise ValueError(f"slot_mapping must be [T], got {slot_mapping.shape}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != expected:
            raise ValueError(f"{name} must be [T, K, D] = {expected}, got {x.shape}")
        if x.dtype != kv_cache.dtype:
            raise ValueError(f"{name} must have the dtype of kv_cache, {kv_cache.dtype}, got {x.dtype}")
    if slot_mapping.dtype != jnp.int32:
        raise ValueError(f"slot_mapping must be int32, got {slot_mapping.dtype}")
    return write_kv_reference(kv_cache, k, v, slot_mapping)
