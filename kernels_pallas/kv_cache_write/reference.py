"""write_kv as one XLA scatter."""

import jax
import jax.numpy as jnp

from kernels_pallas.fp8 import bits_of, saturated, values_of


def write_kv_reference(
    kv_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> jax.Array:
    """See `kernels_pallas.kv_cache_write.write_kv`."""
    num_blocks, _, _, block_size, _ = kv_cache.shape
    # A negative index would count from the end, so padding is sent past the end, where a scatter drops it.
    num_slots = num_blocks * block_size
    outside = num_slots + jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)
    slots = jnp.where((slot_mapping < 0) | (slot_mapping >= num_slots), outside, slot_mapping)
    blocks, offsets = slots // block_size, slots % block_size
    updates = jnp.stack([_stored(k, k_scale, kv_cache.dtype), _stored(v, v_scale, kv_cache.dtype)], axis=1)
    bits = bits_of(kv_cache).at[blocks, :, :, offsets].set(updates, mode="drop", unique_indices=True)
    return bits if kv_cache.dtype == jnp.uint8 else values_of(bits)


def _stored(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """The bits of x [T, K, D] in a cache of `dtype`."""
    if scale is not None:
        x = x.astype(jnp.float32) / scale[:, None]
    return bits_of(saturated(x, dtype))
