"""paged_attention in plain XLA: the specification of the kernels, and what runs on CPUs.

Queries are worked on in blocks, keys in steps of a few pages, with an online softmax (Milakov and Gimelshein, 2018,
arXiv 1805.02867): a block of decode rows of similar length, or a tile of one row's queries. The loops run only over blocks
and pages that are in use, so no result of the size of the whole context exists and the work follows the lengths.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.fp8 import bits_of, values_of

# The logit of a key that must not be seen. Finite, so that differences of two of them are no NaN.
UNSEEN = -1e30


class Options(NamedTuple):
    """What is the same for all queries. Fields as the arguments of `paged_attention`."""

    scale: float
    sliding_window: int | None
    logit_soft_cap: float | None


class Scales(NamedTuple):
    """Of the keys and values of each KV head, float32 [K] each: a number of the cache times its head's scale is what is meant."""

    k: jax.Array
    v: jax.Array


def paged_attention_reference(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    sinks: jax.Array | None,
    scales: Scales | None,
    decode_only: bool,
) -> jax.Array:
    """See `kernels_pallas.paged_attention.paged_attention`."""
    num_tokens, num_rows = q.shape[0], block_tables.shape[0]
    num_kv_heads = kv_cache.shape[2]
    options = Options(scale, sliding_window, logit_soft_cap)
    kv_cache = bits_of(kv_cache)
    grouped = q.reshape(num_tokens, num_kv_heads, -1, q.shape[2])
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, -1)
    if decode_only:
        out = _decode(grouped, kv_cache, block_tables, seq_lens, sinks, scales, options)
        valid = seq_lens > 0
    else:
        num_firsts = min(num_rows, num_tokens)
        lens = jnp.where(jnp.arange(num_firsts) < num_decodes, seq_lens[:num_firsts], 0)
        first = _decode(grouped[:num_firsts], kv_cache, block_tables[:num_firsts], lens, sinks, scales, options)
        out = _prefill(grouped, first, kv_cache, block_tables, seq_lens, query_start_loc, num_decodes, sinks, scales, options)
        valid = jnp.arange(num_tokens) < query_start_loc[-1]
    return jnp.where(valid[:, None, None], out.reshape(q.shape), 0)


def _decode(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    sinks: jax.Array | None,
    scales: Scales | None,
    options: Options,
) -> jax.Array:
    """One query a row: q [R, K, G, D] -> the same; anything for rows of length 0."""
    num_rows = q.shape[0]
    rows, pages = decode_tile(num_rows, kv_cache.shape[3], block_tables.shape[1])
    attend = partial(_attend, kv_cache=kv_cache, sinks=sinks, scales=scales, pages=pages, options=options)
    if num_rows <= rows:
        return attend(q, (seq_lens - 1)[:, None], block_tables)
    # Rows of similar length share a block, so that few of its pages are padding; empty rows come last and cost nothing.
    by_length = jnp.argsort(-seq_lens)
    order = jnp.pad(by_length, (0, -num_rows % rows), mode="edge")
    num_blocks = (jnp.sum(seq_lens > 0) + rows - 1) // rows

    def body(block: jax.Array, out: jax.Array) -> jax.Array:
        members = lax.dynamic_slice_in_dim(order, block * rows, rows)
        result = attend(q[members], (seq_lens[members] - 1)[:, None], block_tables[members])
        return lax.dynamic_update_slice_in_dim(out, result, block * rows, axis=0)

    out = lax.fori_loop(0, num_blocks, body, jnp.zeros((order.shape[0], *q.shape[1:]), q.dtype))
    return out[jnp.argsort(by_length)]


def decode_tile(num_rows: int, block_size: int, pages_per_row: int) -> tuple[int, int]:
    """(rows a block, pages a step): enough keys to hide the cost of starting a step, few enough to waste little on short rows."""
    rows = min(num_rows, 16)
    tokens = 256 if rows <= 4 else 128
    return rows, min(max(1, tokens // block_size), pages_per_row)


PREFILL_TOKENS = 64
PREFILL_KEYS = 128


def _prefill(
    q: jax.Array,
    out: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    sinks: jax.Array | None,
    scales: Scales | None,
    options: Options,
) -> jax.Array:
    """Rows from `num_decodes` on: q [T, K, G, D] -> the same, `out` [≤ T, K, G, D] is kept for the tokens before theirs."""
    num_tokens, num_kv_heads, group, head_dim = q.shape
    num_rows, pages_per_row = block_tables.shape
    block_size = kv_cache.shape[3]
    size = min(PREFILL_TOKENS, num_tokens)
    pages = min(max(1, PREFILL_KEYS // block_size), pages_per_row)
    starts, stops = query_start_loc[:-1], query_start_loc[1:]
    tiles = jnp.where(jnp.arange(num_rows) < num_decodes, 0, (stops - starts + size - 1) // size)
    tiles_before = jnp.cumsum(tiles)
    out = jnp.pad(out, ((0, num_tokens - out.shape[0]), (0, 0), (0, 0), (0, 0)))

    def body(tile: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(tiles_before, tile, side="right")
        first = starts[row] + (tile - (tiles_before[row] - tiles[row])) * size
        # The last tiles would reach beyond the array: they are moved back, and leave the tokens before their first alone.
        at = jnp.minimum(first, num_tokens - size)
        tokens = at + jnp.arange(size, dtype=jnp.int32)
        mine = (tokens >= first) & (tokens < stops[row])
        positions = jnp.where(mine, seq_lens[row] - stops[row] + tokens, -1)
        block = lax.dynamic_slice_in_dim(q, at, size).transpose(1, 2, 0, 3)
        result = _attend(
            block.reshape(1, num_kv_heads, group * size, head_dim),
            jnp.tile(positions, group)[None],
            lax.dynamic_slice_in_dim(block_tables, row, 1),
            kv_cache=kv_cache,
            sinks=None if sinks is None else jnp.repeat(sinks, size, axis=1),
            scales=scales,
            pages=pages,
            options=options,
        )
        result = result.reshape(num_kv_heads, group, size, head_dim).transpose(2, 0, 1, 3)
        result = jnp.where(mine[:, None, None, None], result, lax.dynamic_slice_in_dim(out, at, size))
        return lax.dynamic_update_slice_in_dim(out, result, at, axis=0)

    return lax.fori_loop(0, tiles_before[-1], body, out)


def _attend(
    q: jax.Array,
    positions: jax.Array,
    tables: jax.Array,
    *,
    kv_cache: jax.Array,
    sinks: jax.Array | None,
    scales: Scales | None,
    pages: int,
    options: Options,
) -> jax.Array:
    """W rows with M queries a KV head each.

    Args:
        q: [W, K, M, D].
        positions: int32 [W, M], of each query in its row; -1 for no query.
        tables: int32 [W, P], the rows' block tables.
        sinks: float32 [K, M].
        pages: how many pages of each row are worked on in a step.

    Returns:
        [W, K, M, D], dtype of q; anything where there is no query.
    """
    num_rows, num_kv_heads, num_queries, head_dim = q.shape
    block_size = kv_cache.shape[3]
    num_keys = pages * block_size
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages)))
    last = jnp.max(positions, axis=1)
    # Scales of keys go into the factor of the logits, and those of values into the result: no array of the cache's size is
    # multiplied.
    factor = options.scale if scales is None else (options.scale * scales.k)[:, None, None]
    first_step, num_steps = jnp.int32(0), jnp.max(last) // num_keys + 1
    if options.sliding_window is not None:
        first_seen = jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions - options.sliding_window + 1)
        first_step = jnp.maximum(jnp.min(first_seen), 0) // num_keys

    def body(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        step, best, total, acc = state
        keys = step * num_keys + jnp.arange(num_keys, dtype=jnp.int32)
        seen = keys <= positions[:, :, None]
        if options.sliding_window is not None:
            seen &= keys > positions[:, :, None] - options.sliding_window
        blocks = lax.dynamic_slice_in_dim(tables, step * pages, pages, axis=1)
        k, v = (values_of(x).astype(q.dtype) for x in _load(kv_cache, blocks, keys <= last[:, None]))
        logits = jnp.einsum("wkmd,wknd->wkmn", q, k, preferred_element_type=jnp.float32) * factor
        if options.logit_soft_cap is not None:
            logits = options.logit_soft_cap * jnp.tanh(logits / options.logit_soft_cap)
        logits = jnp.where(seen[:, None], logits, UNSEEN)
        # Where no key has been seen yet, weights of unseen keys are not 0; the first key seen multiplies them by 0.
        new_best = jnp.maximum(best, jnp.max(logits, axis=-1))
        weights = jnp.exp(logits - new_best[..., None])
        keep = jnp.exp(best - new_best)
        total = total * keep + jnp.sum(weights, axis=-1)
        new = jnp.einsum("wkmn,wknd->wkmd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return step + 1, new_best, total, acc * keep[..., None] + new

    shape = (num_rows, num_kv_heads, num_queries)
    if sinks is None:
        best, total = jnp.full(shape, UNSEEN, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        best, total = jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32)
    state = (first_step, best, total, jnp.zeros((*shape, head_dim), jnp.float32))
    _, _, total, acc = lax.while_loop(lambda state: state[0] < num_steps, body, state)
    out = acc / total[..., None]
    return (out if scales is None else out * scales.v[:, None, None]).astype(q.dtype)


def _load(kv_cache: jax.Array, blocks: jax.Array, filled: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Copy blocks [W, p] of the cache, bits of `kernels_pallas.fp8` where it holds such numbers, to k and v [W, K, p * B, D].

    `filled` [W, p * B] says which slots are the row's own. The others may hold NaN, which a weight of 0 does not undo, so v is 0
    there; k needs no such care, because its logits are replaced.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_rows, num_pages = blocks.shape
    # Cache and result as tables of whole head-pages: XLA then copies 2 * B * D values in a row, twice as fast as with a loop
    # over the five dimensions. The reshape stays inside the loop and behind barriers: outside, the cache would be copied.
    table = kv_cache.reshape(num_blocks * 2 * num_kv_heads, block_size * head_dim)
    heads = blocks[:, None, :] * (2 * num_kv_heads) + jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    heads = lax.optimization_barrier(heads.reshape(-1))
    k = table.at[heads].get(mode="clip")
    v = table.at[heads + num_kv_heads].get(mode="clip")
    shape = (num_rows, num_kv_heads, num_pages, block_size, head_dim)
    mask = jnp.broadcast_to(filled.reshape(num_rows, 1, num_pages, block_size, 1), shape).reshape(v.shape)
    k, v = lax.optimization_barrier((k, jnp.where(mask, v, 0)))
    shape = (num_rows, num_kv_heads, num_pages * block_size, head_dim)
    return k.reshape(shape), v.reshape(shape)
