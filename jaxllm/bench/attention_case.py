"""A batch for the attention kernels, and what attention is in float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import Call


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of `paged_attention`, by its names."""

    q: jax.Array
    kv_cache: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array
    num_decodes: jax.Array
    decode_only: bool

    @classmethod
    def random(
        cls,
        seq_lens: Sequence[int],
        num_queries: Sequence[int],
        num_kv_heads: int,
        group: int,
        head_dim: int,
        block_size: int,
        shuffled: bool = True,
    ) -> "AttentionCase":
        """Normal values in bfloat16, each request's blocks scattered over the cache unless `shuffled` is False.

        Args:
            num_queries: of each request; those with one come first.
        """
        rng = np.random.default_rng(0)
        width = -(-max(seq_lens) // block_size)
        num_blocks = len(seq_lens) * width + 1
        blocks = np.arange(1, num_blocks, dtype=np.int32)
        tables = (rng.permutation(blocks) if shuffled else blocks).reshape(len(seq_lens), width)
        shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
        starts = np.concatenate([[0], np.cumsum(num_queries)]).astype(np.int32)
        num_decodes = next((i for i, count in enumerate(num_queries) if count != 1), len(num_queries))
        return cls(
            q=_normal(0, (int(starts[-1]), num_kv_heads * group, head_dim)),
            kv_cache=_normal(1, shape),
            block_tables=jnp.asarray(tables),
            seq_lens=jnp.asarray(seq_lens, jnp.int32),
            query_start_loc=jnp.asarray(starts),
            num_decodes=jnp.int32(num_decodes),
            decode_only=num_decodes == len(num_queries),
        )

    @property
    def shapes(self) -> Call:
        """What an implementation goes by."""
        _, _, num_kv_heads, block_size, head_dim = self.kv_cache.shape
        return Call(self.q.shape[1], num_kv_heads, head_dim, block_size, str(self.q.dtype))

    def call(
        self, function: Callable[..., jax.Array], implementation: str, window: int | None, q: jax.Array, kv_cache: jax.Array
    ) -> jax.Array:
        """`paged_attention` of these queries over this cache; everything else is the case's."""
        return function(
            q,
            kv_cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            self.num_decodes,
            scale=q.shape[-1] ** -0.5,
            sliding_window=window,
            decode_only=self.decode_only,
            implementation=implementation,
        )

    def attend(self, function: Callable[..., jax.Array], implementation: str, window: int | None) -> jax.Array:
        """The result of an implementation, in one program."""
        run = jax.jit(lambda q, kv_cache: self.call(function, implementation, window, q, kv_cache))
        return run(self.q, self.kv_cache)

    def in_float64(self, window: int | None) -> np.ndarray:
        """[T, H, D], request by request and query by query."""
        q, cache = np.asarray(self.q, np.float64), np.asarray(self.kv_cache, np.float64)
        num_heads, head_dim = q.shape[1:]
        group = num_heads // cache.shape[2]
        out = np.zeros_like(q)
        starts = np.asarray(self.query_start_loc)
        for row, (table, length) in enumerate(zip(np.asarray(self.block_tables), np.asarray(self.seq_lens), strict=True)):
            k, v = (
                cache[table, plane].transpose(0, 2, 1, 3).reshape(-1, cache.shape[2], head_dim).repeat(group, axis=1)
                for plane in (0, 1)
            )
            for token in range(starts[row], starts[row + 1]):
                last = length - (starts[row + 1] - token)
                first = 0 if window is None else max(0, last - window + 1)
                logits = np.einsum("hd,nhd->hn", q[token], k[first : last + 1]) * head_dim**-0.5
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                out[token] = np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), v[first : last + 1])
        return out


def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Normal values in bfloat16. Few of them come from the host: compiling a program for each shape takes longer."""
    if math.prod(shape) < 2**20:
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
