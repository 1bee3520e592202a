"""Token embedding, and the same kind of table as output head."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.linear import matmul
from kernels_pallas.llvm.matmul import packed_columns, packed_matmul, packed_shape


class Embedding(nnx.Module):
    """A table [V, M]: ids to vectors, or hidden states to logits.

    Args:
        packed: the table lies as `kernels_pallas.llvm.matmul.pack` arranges its transpose.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype, packed: bool = False) -> None:
        shape = packed_shape(hidden_size, vocab_size, jnp.dtype(dtype).name) if packed else (vocab_size, hidden_size)
        self.table = nnx.Param(jnp.zeros(shape, dtype))
        self.vocab_size = vocab_size
        self.packed = packed

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids int [T] -> [T, M]. Ids outside the vocabulary (padding) are clamped into it."""
        if self.packed:
            return packed_columns(self.table[...], jnp.clip(token_ids, 0, self.vocab_size - 1))
        return jnp.take(self.table[...], token_ids, axis=0, mode="clip")

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """hidden [R, M] -> float32 [R, V]. `num_rows` as in `Linear`."""
        if self.packed:
            return packed_matmul(hidden, self.table[...], self.vocab_size, num_rows=num_rows, out_dtype=jnp.float32)
        return matmul(hidden, self.table[...], transposed=True, out_dtype=jnp.float32)
