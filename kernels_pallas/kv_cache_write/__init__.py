"""Writing keys and values into the paged KV cache."""

import jax
import jax.numpy as jnp

from kernels_pallas.fp8 import check_scale, is_fp8
from kernels_pallas.kv_cache_write.reference import write_kv_reference

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def write_kv(
    kv_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """Put the keys and values of T tokens into their slots; in place if `kv_cache` is donated.

    A cache of less range than k and v takes what is too large for it as its own largest number: ±448 in float8_e4m3fn, where a
    number beyond it would become NaN. NaN stays NaN.

    Args:
        kv_cache: [N, 2, K, B, D]: N blocks, a K plane and a V plane, K heads, B tokens a block; float32, bfloat16, float16,
            float8_e4m3fn, or uint8 with the bits of that (on a CPU only uint8 is written in place; see `kernels_pallas.fp8`).
        k, v: [T, K, D], float32, bfloat16 or float16.
        slot_mapping: int32 [T], block * B + offset. Tokens with a slot below 0 or from N * B on are dropped (padding). Slots
            that are not dropped must differ from each other.
        k_scale, v_scale: float32 [K], for float8_e4m3fn: what is stored is the number divided by its head's scale. None for 1.

    Returns:
        The cache, [N, 2, K, B, D].

    Raises:
        ValueError: if a shape or dtype does not fit.
    """
    if kv_cache.ndim != 5 or kv_cache.shape[1] != 2:
        raise ValueError(f"kv_cache must be [N, 2, K, B, D], got {kv_cache.shape}")
    if kv_cache.dtype not in FLOATS and not is_fp8(kv_cache.dtype):
        raise ValueError(f"kv_cache must be float32, bfloat16, float16, float8_e4m3fn or uint8, got {kv_cache.dtype}")
    num_tokens = slot_mapping.shape[0] if slot_mapping.ndim == 1 else -1
    expected = (num_tokens, kv_cache.shape[2], kv_cache.shape[4])
    if num_tokens < 0:
        raise ValueError(f"slot_mapping must be [T], got {slot_mapping.shape}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != expected:
            raise ValueError(f"{name} must be [T, K, D] = {expected}, got {x.shape}")
        if x.dtype not in FLOATS:
            raise ValueError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}")
    if slot_mapping.dtype != jnp.int32:
        raise ValueError(f"slot_mapping must be int32, got {slot_mapping.dtype}")
    check_scale("k_scale", k_scale, kv_cache.shape[2], kv_cache.dtype)
    check_scale("v_scale", v_scale, kv_cache.shape[2], kv_cache.dtype)
    return write_kv_reference(kv_cache, k, v, slot_mapping, k_scale=k_scale, v_scale=v_scale)
