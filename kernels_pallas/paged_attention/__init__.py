"""Attention of a ragged batch of queries over a paged KV cache."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from kernels_pallas.device import compute_capability, num_cores, shared_memory
from kernels_pallas.dispatch import target_platform
from kernels_pallas.fp8 import check_scale, is_fp8
from kernels_pallas.llvm.paged_attention import paged_attention_llvm
from kernels_pallas.paged_attention.config import MosaicConfig, mosaic_config
from kernels_pallas.paged_attention.config_triton import TritonConfig, triton_config
from kernels_pallas.paged_attention.implementations import (
    IMPLEMENTATIONS,
    INTERPRETED_ON_CPU,
    Call,
    choose_implementation,
    select_implementation,
)
from kernels_pallas.paged_attention.plan import AttentionPlan, make_plan
from kernels_pallas.paged_attention.reference import Options, Scales, paged_attention_reference
from kernels_pallas.tuned import SIZES, table, target_device_kind

__all__ = [
    "IMPLEMENTATIONS",
    "INTERPRETED_ON_CPU",
    "AttentionPlan",
    "Call",
    "paged_attention",
    "plan_attention",
    "select_implementation",
]


def plan_attention(
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    *,
    num_tokens: int,
    max_context: int,
    call: Call,
    sliding_window: int | None,
    decode_only: bool,
    implementation: str = "auto",
) -> AttentionPlan | None:
    """What calls of `paged_attention` on the same batch share, so that it is computed once for all layers with the same window.

    Args:
        seq_lens, query_start_loc, num_decodes, sliding_window, decode_only, implementation: as in `paged_attention`.
        num_tokens: T.
        max_context: tokens that a row can have, P * B.
        call: the static shapes.

    Returns:
        The plan; None for an implementation that needs none.
    """
    chosen = choose_implementation(implementation, call)
    if chosen in ("llvm", "reference"):
        return None
    config = launch_config(call) if chosen == "mosaic" else _triton_config(call)
    if isinstance(config, MosaicConfig):
        tile, queries_per_block = config.tile, config.prefill_consumers * config.queries_per_warpgroup
    else:
        tile, queries_per_block = config.decode_tile, config.prefill_rows // (call.num_heads // call.num_kv_heads)
    return make_plan(
        seq_lens,
        query_start_loc,
        num_decodes,
        num_tokens=num_tokens,
        max_context=max_context,
        sliding_window=sliding_window,
        decode_only=decode_only,
        tile=tile,
        slots=config.decode_slots,
        min_tiles=config.min_tiles,
        queries_per_block=queries_per_block,
    )


def _mosaic_config(call: Call) -> MosaicConfig:
    return mosaic_config(
        call.num_heads // call.num_kv_heads,
        call.num_kv_heads,
        call.head_dim,
        target_platform(),
        fp8_cache=is_fp8(jnp.dtype(call.cache_dtype or call.dtype)),
    )


def _triton_config(call: Call) -> TritonConfig:
    return triton_config(
        group=call.num_heads // call.num_kv_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        dtype=jnp.dtype(call.dtype),
        fp8_cache=is_fp8(jnp.dtype(call.cache_dtype or call.dtype)),
        max_decode_queries=call.max_decode_queries,
        num_cores=None if target_platform() == "cpu" else num_cores(),
        shared_memory=shared_memory(),
    )


def launch_config(call: Call) -> MosaicConfig:
    """Sizes of the Mosaic kernels for a call: those measured on this GPU model (`kernels_pallas.tuned`), else by rule."""
    config = _mosaic_config(call)
    if target_platform() == "cpu":
        return config
    if call.cache_dtype == call.dtype:
        call = call._replace(cache_dtype=None)
    kind = target_device_kind()
    return replace(config, **{name: size for op in SIZES for name, size in table().sizes(op, call, kind).items()})


def paged_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    decode_only: bool,
    max_decode_queries: int = 1,
    plan: AttentionPlan | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Causal attention of each row's queries over the row's keys and values, softmax and sums in float32.

    Row r's queries are tokens `query_start_loc[r]:query_start_loc[r + 1]`. They are the last of the row's `seq_lens[r]` tokens,
    whose keys and values are in the cache already. Query head h attends with KV head h // (H / K).

    What is not part of a row may hold anything, NaN included, and changes nothing: tokens from `query_start_loc[R]` on, blocks
    that no row uses, slots beyond a row's length, block table entries beyond a row's blocks.

    Args:
        q: [T, H, D], float32, bfloat16 or float16.
        kv_cache: [N, 2, K, B, D], float32, bfloat16, float16, float8_e4m3fn, or uint8 with the bits of that (see
            `kernels_pallas.fp8`). Its numbers are rounded to the dtype of q.
        block_tables: int32 [R, P]; entry p holds tokens p * B to (p + 1) * B - 1 of the row.
        seq_lens: int32 [R], 0 for a padding row.
        query_start_loc: int32 [R + 1], not decreasing, starts at 0. A padding row has no tokens.
        num_decodes: int32 []; rows 0 to num_decodes - 1 have 1 to `max_decode_queries` queries each, the others any number.
        scale: what the dot products are multiplied by, before cap and mask.
        sliding_window: the last tokens that a query can see, itself included; None for all.
        logit_soft_cap: c in c * tanh(s / c), applied to the scaled products; None for no cap.
        sinks: float32 [H], a logit a head that takes part in the softmax and has no value.
        k_scale, v_scale: float32 [K], for a cache of float8_e4m3fn: a key is what is stored times its head's k_scale, a value
            what is stored times its v_scale. None for 1.
        decode_only: every row is a decode or padding; with `max_decode_queries` 1, T == R and row r's query is token r. Static.
        max_decode_queries: static; more than 1 where tokens are speculated.
        plan: of `plan_attention` for this batch and window; None: it is computed here if it is needed.
        implementation: "auto" or one of `IMPLEMENTATIONS`. "mosaic" and "triton" on a CPU run in interpreters, for tests.

    Returns:
        [T, H, D], dtype of q; zeros for tokens of no row.

    Raises:
        ValueError: if a shape, dtype or option does not fit, or the implementation is unknown.
    """
    _check_arrays(q, kv_cache, block_tables, seq_lens, query_start_loc, num_decodes, sinks)
    check_scale("k_scale", k_scale, kv_cache.shape[2], kv_cache.dtype)
    check_scale("v_scale", v_scale, kv_cache.shape[2], kv_cache.dtype)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive, got {scale!r}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window!r}")
    if logit_soft_cap is not None and not (math.isfinite(logit_soft_cap) and logit_soft_cap > 0):
        raise ValueError(f"logit_soft_cap must be positive, got {logit_soft_cap!r}")
    if max_decode_queries < 1:
        raise ValueError(f"max_decode_queries must be at least 1, got {max_decode_queries!r}")
    if decode_only and max_decode_queries == 1 and q.shape[0] != block_tables.shape[0]:
        raise ValueError(f"decode_only needs as many tokens as rows, got {q.shape[0]} tokens and {block_tables.shape[0]} rows")
    shape = (q.shape[1], kv_cache.shape[2], q.shape[2], kv_cache.shape[3])
    call = Call(*shape, q.dtype.name, max_decode_queries, kv_cache.dtype.name)
    chosen = choose_implementation(implementation, call)
    options = Options(scale, sliding_window, logit_soft_cap)
    scales = None
    if k_scale is not None or v_scale is not None:
        ones = jnp.ones(kv_cache.shape[2], jnp.float32)
        scales = Scales(ones if k_scale is None else k_scale, ones if v_scale is None else v_scale)
    arrays = (q, kv_cache, block_tables, seq_lens, query_start_loc)
    if chosen == "llvm":
        return paged_attention_llvm(
            *arrays, **options._asdict(), sinks=sinks, decode_only=decode_only and max_decode_queries == 1
        )
    if chosen == "reference":
        # The reference takes decodes of one query only; more are rows like others to it.
        single = max_decode_queries == 1
        return paged_attention_reference(
            *arrays,
            num_decodes if single else jnp.zeros_like(num_decodes),
            **options._asdict(),
            sinks=sinks,
            scales=scales,
            decode_only=decode_only and single,
        )
    if plan is None:
        plan = plan_attention(
            seq_lens,
            query_start_loc,
            num_decodes,
            num_tokens=q.shape[0],
            max_context=block_tables.shape[1] * kv_cache.shape[3],
            call=call,
            sliding_window=sliding_window,
            decode_only=decode_only,
            implementation=chosen,
        )
    # Imported here: Pallas and Triton take a while, and the reference does without.
    if chosen == "triton":
        from kernels_pallas.paged_attention.triton import paged_attention_triton

        capability = None if target_platform() == "cpu" else compute_capability()
        return paged_attention_triton(
            *arrays,
            plan=plan,
            config=_triton_config(call),
            options=options,
            sinks=sinks,
            scales=scales,
            max_decode_queries=max_decode_queries,
            compute_capability=None if capability is None else 10 * capability[0] + capability[1],
        )
    from kernels_pallas.compat import interpreter
    from kernels_pallas.paged_attention.mosaic import paged_attention_mosaic

    return paged_attention_mosaic(
        *arrays,
        num_decodes,
        plan=plan,
        config=launch_config(call),
        options=options,
        sinks=sinks,
        scales=scales,
        decode_only=decode_only,
        max_decode_queries=max_decode_queries,
        interpret=interpreter() if target_platform() == "cpu" else None,
    )


def _check_arrays(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    sinks: jax.Array | None,
) -> None:
    if q.ndim != 3:
        raise ValueError(f"q must be [T, H, D], got {q.shape}")
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"q must be float32, bfloat16 or float16, got {q.dtype}")
    if kv_cache.ndim != 5 or kv_cache.shape[1] != 2:
        raise ValueError(f"kv_cache must be [N, 2, K, B, D], got {kv_cache.shape}")
    if kv_cache.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) and not is_fp8(kv_cache.dtype):
        raise ValueError(f"kv_cache must be float32, bfloat16, float16, float8_e4m3fn or uint8, got {kv_cache.dtype}")
    if kv_cache.shape[4] != q.shape[2]:
        raise ValueError(f"kv_cache has head size {kv_cache.shape[4]}, q has {q.shape[2]}")
    if q.shape[1] % kv_cache.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads, which is no multiple of the {kv_cache.shape[2]} of kv_cache")
    if block_tables.ndim != 2:
        raise ValueError(f"block_tables must be [R, P], got {block_tables.shape}")
    num_rows = block_tables.shape[0]
    for name, array, shape in (
        ("block_tables", block_tables, block_tables.shape),
        ("seq_lens", seq_lens, (num_rows,)),
        ("query_start_loc", query_start_loc, (num_rows + 1,)),
        ("num_decodes", num_decodes, ()),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.dtype != jnp.float32):
        raise ValueError(f"sinks must be float32 [H] = {(q.shape[1],)}, got {sinks.dtype} {sinks.shape}")
