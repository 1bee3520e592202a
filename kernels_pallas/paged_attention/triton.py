"""paged_attention by the Triton kernels: decode rows through the work list, the others through blocks of queries."""

import jax
import jax.numpy as jnp

from kernels_pallas.fp8 import bits_of, is_fp8
from kernels_pallas.paged_attention.config_triton import TritonConfig
from kernels_pallas.paged_attention.kernel_triton import decode_kernel, merge_kernel, prefill_kernel
from kernels_pallas.paged_attention.plan import AttentionPlan
from kernels_pallas.paged_attention.reference import Options, Scales
from kernels_pallas.triton_call import Launch, call_triton

MERGE_ROWS = 16


def paged_attention_triton(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    plan: AttentionPlan,
    config: TritonConfig,
    options: Options,
    sinks: jax.Array | None,
    scales: Scales | None,
    max_decode_queries: int,
    compute_capability: int | None,
) -> jax.Array:
    """See `kernels_pallas.paged_attention.paged_attention`; `plan` was made with the sizes of `config`.

    Args:
        compute_capability: as in `Launch`.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_cache.shape[2]
    group = num_heads // num_kv_heads
    num_items, rows = plan.work.shape[0], group * max_decode_queries
    heads = {"D": head_dim, "D_PADDED": _power_of_2(head_dim), "K": num_kv_heads, "G": group}
    attention = {
        "scale": float(options.scale),
        "cap": float(options.logit_soft_cap or 0.0),
        "window": options.sliding_window or 0,
        "FP8": is_fp8(kv_cache.dtype),
        "B": kv_cache.shape[3],
        "PRECISION": config.precision,
        **heads,
    }
    # A parameter that is not read, as that of sinks without sinks, must point to something all the same.
    unread = seq_lens
    if is_fp8(kv_cache.dtype):
        ones = jnp.ones(num_kv_heads, jnp.float32)
        k_scale, v_scale = (ones, ones) if scales is None else scales
    else:
        k_scale = v_scale = unread
    batch = {
        "q_ptr": q,
        "kv_ptr": bits_of(kv_cache),
        "k_scale_ptr": k_scale,
        "v_scale_ptr": v_scale,
        "tables_ptr": block_tables,
        "lens_ptr": seq_lens,
        "starts_ptr": query_start_loc,
        "pages": block_tables.shape[1],
    }
    sink = {"SINKS": sinks is not None, "sinks_ptr": unread if sinks is None else sinks}

    parts, lse = call_triton(
        decode_kernel,
        Launch(
            (num_items, num_kv_heads, -(-rows // config.decode_rows)),
            config.decode_warps,
            config.decode_stages,
            compute_capability,
        ),
        {**batch, "work_ptr": plan.work, "ROWS": rows, "M": config.decode_rows, "TILE": config.decode_tile, **attention},
        out={
            "parts_ptr": jax.ShapeDtypeStruct((num_items, num_kv_heads, rows, head_dim), jnp.float32),
            "lse_ptr": jax.ShapeDtypeStruct((num_items, num_kv_heads, rows), jnp.float32),
        },
    )
    # Tokens of no row stay zero.
    out = jnp.zeros_like(q)
    if plan.prefill_blocks is not None:
        [out] = call_triton(
            prefill_kernel,
            Launch(
                (plan.prefill_blocks.shape[0], num_kv_heads, 1), config.prefill_warps, config.prefill_stages, compute_capability
            ),
            {
                **batch,
                "blocks_ptr": plan.prefill_blocks,
                "M": config.prefill_rows,
                "TILE": config.prefill_tile,
                **sink,
                **attention,
            },
            updated={"out_ptr": out},
        )
    [out] = call_triton(
        merge_kernel,
        Launch((block_tables.shape[0], num_kv_heads, -(-rows // MERGE_ROWS)), 4, 2, compute_capability),
        {
            "parts_ptr": parts,
            "lse_ptr": lse,
            "first_item_ptr": plan.first_item,
            "num_items_ptr": plan.num_items,
            "starts_ptr": query_start_loc,
            "ROWS": rows,
            "M": MERGE_ROWS,
            **sink,
            **heads,
        },
        updated={"out_ptr": out},
    )
    return out


def _power_of_2(number: int) -> int:
    """The smallest that is not below `number`."""
    return 1 << (number - 1).bit_length()
