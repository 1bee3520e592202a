"""Token embedding, and the same kind of table as output head."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.linear import matmul


class Embedding(nnx.Module):
    """A table [V, M]: ids to vectors, or hidden states to logits."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype) -> None:
        self.table = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids int [T] -> [T, M]. Ids outside the vocabulary (padding) are clamped into it."""
        return jnp.take(self.table[...], token_ids, axis=0, mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, M] -> float32 [R, V]."""
        return matmul(hidden, self.table[...], transposed=True, out_dtype=jnp.float32)
