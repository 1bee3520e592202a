"""paged_attention, every implementation, against the plain specification."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_spec import Case, attention_spec, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.kv_cache_write import write_kv
from kernels_pallas.llvm.paged_attention import llvm_refusal
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.paged_attention.reference import PREFILL_TOKENS, decode_tile

TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 2e-3}


# The others are interpreted on a CPU, too slowly for all of this: test_mosaic.py.
QUICK = ("llvm", "reference")


@pytest.fixture(params=QUICK)
def implementation(request):
    return request.param


@functools.cache
def jitted(implementation, **options):
    return jax.jit(functools.partial(paged_attention, implementation=implementation, **options))


def skip_unless_served(implementation, case):
    """llvm serves the sizes of real models, on the processors it is for."""
    if implementation == "llvm":
        (num_heads, head_dim), (kv_heads, block_size) = case.q.shape[1:], case.kv_cache.shape[2:4]
        sizes = {"num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
        refusal = llvm_refusal(**sizes, dtype=case.q.dtype.name, cache_dtype=case.kv_cache.dtype.name)
        if refusal is not None:
            pytest.skip(refusal)


def check(case, implementation, *, decode_only=False, **options):
    skip_unless_served(implementation, case)
    scale = options.pop("scale", case.q.shape[2] ** -0.5)
    sinks = options.pop("sinks", None)
    run = jitted(implementation, scale=scale, decode_only=decode_only, **options)
    out = run(*case.arrays(), sinks=None if sinks is None else jnp.asarray(sinks))
    assert out.shape == case.q.shape
    assert out.dtype == case.q.dtype
    expected = attention_spec(case, scale=scale, sinks=sinks, **options)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=TOLERANCE[case.q.dtype.name], rtol=0)
    return out


def mixed_rows(block_size, rng):
    """Decodes of every length about a block's, then chunks: a whole prompt, a later chunk, one token more than a tile."""
    edges = [(n, 1) for n in (1, block_size - 1, block_size, block_size + 1, 3 * block_size + 1)]
    chunks = [(5, 5), (2 * block_size + 3, 4), (PREFILL_TOKENS + 9, PREFILL_TOKENS + 1), (150, 40)]
    return edges, chunks


# (block size, heads, KV heads, head size)
SHAPES = [
    (32, 9, 3, 64),
    (16, 4, 4, 64),
    (64, 4, 2, 128),
    (4, 8, 2, 16),
    (16, 16, 1, 80),
    pytest.param(32, 7, 1, 96, marks=pytest.mark.slow),
    (32, 2, 1, 256),
    (3, 6, 2, 10),
]


@pytest.mark.parametrize(("block_size", "heads", "kv_heads", "head_dim"), SHAPES)
def test_a_mixed_batch(implementation, block_size, heads, kv_heads, head_dim):
    rng = np.random.default_rng(block_size * heads)
    edges, chunks = mixed_rows(block_size, rng)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    case = make_case(rng, edges + chunks, pages=150 // block_size + 3, num_rows=12, num_tokens=140, **shape)
    assert case.num_decodes == len(edges)
    check(case, implementation)


@pytest.mark.parametrize(("block_size", "heads", "kv_heads", "head_dim"), SHAPES[:4])
def test_decode_only(implementation, block_size, heads, kv_heads, head_dim):
    """More rows than a block holds, of all lengths, and padding rows at the end."""
    rng = np.random.default_rng(block_size + heads)
    lengths = [*rng.integers(1, 5 * block_size, 20), 1, block_size - 1, block_size, block_size + 1, 200]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    rows = [(int(length), 1) for length in lengths]
    case = make_case(rng, rows, pages=-(-max(lengths) // block_size), num_rows=37, num_tokens=37, **shape)
    assert decode_tile(37, block_size, case.block_tables.shape[1])[0] < 25
    out = check(case, implementation, decode_only=True)
    same = jitted(implementation, scale=head_dim**-0.5, decode_only=False)(*case.arrays(), sinks=None)
    np.testing.assert_allclose(same, out, atol=1e-6)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("decode_only", [False, True])
def test_half_precision(implementation, dtype, decode_only):
    rng = np.random.default_rng(7)
    rows = [(n, 1) for n in (1, 40, 200)] + ([] if decode_only else [(90, 70)])
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 64, "block_size": 32}
    case = make_case(rng, rows, pages=8, num_rows=4, num_tokens=4 if decode_only else 80, dtype=dtype, **shape)
    check(case, implementation, decode_only=decode_only)


OPTIONS = [
    {"sliding_window": 1},
    {"sliding_window": 7},
    {"sliding_window": 100},
    {"sliding_window": 10_000},
    {"logit_soft_cap": 0.5},
    {"sinks": np.array([-50.0, 0.0, 1.0, 20.0], np.float32)},
    {"scale": 3.0, "sliding_window": 40, "logit_soft_cap": 5.0, "sinks": np.array([0.0, 3.0, -1.0, 0.5], np.float32)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_options(implementation, options):
    rng = np.random.default_rng(3)
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16}
    decodes, chunks = [(n, 1) for n in (1, 7, 8, 16, 300)], [(9, 9), (300, 130)]
    mixed = make_case(rng, decodes + chunks, pages=20, num_rows=8, num_tokens=150, **shape)
    check(mixed, implementation, **options)
    check(make_case(rng, decodes, pages=20, num_rows=6, num_tokens=6, **shape), implementation, decode_only=True, **options)


LENGTHS = st.integers(1, 40)


@pytest.mark.parametrize("implementation", QUICK)
@settings(max_examples=25, deadline=None)
@given(
    decodes=st.lists(LENGTHS, max_size=18),
    chunks=st.lists(st.tuples(LENGTHS, st.integers(0, 30)), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_batch(implementation, decodes, chunks, seed):
    """Also rows of no queries among the chunks, and a batch of nothing but padding."""
    rows = [(n, 1) for n in decodes] + [(max(n, queries), queries) for n, queries in chunks]
    rng = np.random.default_rng(seed)
    size = 16 if implementation == "llvm" else 4
    shape = {"heads": 2, "kv_heads": 1, "head_dim": size, "block_size": size, "num_blocks": 230}
    case = make_case(rng, rows, pages=10, num_rows=22, num_tokens=140, **shape)
    check(case, implementation)


def test_a_batch_of_padding_alone_gives_zeros(implementation):
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 16, "block_size": 16}
    case = make_case(np.random.default_rng(0), [], pages=3, num_rows=5, num_tokens=5, **shape)
    skip_unless_served(implementation, case)
    for decode_only in (False, True):
        run = jitted(implementation, scale=1.0, decode_only=decode_only)
        np.testing.assert_array_equal(run(*case.arrays(), sinks=None), np.zeros((5, 2, 16)))


def test_one_query_by_hand(implementation):
    """Two keys, logits 0 and ln 3: weights 1/4 and 3/4. The other numbers of a head are zeros."""
    cache = np.full((3, 2, 1, 16, 16), np.nan, np.float32)
    cache[2, :, 0, :2] = 0
    cache[2, 0, 0, :2, :2] = [[0.0, 5.0], [2.0, 0.0]]
    cache[2, 1, 0, :2, :2] = [[4.0, 0.0], [8.0, 1.0]]
    q = np.zeros((1, 1, 16), np.float32)
    q[0, 0, 0] = np.log(3.0)
    case = Case(q, cache, np.array([[2]], np.int32), np.array([2], np.int32), np.array([0, 1], np.int32), 1)
    skip_unless_served(implementation, case)
    out = jitted(implementation, scale=0.5, decode_only=True)(*case.arrays(), sinks=None)
    np.testing.assert_allclose(out, [[[7.0, 0.75, *[0.0] * 14]]], rtol=1e-6)


@pytest.mark.parametrize("decode_only", [False, True])
def test_cache_is_updated_in_place_and_temporaries_do_not_grow_with_the_context(implementation, decode_only):
    """Two layers that write and then attend, as in a step: no copy of a cache, and nothing of the size of the context."""
    num_rows, num_tokens, block_size, num_blocks = 20, 20 if decode_only else 64, 16, 2000
    refusal = llvm_refusal(num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32", cache_dtype="float32")
    if implementation == "llvm" and refusal is not None:
        pytest.skip(refusal)

    def step(q, caches, slots, *arrays):
        new = []
        for cache in caches:
            cache = write_kv(cache, q[:, :2], q[:, 2:4], slots)
            q = q + paged_attention(q, cache, *arrays, scale=1.0, decode_only=decode_only, implementation=implementation)
            new.append(cache)
        return q, new

    def memory(pages):
        integers = [((num_tokens,)), (num_rows, pages), (num_rows,), (num_rows + 1,), ()]
        slots, *arrays = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers)
        q = jax.ShapeDtypeStruct((num_tokens, 4, 32), jnp.float32)
        caches = [jax.ShapeDtypeStruct((num_blocks, 2, 2, block_size, 32), jnp.float32)] * 2
        compiled = jax.jit(step, donate_argnums=1).lower(q, caches, slots, *arrays).compile()
        copies = re.findall(rf"= f32\[{num_blocks},[\d,]*\]\S* copy\(", compiled.as_text())
        return compiled.memory_analysis(), copies

    cache_bytes = 2 * num_blocks * 2 * 2 * block_size * 32 * 4
    (small, copies), (large, _) = memory(8), memory(512)
    assert not copies
    assert small.alias_size_in_bytes == cache_bytes
    assert small.temp_size_in_bytes < cache_bytes / 8
    # The block table itself, and copies of it sorted or padded.
    assert large.temp_size_in_bytes - small.temp_size_in_bytes < 8 * num_rows * 512 * 4


GOOD = {
    "q": jax.ShapeDtypeStruct((6, 4, 8), jnp.float32),
    "kv_cache": jax.ShapeDtypeStruct((10, 2, 2, 4, 8), jnp.float32),
    "block_tables": jax.ShapeDtypeStruct((3, 5), jnp.int32),
    "seq_lens": jax.ShapeDtypeStruct((3,), jnp.int32),
    "query_start_loc": jax.ShapeDtypeStruct((4,), jnp.int32),
    "num_decodes": jax.ShapeDtypeStruct((), jnp.int32),
    "sinks": jax.ShapeDtypeStruct((4,), jnp.float32),
}


def shaped(arrays, **options):
    options = {"scale": 1.0, "decode_only": False, **options}
    return jax.eval_shape(lambda arrays: paged_attention(**arrays, **options), arrays)


def test_good_arguments_pass():
    assert shaped(GOOD).shape == (6, 4, 8)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("q", (6, 32), "float32", r"q must be \[T, H, D\]"),
        ("q", (6, 4, 8), "int32", "q must be float32, bfloat16 or float16, got int32"),
        ("q", (6, 3, 8), "float32", "q has 3 heads"),
        ("kv_cache", (10, 2, 4, 8), "float32", "kv_cache must be"),
        ("kv_cache", (10, 3, 2, 4, 8), "float32", "kv_cache must be"),
        ("kv_cache", (10, 2, 2, 4, 8), "int8", "kv_cache must be float32, bfloat16, float16, float8_e4m3fn or uint8, got int8"),
        ("kv_cache", (10, 2, 2, 4, 8), "float8_e5m2", "kv_cache must be .* or uint8, got float8_e5m2"),
        ("k_scale", (2,), "float32", "k_scale needs a kv_cache of float8_e4m3fn, got float32"),
        ("kv_cache", (10, 2, 2, 4, 16), "float32", "head size 16, q has 8"),
        ("block_tables", (15,), "int32", "block_tables must be"),
        ("block_tables", (3, 5), "int16", "block_tables must be int32, got int16"),
        ("seq_lens", (4,), "int32", r"seq_lens must have shape \(3,\), got \(4,\)"),
        ("query_start_loc", (3,), "int32", r"query_start_loc must have shape \(4,\)"),
        ("num_decodes", (1,), "int32", "num_decodes must have shape"),
        ("num_decodes", (), "float32", "num_decodes must be int32"),
        ("sinks", (2,), "float32", "sinks must be float32"),
        ("sinks", (4,), "bfloat16", "sinks must be float32"),
    ],
)
def test_bad_arrays_are_refused(name, shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        shaped({**GOOD, name: jax.ShapeDtypeStruct(shape, dtype)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "scale must be positive, got 0.0"),
        ({"scale": float("nan")}, "scale must be positive, got nan"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"logit_soft_cap": -1.0}, "logit_soft_cap must be positive, got -1.0"),
        ({"decode_only": True}, "6 tokens and 3 rows"),
        ({"implementation": "magic"}, "must be one of auto, mosaic, triton, llvm, reference, got 'magic'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        shaped(GOOD, **options)
