"""The Mosaic GPU kernels in the interpreter, with race detection, against the plain specification."""

import functools
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_spec import attention_spec, make_case

from kernels_pallas import compat
from kernels_pallas.paged_attention import paged_attention

TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}


@contextmanager
def race_detection():
    """Fails if a kernel leaves a barrier or a copy behind, or if the last kernel races: prefill's in a mixed batch."""
    plain = compat.interpreter
    compat.interpreter = functools.partial(plain, detect_races=True)
    try:
        yield
        assert not compat.races_found()
    finally:
        compat.interpreter = plain
        compat.reset_interpreter()


def run(case, **options):
    """Jitted, so that only the kernels themselves are interpreted."""
    sinks = options.pop("sinks", None)
    call = functools.partial(paged_attention, implementation="mosaic", scale=case.q.shape[2] ** -0.5, **options)
    out = jax.jit(call)(*case.arrays(), sinks=None if sinks is None else jnp.asarray(sinks))
    return np.asarray(jax.block_until_ready(out), np.float64)


def check(case, **options):
    with race_detection():
        out = run(case, **options)
    spec_options = {name: options[name] for name in ("sliding_window", "logit_soft_cap", "sinks") if name in options}
    expected = attention_spec(case, scale=case.q.shape[2] ** -0.5, **spec_options)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE[case.q.dtype.name], rtol=0)


def case_of(rows, *, heads, kv_heads, head_dim, block_size, dtype=ml_dtypes.bfloat16, num_rows=None, num_tokens=None, seed=0):
    pages = max(-(-length // block_size) for length, _ in rows) + 1
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "pages": pages}
    rng = np.random.default_rng(seed)
    return make_case(rng, rows, num_rows=num_rows, num_tokens=num_tokens, dtype=dtype, **shape)


# (block size, heads, KV heads, head size, options)
DECODES = [
    (16, 8, 2, 64, {}),
    (32, 3, 1, 128, {}),
    (64, 16, 1, 80, {"sliding_window": 70, "logit_soft_cap": 5.0}),
    (32, 2, 2, 96, {"sinks": np.array([0.5, 3.0], np.float32)}),
    pytest.param(16, 2, 1, 256, {}, marks=pytest.mark.slow),
    pytest.param(16, 7, 1, 128, {"sliding_window": 1}, marks=pytest.mark.slow),
    pytest.param(64, 12, 1, 128, {"logit_soft_cap": 1.0}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("block_size", "heads", "kv_heads", "head_dim", "options"), DECODES)
def test_decode(block_size, heads, kv_heads, head_dim, options):
    """Lengths about a block's and several tiles, and a padding row."""
    rows = [(length, 1) for length in (1, block_size - 1, block_size + 1, 300)]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    check(case_of(rows, num_rows=5, num_tokens=5, **shape), decode_only=True, **options)


CHUNKS = [
    (16, 8, 2, 64, {}),
    (32, 3, 1, 128, {"sliding_window": 40, "logit_soft_cap": 5.0}),
    (64, 2, 1, 80, {"sinks": np.array([0.5, 3.0], np.float32)}),
    pytest.param(32, 16, 1, 96, {}, marks=pytest.mark.slow),
    pytest.param(16, 4, 1, 256, {}, marks=pytest.mark.slow),
    pytest.param(32, 5, 1, 128, {"sliding_window": 200}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("block_size", "heads", "kv_heads", "head_dim", "options"), CHUNKS)
def test_mixed_batch(block_size, heads, kv_heads, head_dim, options):
    """A decode, a later chunk that is no multiple of anything, a whole prompt, padding tokens and a padding row."""
    rows = [(2 * block_size, 1), (150, 39), (33, 33)]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    check(case_of(rows, num_rows=4, num_tokens=75, **shape), decode_only=False, **options)


@pytest.mark.parametrize("decode_only", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_several_queries_a_decode_row(decode_only):
    """Speculation: rows of 1 to 4 queries through the work list."""
    rows = [(70, 1), (70, 4), (140, 3), (2, 2)] + ([] if decode_only else [(40, 20)])
    case = case_of(rows, heads=4, kv_heads=1, head_dim=64, block_size=16, num_rows=len(rows) + 1, num_tokens=32)
    case.num_decodes = 4
    check(case, decode_only=decode_only, max_decode_queries=4, sliding_window=66)


def test_half_precision():
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 64, "block_size": 32}
    check(case_of([(70, 1), (40, 9)], dtype=np.float16, **shape), decode_only=False)
