"""The Triton kernels in Triton's interpreter against the plain specification."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_spec import attention_spec, case_of, make_case

from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.triton_call import unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
TOLERANCE = {"float32": 3e-6, "bfloat16": 1e-2, "float16": 2e-3}
BFLOAT16 = ml_dtypes.bfloat16


def check(case, **options):
    scale, sinks = case.q.shape[2] ** -0.5, options.pop("sinks", None)
    run = jax.jit(functools.partial(paged_attention, implementation="triton", scale=scale, **options))
    out = run(*case.arrays(), sinks=None if sinks is None else jnp.asarray(sinks))
    assert out.dtype == case.q.dtype
    expected = attention_spec(
        case,
        scale=scale,
        sinks=sinks,
        **{name: options[name] for name in ("sliding_window", "logit_soft_cap") if name in options},
    )
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=TOLERANCE[case.q.dtype.name], rtol=0)


# (block size, heads, KV heads, head size), options, dtype
DECODES = [
    ((16, 8, 2, 64), {}, np.float32),
    ((64, 16, 1, 80), {"sliding_window": 70, "logit_soft_cap": 5.0}, BFLOAT16),
    ((32, 2, 2, 96), {"sinks": np.array([0.5, 3.0], np.float32)}, np.float32),
    ((32, 3, 1, 128), {"sliding_window": 1}, np.float16),
    ((16, 2, 1, 256), {"logit_soft_cap": 0.5}, BFLOAT16),
    pytest.param((8, 17, 1, 32), {}, np.float32, marks=pytest.mark.slow),
    pytest.param((16, 16, 2, 192), {"sliding_window": 30}, np.float32, marks=pytest.mark.slow),
    pytest.param((64, 4, 4, 128), {"sinks": np.array([0.5, 3.0, -2.0, 9.0], np.float32)}, BFLOAT16, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "options", "dtype"), DECODES)
def test_decode(shape, options, dtype):
    """Lengths about a block's and several tiles, and a padding row."""
    rows = [(length, 1) for length in (1, shape[0] - 1, shape[0], shape[0] + 1, 300)]
    check(case_of(rows, shape, dtype, num_rows=6, num_tokens=6), decode_only=True, **options)


CHUNKS = [
    ((16, 8, 2, 64), {}, BFLOAT16),
    ((32, 3, 1, 128), {"sliding_window": 40, "logit_soft_cap": 5.0}, np.float32),
    ((64, 2, 1, 80), {"sinks": np.array([0.5, 3.0], np.float32)}, np.float32),
    ((32, 16, 1, 96), {"sliding_window": 100}, np.float16),
    ((16, 4, 1, 256), {}, BFLOAT16),
    pytest.param((16, 2, 2, 256), {"sliding_window": 17, "logit_soft_cap": 3.0}, np.float32, marks=pytest.mark.slow),
    pytest.param((64, 32, 1, 64), {}, np.float32, marks=pytest.mark.slow),
    pytest.param((32, 5, 1, 128), {"sliding_window": 200}, BFLOAT16, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "options", "dtype"), CHUNKS)
def test_mixed_batch(shape, options, dtype):
    """A decode, a later chunk that is no multiple of anything, a whole prompt, padding tokens and a padding row."""
    rows = [(2 * shape[0], 1), (150, 39), (33, 33)]
    check(case_of(rows, shape, dtype, num_rows=4, num_tokens=75), decode_only=False, **options)


@pytest.mark.parametrize(
    ("heads", "queries", "decode_only"),
    [(4, 4, True), (8, 8, False), pytest.param(16, 8, True, marks=pytest.mark.slow)],
)
def test_several_queries_a_decode_row(heads, queries, decode_only):
    """Speculation: rows of 1 to 8 queries through the work list, in one tile or in several."""
    rows = [(70, 1), (70, queries), (140, 3), (2, 2)] + ([] if decode_only else [(40, 20)])
    case = case_of(rows, (16, heads, 1, 64), np.float32, num_rows=len(rows) + 1, num_tokens=40)
    case.num_decodes = 4
    check(case, decode_only=decode_only, max_decode_queries=queries, sliding_window=66)


def test_a_batch_of_padding_alone_gives_zeros():
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 16, "block_size": 4, "pages": 3}
    case = make_case(np.random.default_rng(0), [], num_rows=5, num_tokens=5, **shape)
    for decode_only in (False, True):
        check(case, decode_only=decode_only)
