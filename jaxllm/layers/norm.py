"""Normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32, rounded to the dtype of x before the scale.

    The order of rounding is that of Hugging Face's LlamaRMSNorm. Source: Zhang and Sennrich, 2019, arXiv 1910.07467.
    """

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size] -> the same shape and dtype."""
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        return (x32 * jax.lax.rsqrt(variance + self.eps)).astype(x.dtype) * self.scale[...]
