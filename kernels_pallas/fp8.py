"""8-bit floating point in a KV cache: 1 sign, 4 exponent and 3 mantissa bits (e4m3, without infinities), and a scale a head.

An array of it is float8_e4m3fn, or uint8 with the same bits. What XLA compiles for a CPU turns whole arrays of float8_e4m3fn into
float16 wherever one is scattered into or gathered from, and copies one whose bits are looked at; an array of uint8 it leaves in
place. On a GPU both are the same.
"""

import jax
import jax.numpy as jnp
from jax import lax

FP8 = jnp.dtype(jnp.float8_e4m3fn)
# Numbers beyond it have no code but NaN's.
FP8_MAX = float(jnp.finfo(FP8).max)


def is_fp8(dtype: jnp.dtype) -> bool:
    """Whether a cache of this type holds 8-bit floating point numbers."""
    return jnp.dtype(dtype) in (FP8, jnp.dtype(jnp.uint8))


def bits_of(x: jax.Array) -> jax.Array:
    """An array that is moved about but not calculated with: uint8 for float8_e4m3fn, others as they are."""
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == FP8 else x


def values_of(x: jax.Array) -> jax.Array:
    """The numbers in what `bits_of` gave."""
    return lax.bitcast_convert_type(x, FP8) if x.dtype == jnp.uint8 else x


def saturated(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x as a cache of `dtype` keeps it. What is too large for it becomes its largest number; NaN stays NaN."""
    dtype = FP8 if is_fp8(dtype) else jnp.dtype(dtype)
    largest = float(jnp.finfo(dtype).max)
    if largest < float(jnp.finfo(x.dtype).max):
        # In float32, since bfloat16 would round the bounds.
        x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    return x.astype(dtype)


def check_scale(name: str, scale: jax.Array | None, num_kv_heads: int, cache_dtype: jnp.dtype) -> None:
    """Raise ValueError unless it is None, or float32 [K] for a cache of 8-bit numbers."""
    if scale is None:
        return
    if not is_fp8(cache_dtype):
        raise ValueError(f"{name} needs a kv_cache of float8_e4m3fn, got {jnp.dtype(cache_dtype)}")
    if scale.shape != (num_kv_heads,) or scale.dtype != jnp.float32:
        raise ValueError(f"{name} must be float32 [K] = {(num_kv_heads,)}, got {scale.dtype} {scale.shape}")
