"""A KV cache of 8-bit floating point numbers with a scale a head: writing, and attention by the reference."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_spec import attention_spec, fp8_case, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.fp8 import bits_of, saturated
from kernels_pallas.kv_cache_write import write_kv
from kernels_pallas.paged_attention import Call, paged_attention
from kernels_pallas.paged_attention.implementations import self_test

FP8 = jnp.float8_e4m3fn
SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16}


def write_one(values, scale, dtype=FP8, source=jnp.float32):
    """What a cache of one block, one head and one slot a value holds, K plane, then V plane (of the negated values)."""
    count = len(values)
    cache = jnp.zeros((1, 2, 1, count, 1), dtype)
    x = jnp.asarray(values, source).reshape(count, 1, 1)
    scales = {} if scale is None else {"k_scale": jnp.array([scale]), "v_scale": jnp.array([2 * scale])}
    out = write_kv(cache, x, -x, jnp.arange(count, dtype=jnp.int32), **scales)
    assert out.dtype == dtype
    return np.asarray(out).view(FP8).astype(np.float32).reshape(2, count)


@pytest.mark.parametrize("dtype", [FP8, jnp.uint8])
@pytest.mark.parametrize("source", [jnp.float32, jnp.bfloat16])
def test_written_by_hand(dtype, source):
    """Three bits after the leading one: 17 lies between 16 and 18, and goes to the even one; 2 ** -9 is the smallest number."""
    values = [1.0, 17.0, 19.0, 448.0, 449.0, 1e30, -1e30, 2.0**-9, 2.0**-11, np.inf]
    expected = [1.0, 16.0, 20.0, 448.0, 448.0, 448.0, -448.0, 2.0**-9, 0.0, 448.0]
    stored = write_one(values, None, dtype, source)
    np.testing.assert_array_equal(stored, [expected, np.negative(expected)])


def test_divided_by_the_scale():
    """A scale of 4 for k, and of 8 for v: 1792 is the largest key and 3584 the largest value that they can tell."""
    stored = write_one([8.0, 1792.0, 1e6], 4.0)
    np.testing.assert_array_equal(stored, [[2.0, 448.0, 448.0], [-1.0, -224.0, -448.0]])


def test_nan_stays_nan():
    assert np.isnan(write_one([np.nan], 1.0)).all()


@pytest.mark.parametrize(("dtype", "largest"), [(jnp.float16, 65504.0), (jnp.bfloat16, 3.3895313892515355e38)])
@pytest.mark.parametrize("source", [jnp.float32, jnp.bfloat16])
def test_other_narrow_caches_saturate_too(dtype, largest, source):
    assert float(saturated(jnp.asarray(np.inf, jnp.float32), dtype)) == largest
    if dtype == jnp.float16:
        assert float(saturated(jnp.asarray(1e30, source), dtype)) == largest


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e6, 1e6, width=32), st.sampled_from([0.01, 0.5, 1.0, 3.0]))
def test_any_number_is_rounded_to_within_a_sixteenth(value, scale):
    stored = float(write_one([value], scale)[0, 0]) * np.float32(scale)
    reach = np.float32(scale) * 448
    expected = np.clip(value, -reach, reach)
    assert abs(stored - expected) <= max(abs(expected) / 16, scale * 2.0**-10) * (1 + 1e-6)


def test_a_donated_cache_is_written_in_place():
    num_tokens = 64
    cache = jax.ShapeDtypeStruct((400, 2, 3, 16, 64), jnp.uint8)
    new = jax.ShapeDtypeStruct((num_tokens, 3, 64), jnp.float32)
    scale, slots = jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((num_tokens,), jnp.int32)

    def step(cache, new, slots, scale):
        return write_kv(cache, new, new, slots, k_scale=scale, v_scale=scale)

    memory = jax.jit(step, donate_argnums=0).lower(cache, new, slots, scale).compile().memory_analysis()
    size = 400 * 2 * 3 * 16 * 64
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 8


def attend(case, **options):
    arrays, scales = case.arrays(), case.scales()
    call = functools.partial(paged_attention, scale=case.q.shape[2] ** -0.5, implementation="reference", **options)
    return np.asarray(jax.jit(call)(*arrays, **scales), np.float64)


EDGES = {"sliding_window": 20, "logit_soft_cap": 3.0}


@pytest.mark.parametrize(
    ("decode_only", "dtype", "options"),
    [(False, np.float32, {}), (False, ml_dtypes.bfloat16, EDGES), (True, np.float32, EDGES)],
)
def test_attention_against_float64(decode_only, dtype, options):
    rng = np.random.default_rng(3)
    rows = [(n, 1) for n in (1, 15, 16, 17, 200)] + ([] if decode_only else [(33, 33), (150, 70)])
    num_tokens = 6 if decode_only else 120
    case = fp8_case(rng, rows, pages=15, num_rows=6 if decode_only else 8, num_tokens=num_tokens, dtype=dtype, **SHAPE)
    out = attend(case, decode_only=decode_only, **options)
    expected = attention_spec(case.plain(), scale=0.25, **options)
    # Values are up to 2.5 times as large here as in the other tests.
    np.testing.assert_allclose(out, expected, atol=1e-5 if dtype == np.float32 else 6e-2, rtol=0)


def test_uint8_holds_the_same_numbers():
    case = fp8_case(np.random.default_rng(4), [(40, 1), (20, 9)], pages=4, **SHAPE)
    expected = attend(case, decode_only=False)
    case.kv_cache = case.kv_cache.view(np.uint8)
    np.testing.assert_array_equal(attend(case, decode_only=False), expected)


def test_attention_by_hand():
    """Keys stored as 0 and 2, scale 1/2: logits 0 and ln 3, weights 1/4 and 3/4. Values stored as 4 and 8, scale 3."""
    cache = np.full((3, 2, 1, 2, 2), np.nan, FP8)
    cache[2, 0, 0] = [[0.0, 5.0], [2.0, 0.0]]
    cache[2, 1, 0] = [[4.0, 0.0], [8.0, 1.0]]
    arrays = [[[2]], [2], [0, 1], 1]
    q = jnp.asarray([[[np.log(3.0), 0.0]]], jnp.float32)
    out = paged_attention(
        q,
        jnp.asarray(cache),
        *(jnp.asarray(x, jnp.int32) for x in arrays),
        scale=1.0,
        k_scale=jnp.array([0.5]),
        v_scale=jnp.array([3.0]),
        decode_only=True,
    )
    np.testing.assert_allclose(out, [[[21.0, 2.25]]], rtol=1e-6)


def test_sinks_have_no_scale():
    """A sink's logit of 0 beside one key of logit 0: half the weight."""
    cache = jnp.asarray(np.ones((1, 2, 1, 1, 2)), FP8)
    integers = [jnp.asarray(x, jnp.int32) for x in ([[0]], [1], [0, 1], 1)]
    scales = {"k_scale": jnp.array([7.0]), "v_scale": jnp.array([4.0])}
    out = paged_attention(jnp.zeros((1, 1, 2)), cache, *integers, scale=1.0, sinks=jnp.zeros(1), **scales, decode_only=True)
    np.testing.assert_allclose(out, [[[2.0, 2.0]]])


def test_what_is_written_is_attended_to():
    """One layer of a step, with numbers that need their scales: a thousand times what fits, and almost nothing."""
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, 5, 2, 16)).astype(np.float32) * np.array([[4.48e5], [1e-3]], np.float32)
    scales = {"k_scale": jnp.asarray([4e3, 1e-5]), "v_scale": jnp.asarray([4e3, 1e-5])}
    q = rng.standard_normal((5, 4, 16)).astype(np.float32) * np.array([1e-6, 1e-6, 1e3, 1e3], np.float32)[:, None]
    slots = jnp.arange(4, 9, dtype=jnp.int32)
    integers = [jnp.asarray(x, jnp.int32) for x in ([[1, 2]], [5], [0, 5], 0)]

    def layer(cache, scales):
        cache = write_kv(cache, k, v, slots, **scales)
        return paged_attention(jnp.asarray(q), cache, *integers, scale=0.25, **scales, decode_only=False)

    exact = np.asarray(layer(jnp.zeros((3, 2, 2, 4, 16)), {}))
    found = np.asarray(jax.jit(layer)(jnp.zeros((3, 2, 2, 4, 16), jnp.uint8), scales))
    for head in range(4):
        size = np.abs(exact[:, head]).max()
        assert np.abs(found - exact)[:, head].max() < 0.15 * size


def test_caches_of_other_floats():
    """bfloat16 keys and values for float32 queries: as if both had been rounded before."""
    rng = np.random.default_rng(6)
    case = make_case(rng, [(40, 1), (20, 9)], pages=4, **SHAPE)
    case.kv_cache = case.kv_cache.astype(ml_dtypes.bfloat16)
    out = paged_attention(*case.arrays(), scale=0.25, decode_only=False)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, attention_spec(case, scale=0.25), atol=3e-6, rtol=0)


def test_neither_temporaries_nor_copies_of_the_cache():
    num_blocks, num_tokens = 2000, 64

    def step(q, cache, slots, scale, *arrays):
        scales = {"k_scale": scale, "v_scale": scale}
        cache = write_kv(cache, q[:, :2], q[:, 2:4], slots, **scales)
        return paged_attention(q, cache, *arrays, scale=1.0, **scales, decode_only=False), cache

    integers = [(num_tokens,), (20, 32), (20,), (21,), ()]
    slots, *arrays = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers)
    q, scale = jax.ShapeDtypeStruct((num_tokens, 4, 32), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32)
    cache = jax.ShapeDtypeStruct((num_blocks, 2, 2, 16, 32), jnp.uint8)
    compiled = jax.jit(step, donate_argnums=1).lower(q, cache, slots, scale, *arrays).compile()
    cache_bytes = num_blocks * 2 * 2 * 16 * 32
    assert compiled.memory_analysis().alias_size_in_bytes == cache_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 2
    assert f"[{num_blocks},2,2,16,32]" in compiled.as_text()
    assert f"f16[{num_blocks}" not in compiled.as_text()


def test_the_self_test_has_scales():
    call = Call(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, dtype="bfloat16", cache_dtype="uint8")
    assert self_test("reference", call, None) is None


GOOD = {"k_scale": ((2,), "float32"), "v_scale": ((2,), "float32"), "kv_cache": ((5, 2, 2, 4, 6), "float8_e4m3fn")}


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("k_scale", (3,), "float32", r"k_scale must be float32 \[K\] = \(2,\), got float32 \(3,\)"),
        ("v_scale", (2,), "float16", r"v_scale must be float32 \[K\] = \(2,\), got float16 \(2,\)"),
        ("v_scale", (), "float32", r"v_scale must be float32 \[K\]"),
        ("kv_cache", (5, 2, 2, 4, 6), "float16", "k_scale needs a kv_cache of float8_e4m3fn, got float16"),
        ("kv_cache", (5, 2, 2, 4, 6), "float8_e5m2", "kv_cache must be float32, .* got float8_e5m2"),
    ],
)
@pytest.mark.parametrize("operation", ["write", "attend"])
def test_wrong_scales_are_refused(operation, name, shape, dtype, message):
    given = {key: jax.ShapeDtypeStruct(*value) for key, value in {**GOOD, name: (shape, dtype)}.items()}
    cache, scales = given.pop("kv_cache"), given
    x, integers = jax.ShapeDtypeStruct((3, 2, 6), "float32"), [(2, 5), (2,), (3,), ()]
    arrays = [jax.ShapeDtypeStruct(size, "int32") for size in ([(3,)] if operation == "write" else integers)]

    def call(cache, x, scales, *arrays):
        if operation == "write":
            return write_kv(cache, x, x, *arrays, **scales)
        return paged_attention(x, cache, *arrays, **scales, scale=1.0, decode_only=False)

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, cache, x, scales, *arrays)


def test_bits_of_others_are_themselves():
    x = jnp.ones(3, jnp.bfloat16)
    assert bits_of(x) is x
