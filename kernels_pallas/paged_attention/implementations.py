"""The implementations of paged_attention: which of them can serve a call here, and why the others cannot."""

import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.device import compute_capability
from kernels_pallas.dispatch import choose, log_choice, target_platform
from kernels_pallas.fp8 import FP8, is_fp8, saturated
from kernels_pallas.llvm.paged_attention import llvm_refusal, register_paged_attention
from kernels_pallas.paged_attention.config import mosaic_refusal
from kernels_pallas.paged_attention.config_triton import triton_refusal
from kernels_pallas.triton_call import unavailable_reason

logger = logging.getLogger(__name__)

# Best first.
IMPLEMENTATIONS = ("mosaic", "triton", "llvm", "reference")
# On a CPU, where they are slow and call back into Python.
INTERPRETED_ON_CPU = ("mosaic", "triton")


class Call(NamedTuple):
    """Static shapes of a call, on one device.

    Attributes:
        dtype: of the queries.
        cache_dtype: of the KV cache; None if it is the same.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    max_decode_queries: int = 1
    cache_dtype: str | None = None


def choose_implementation(implementation: str, call: Call) -> str:
    """The implementation of a call, from its shapes and the platform that is lowered for; tries nothing out.

    Raises:
        ValueError: if a named implementation is unknown or cannot serve the call.
    """
    return choose("paged_attention", implementation, _refusals(implementation, call))


def _refusals(implementation: str, call: Call) -> dict[str, str | None]:
    """Why each implementation cannot be used; None if it can. A name given may be slow, a choice may not."""
    mosaic = _mosaic_device_refusal(implementation) or mosaic_refusal(
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        block_size=call.block_size,
        dtype=jnp.dtype(call.dtype),
        cache_dtype=_cache_dtype(call),
        max_decode_queries=call.max_decode_queries,
    )
    triton = _triton_device_refusal(implementation) or triton_refusal(
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        dtype=jnp.dtype(call.dtype),
        cache_dtype=_cache_dtype(call),
    )
    return {"mosaic": mosaic, "triton": triton, "llvm": _llvm_refusal(call), "reference": None}


def _cache_dtype(call: Call) -> jnp.dtype:
    dtype = jnp.dtype(call.cache_dtype or call.dtype)
    return FP8 if is_fp8(dtype) else dtype


INTERPRETED = "on a CPU it runs in an interpreter, for tests"


def _mosaic_device_refusal(implementation: str) -> str | None:
    platform = target_platform()
    if platform == "cpu":
        return None if implementation == "mosaic" else INTERPRETED
    if platform not in ("gpu", "cuda"):
        return f"it needs a Hopper GPU, not {platform}"
    capability = compute_capability()
    if capability is None or capability[0] != 9:
        return "it needs a Hopper GPU (compute capability 9)"
    return None


def _llvm_refusal(call: Call) -> str | None:
    platform = target_platform()
    if platform != "cpu":
        return f"it runs on CPUs, not on {platform}"
    return llvm_refusal(
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        block_size=call.block_size,
        dtype=call.dtype,
        cache_dtype=call.cache_dtype or call.dtype,
    )


def _triton_device_refusal(implementation: str) -> str | None:
    platform = target_platform()
    if platform == "cpu":
        return unavailable_reason() if implementation == "triton" else INTERPRETED
    if platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, not {platform}"
    capability = compute_capability()
    if capability is None or capability < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0 or newer"
    if capability >= (10, 0) and implementation != "triton":
        return "it is not chosen on GPUs newer than Hopper, for which it was never compiled"
    return unavailable_reason()


def select_implementation(implementation: str, call: Call, *, sliding_window: int | None = None) -> str:
    """Choose once at start-up: like `choose_implementation`, but what is chosen has computed a small case like the reference.

    A kernel that fails is passed over with a warning if it was not named.

    Raises:
        ValueError: if a named implementation is unknown or cannot serve the call.
        RuntimeError: if a named implementation fails.
    """
    refusals = _refusals(implementation, call)
    chosen = choose("paged_attention", implementation, refusals)
    # What is lowered for a device that is not here, or interpreted, is tested elsewhere.
    testable = target_platform() != "cpu" and jax.sharding.get_abstract_mesh().abstract_device is None
    while chosen != "reference" and testable:
        failure = self_test(chosen, call, sliding_window)
        if failure is None:
            break
        if implementation != "auto":
            raise RuntimeError(f"implementation {chosen!r} of paged_attention fails its self-test: {failure}")
        logger.warning("paged_attention: %s fails its self-test and is not used: %s", chosen, failure)
        refusals[chosen] = f"it fails its self-test: {failure}"
        chosen = choose("paged_attention", implementation, refusals)
    if chosen == "llvm":
        # Programs that come from disk call it too, and are not traced.
        register_paged_attention(call.dtype, call.head_dim)
    log_choice("paged_attention", chosen, refusals)
    return chosen


def self_test(implementation: str, call: Call, sliding_window: int | None) -> str | None:
    """Compute two decode rows and a chunk on the default device, with the reference and with `implementation`.

    Returns:
        What is wrong; None if they agree.
    """
    from kernels_pallas.paged_attention import paged_attention

    rng = np.random.default_rng(0)
    size = call.block_size
    lengths, queries = np.array([2 * size + 1, 3, size + 40]), np.array([1, 1, 40])
    starts = np.concatenate([[0], np.cumsum(queries)])
    pages = -(-int(lengths.max()) // size)
    tables = 1 + np.arange(3 * pages).reshape(3, pages)
    shape = (1 + 3 * pages, 2, call.num_kv_heads, size, call.head_dim)
    q = jnp.asarray(rng.standard_normal((int(starts[-1]), call.num_heads, call.head_dim)), call.dtype)
    cache = saturated(jnp.asarray(rng.standard_normal(shape), call.dtype), _cache_dtype(call))
    scales = {}
    if cache.dtype == FP8:
        scales = {name: jnp.asarray(rng.uniform(0.5, 2.0, call.num_kv_heads), jnp.float32) for name in ("k_scale", "v_scale")}
    integers = [jnp.asarray(array, jnp.int32) for array in (tables, lengths, starts, 2)]

    def compute(name: str) -> np.ndarray:
        run = jax.jit(
            lambda *arrays, **scales: paged_attention(
                *arrays,
                **scales,
                scale=call.head_dim**-0.5,
                sliding_window=sliding_window,
                decode_only=False,
                implementation=name,
            )
        )
        return np.asarray(run(q, cache, *integers, **scales), np.float32)

    try:
        found = compute(implementation)
    except Exception as error:  # whatever a compiler or a driver may raise: the report says what
        return f"{type(error).__name__}: {error}".splitlines()[0]
    worst = float(np.max(np.abs(found - compute("reference"))))
    return None if worst < 0.05 else f"it differs from the reference by {worst:.3g}"
