"""paged_attention in plain XLA: the specification of the kernels, and what runs on CPUs."""

import jax
import jax.numpy as jnp

LOWEST = -1e30


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
    decode_only: bool,
) -> jax.Array:
    """See `kernels_pallas.paged_attention.paged_attention`."""
    del decode_only, num_decodes
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
    num_rows = block_tables.shape[0]
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    rows = jnp.clip(jnp.searchsorted(query_start_loc, tokens, side="right") - 1, 0, num_rows - 1)
    valid = tokens < query_start_loc[-1]
    positions = jnp.where(valid, seq_lens[rows] - (query_start_loc[rows + 1] - tokens), -1)
    grouped = jnp.where(valid[:, None, None], q.astype(jnp.float32), 0.0)
    grouped = grouped.reshape(num_tokens, num_kv_heads, -1, head_dim)
    num_pages = jnp.max(positions) // block_size + 1

    def body(state):
        page, best, total, acc = state
        blocks = jnp.clip(block_tables[rows, page], 0, num_blocks - 1)
        kv = kv_cache[blocks].astype(jnp.float32)
        key_positions = page * block_size + jnp.arange(block_size, dtype=jnp.int32)
        seen = key_positions <= positions[:, None]
        if sliding_window is not None:
            seen &= key_positions > positions[:, None] - sliding_window
        k = jnp.where(seen[:, None, :, None], kv[:, 0], 0.0)
        v = jnp.where(seen[:, None, :, None], kv[:, 1], 0.0)
        logits = jnp.einsum("tkgd,tkbd->tkgb", grouped, k) * scale
        if logit_soft_cap is not None:
            logits = logit_soft_cap * jnp.tanh(logits / logit_soft_cap)
        logits = jnp.where(seen[:, None, None, :], logits, LOWEST)
        new_best = jnp.maximum(best, jnp.max(logits, axis=-1))
        weights = jnp.where(seen[:, None, None, :], jnp.exp(logits - new_best[..., None]), 0.0)
        keep = jnp.exp(best - new_best)
        total = total * keep + jnp.sum(weights, axis=-1)
        acc = acc * keep[..., None] + jnp.einsum("tkgb,tkbd->tkgd", weights, v)
        return page + 1, new_best, total, acc

    shape = grouped.shape[:3]
    if sinks is None:
        best, total = jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        best = jnp.broadcast_to(sinks.reshape(num_kv_heads, -1), shape)
        total = jnp.ones(shape, jnp.float32)
    state = (jnp.int32(0), best, total, jnp.zeros_like(grouped))
    _, _, total, acc = jax.lax.while_loop(lambda state: state[0] < num_pages, body, state)
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    return out.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)
