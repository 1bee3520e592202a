"""paged_attention by the Mosaic GPU kernels: decode rows through the work list, the others through blocks of queries."""

import jax
import jax.numpy as jnp

from kernels_pallas.compat import Interpret
from kernels_pallas.fp8 import values_of
from kernels_pallas.paged_attention.config import MosaicConfig
from kernels_pallas.paged_attention.kernel_mosaic_decode import decode_parts, merge
from kernels_pallas.paged_attention.kernel_mosaic_prefill import prefill_rows
from kernels_pallas.paged_attention.plan import AttentionPlan
from kernels_pallas.paged_attention.reference import Options, Scales


def paged_attention_mosaic(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    *,
    plan: AttentionPlan,
    config: MosaicConfig,
    options: Options,
    sinks: jax.Array | None,
    scales: Scales | None,
    decode_only: bool,
    max_decode_queries: int,
    interpret: Interpret,
) -> jax.Array:
    """See `kernels_pallas.paged_attention.paged_attention`; `plan` was made with the sizes of `config`."""
    kv_cache = values_of(kv_cache)
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads = block_tables.shape[0], kv_cache.shape[2]
    group = num_heads // num_kv_heads
    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim)
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, group)

    # [R, Q, K, G, D] -> [R, K, Q * G, D]
    queries = query_start_loc[:-1, None] + jnp.arange(max_decode_queries, dtype=jnp.int32)
    rows = grouped[jnp.minimum(queries, num_tokens - 1)].swapaxes(1, 2)
    rows = rows.reshape(num_rows, num_kv_heads, -1, head_dim)
    used = rows.shape[2]
    padding = -used % 8
    parts, lse = decode_parts(
        jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0))),
        kv_cache,
        block_tables,
        seq_lens,
        plan.work,
        group=group,
        single_query=max_decode_queries == 1,
        tile=config.tile,
        stages=config.decode_stages,
        raw_tiles=config.decode_raw_tiles,
        k_scale=None if scales is None else scales.k,
        options=options,
        interpret=interpret,
    )
    row_sinks = None if sinks is None else jnp.tile(sinks, max_decode_queries)
    merged = merge(parts[:, :, :used], lse[:, :, :used], plan, row_sinks)
    if scales is not None:
        merged = merged * scales.v[:, None, None]
    merged = merged.reshape(num_rows, num_kv_heads, max_decode_queries, group, head_dim).swapaxes(1, 2)
    merged = merged.reshape(num_rows, max_decode_queries, num_heads, head_dim).astype(q.dtype)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if max_decode_queries == 1:
        # Decode row r is token r.
        decoded = merged[jnp.minimum(token, num_rows - 1), 0]
        is_decode = (token < num_rows) & (jnp.arange(num_tokens) < (num_rows if decode_only else num_decodes))
    else:
        row = jnp.sum(query_start_loc[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
        is_decode = row < (num_rows if decode_only else num_decodes)
        row = jnp.minimum(row, num_rows - 1)
        decoded = merged[row, jnp.clip(token - query_start_loc[row], 0, max_decode_queries - 1)]
    if decode_only:
        valid = seq_lens > 0 if max_decode_queries == 1 else token < query_start_loc[-1]
        return jnp.where(valid[:, None, None], decoded, 0)

    by_head = grouped.transpose(1, 0, 2, 3).reshape(num_kv_heads, num_tokens * group, head_dim)
    filled = prefill_rows(
        jnp.pad(by_head, ((0, 0), (0, 64), (0, 0))),
        kv_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        plan.prefill_blocks,
        sinks,
        group=group,
        queries_per_warpgroup=config.queries_per_warpgroup,
        consumers=config.prefill_consumers,
        tile=config.prefill_tile,
        stages=config.prefill_stages,
        raw_tiles=config.prefill_raw_tiles,
        scales=scales,
        options=options,
        interpret=interpret,
    )
    filled = filled[:, : num_tokens * group].reshape(num_kv_heads, num_tokens, group, head_dim).swapaxes(0, 1)
    out = jnp.where(is_decode[:, None, None], decoded, filled.reshape(q.shape))
    return jnp.where((token < query_start_loc[-1])[:, None, None], out, 0)
