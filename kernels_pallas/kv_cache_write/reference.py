"""write_kv as one XLA scatter."""

import jax
import jax.numpy as jnp


def write_kv_reference(kv_cache: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """See `kernels_pallas.kv_cache_write.write_kv`."""
    num_blocks, _, _, block_size, _ = kv_cache.shape
    # A negative index would count from the end, so padding is sent past the end, where a scatter drops it.
    num_slots = num_blocks * block_size
    outside = num_slots + jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)
    slots = jnp.where((slot_mapping < 0) | (slot_mapping >= num_slots), outside, slot_mapping)
    blocks, offsets = slots // block_size, slots % block_size
    updates = jnp.stack([k, v], axis=1)
    return kv_cache.at[blocks, :, :, offsets].set(updates, mode="drop", unique_indices=True)
