"""Attention written down plainly in float64, and batches to try it on."""

from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np


@dataclass
class Case:
    """A ragged batch. Everything that no row owns holds NaN, or nonsense if it is an integer."""

    q: np.ndarray  # [T, H, D]
    kv_cache: np.ndarray  # [N, 2, K, B, D]
    block_tables: np.ndarray  # [R, P]
    seq_lens: np.ndarray  # [R]
    query_start_loc: np.ndarray  # [R + 1]
    num_decodes: int

    def arrays(self):
        """The arguments of `paged_attention`, in order."""
        integers = (self.block_tables, self.seq_lens, self.query_start_loc, np.int32(self.num_decodes))
        return (jnp.asarray(self.q), jnp.asarray(self.kv_cache), *(jnp.asarray(x) for x in integers))


def make_case(
    rng,
    rows,
    *,
    heads,
    kv_heads,
    head_dim,
    block_size,
    pages,
    num_rows=None,
    num_tokens=None,
    num_blocks=None,
    dtype=np.float32,
):
    """`rows`: (tokens, queries) of each row; rows with one query must come first to count as decodes."""
    num_rows = num_rows or len(rows)
    seq_lens, query_start_loc = np.zeros(num_rows, np.int32), np.zeros(num_rows + 1, np.int32)
    for row, (length, queries) in enumerate(rows):
        seq_lens[row] = length
        query_start_loc[row + 1 :] = query_start_loc[row] + queries
    num_decodes = next((row for row, (_, queries) in enumerate(rows) if queries != 1), len(rows))
    num_blocks = num_blocks or 3 + sum(-(-length // block_size) for length, _ in rows)
    blocks = iter(rng.permutation(num_blocks - 1) + 1)
    tables = rng.integers(-9, num_blocks + 9, (num_rows, pages)).astype(np.int32)
    cache = np.full((num_blocks, 2, kv_heads, block_size, head_dim), np.nan, np.float32)
    for row, (length, _) in enumerate(rows):
        for page in range(-(-length // block_size)):
            tables[row, page] = block = next(blocks)
            filled = min(block_size, length - page * block_size)
            cache[block, :, :, :filled] = rng.standard_normal((2, kv_heads, filled, head_dim))
    num_tokens = num_tokens or int(query_start_loc[-1])
    q = rng.standard_normal((num_tokens, heads, head_dim)).astype(np.float32)
    q[query_start_loc[-1] :] = np.nan
    return Case(q.astype(dtype), cache.astype(dtype), tables, seq_lens, query_start_loc, num_decodes)


def case_of(rows, shape, dtype, *, make=make_case, **options):
    """By `make`, with room for a page more than the longest row has. `shape`: block size, heads, KV heads, head size."""
    block_size, heads, kv_heads, head_dim = shape
    pages = max(-(-length // block_size) for length, _ in rows) + 1
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "pages": pages}
    return make(np.random.default_rng(0), rows, dtype=dtype, **sizes, **options)


def attention_spec(case, *, scale, sliding_window=None, logit_soft_cap=None, sinks=None):
    """float64 [T, H, D]: one token and one head at a time."""
    q, cache = case.q.astype(np.float64), case.kv_cache.astype(np.float64)
    block_size, group = cache.shape[3], q.shape[1] // cache.shape[2]
    out = np.zeros(q.shape)
    for row, length in enumerate(case.seq_lens):
        slots = [(case.block_tables[row, i // block_size], i % block_size) for i in range(length)]
        start, stop = case.query_start_loc[row : row + 2]
        for token in range(start, stop):
            position = length - (stop - token)
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(q.shape[1]):
                keys = np.array([cache[block, 0, head // group, offset] for block, offset in slots[first : position + 1]])
                values = np.array([cache[block, 1, head // group, offset] for block, offset in slots[first : position + 1]])
                logits = keys @ q[token, head] * scale
                if logit_soft_cap is not None:
                    logits = logit_soft_cap * np.tanh(logits / logit_soft_cap)
                sink = -np.inf if sinks is None else sinks[head]
                largest = max(logits.max(), sink)
                weights = np.exp(logits - largest)
                total = weights.sum() + np.exp(sink - largest)
                out[token, head] = weights @ values / total
    return out


@dataclass
class Fp8Case(Case):
    """A batch whose cache is float8_e4m3fn: what is stored times its head's scale is meant."""

    k_scale: np.ndarray  # float32 [K]
    v_scale: np.ndarray

    def scales(self):
        """The arguments of `paged_attention` that are these scales."""
        return {"k_scale": jnp.asarray(self.k_scale), "v_scale": jnp.asarray(self.v_scale)}

    def plain(self):
        """What is meant, in float64."""
        scales = np.stack([self.k_scale, self.v_scale]).astype(np.float64)
        cache = self.kv_cache.astype(np.float64) * scales[None, :, :, None, None]
        return Case(self.q, cache, self.block_tables, self.seq_lens, self.query_start_loc, self.num_decodes)


def fp8_case(rng, rows, *, kv_heads, **options):
    """As `make_case`; its numbers are rounded, and then get scales between 0.4 and 2.5 by head."""
    case = make_case(rng, rows, kv_heads=kv_heads, **options)
    case.kv_cache = case.kv_cache.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    k_scale, v_scale = np.exp2(rng.uniform(-1.3, 1.3, (2, kv_heads))).astype(np.float32)
    return Fp8Case(**vars(case), k_scale=k_scale, v_scale=v_scale)
