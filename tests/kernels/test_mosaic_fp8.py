"""The Mosaic GPU kernels on a cache of 8-bit numbers, in the interpreter with race detection, against the plain specification."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_spec import attention_spec, fp8_case
from test_mosaic import race_detection

from kernels_pallas.paged_attention import paged_attention


def check(rows, *, heads, kv_heads, head_dim, block_size, num_rows, num_tokens, decode_only, dtype=ml_dtypes.bfloat16, **options):
    pages = max(-(-length // block_size) for length, _ in rows) + 1
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "pages": pages}
    case = fp8_case(np.random.default_rng(0), rows, num_rows=num_rows, num_tokens=num_tokens, dtype=dtype, **shape)
    sinks = options.pop("sinks", None)
    scale, given = head_dim**-0.5, {} if sinks is None else {"sinks": jnp.asarray(sinks)}
    call = functools.partial(paged_attention, implementation="mosaic", scale=scale, decode_only=decode_only, **options)
    with race_detection():
        out = np.asarray(jax.block_until_ready(jax.jit(call)(*case.arrays(), **case.scales(), **given)), np.float64)
    options.pop("max_decode_queries", None)
    expected = attention_spec(case.plain(), scale=scale, sinks=sinks, **options)
    # Values are up to 2.5 times as large here as in the tests of 16-bit caches.
    np.testing.assert_allclose(out, expected, atol=5e-2 if dtype == ml_dtypes.bfloat16 else 8e-3, rtol=0)


SINKS = np.array([0.5, 3.0], np.float32)
# (block size, heads, KV heads, head size, options)
DECODES = [
    (32, 4, 2, 128, {"sliding_window": 70, "logit_soft_cap": 5.0}),
    pytest.param(16, 8, 2, 64, {}, marks=pytest.mark.slow),
    pytest.param(64, 16, 1, 80, {}, marks=pytest.mark.slow),
    pytest.param(32, 2, 2, 96, {"sinks": SINKS}, marks=pytest.mark.slow),
    pytest.param(16, 2, 1, 256, {"dtype": np.float16}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("block_size", "heads", "kv_heads", "head_dim", "options"), DECODES)
def test_decode(block_size, heads, kv_heads, head_dim, options):
    """Lengths about a block's and several tiles, and a padding row."""
    rows = [(length, 1) for length in (1, block_size - 1, block_size + 1, 300)]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    check(rows, num_rows=5, num_tokens=5, decode_only=True, **shape, **options)


CHUNKS = [
    (32, 3, 1, 128, {"sliding_window": 40, "logit_soft_cap": 5.0}),
    pytest.param(16, 8, 2, 64, {}, marks=pytest.mark.slow),
    pytest.param(64, 2, 1, 80, {"sinks": SINKS}, marks=pytest.mark.slow),
    pytest.param(16, 4, 1, 256, {}, marks=pytest.mark.slow),
    pytest.param(32, 5, 1, 96, {"dtype": np.float16}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("block_size", "heads", "kv_heads", "head_dim", "options"), CHUNKS)
def test_mixed_batch(block_size, heads, kv_heads, head_dim, options):
    """A decode, a later chunk that is no multiple of anything, a whole prompt, padding tokens and a padding row."""
    rows = [(2 * block_size, 1), (150, 39), (33, 33)]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    check(rows, num_rows=4, num_tokens=75, decode_only=False, **shape, **options)
