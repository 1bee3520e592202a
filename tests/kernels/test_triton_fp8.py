"""The Triton kernels on a cache of 8-bit numbers, in Triton's interpreter, against the plain specification."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_spec import attention_spec, case_of, fp8_case

from kernels_pallas.paged_attention import Call, paged_attention
from kernels_pallas.paged_attention.implementations import self_test
from kernels_pallas.triton_call import Launch, call_triton, unavailable_reason

triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")
widen = pytest.importorskip("kernels_pallas.paged_attention.kernel_triton").widen
pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
# Values are up to 2.5 times as large here as in the tests of other caches.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 8e-3}
BFLOAT16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def attend(case, *, sinks=None, **options):
    run = jax.jit(functools.partial(paged_attention, implementation="triton", scale=case.q.shape[2] ** -0.5, **options))
    return run(*case.arrays(), **case.scales(), sinks=None if sinks is None else jnp.asarray(sinks))


def check(case, **options):
    out = attend(case, **options)
    assert out.dtype == case.q.dtype
    options = {name: value for name, value in options.items() if name in ("sliding_window", "logit_soft_cap", "sinks")}
    expected = attention_spec(case.plain(), scale=case.q.shape[2] ** -0.5, **options)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=TOLERANCE[case.q.dtype.name], rtol=0)


SINKS = np.array([0.5, 3.0], np.float32)
# (block size, heads, KV heads, head size), options, dtype
DECODES = [
    ((16, 8, 2, 64), {}, BFLOAT16),
    ((32, 2, 2, 96), {"sliding_window": 70, "logit_soft_cap": 5.0, "sinks": SINKS}, np.float32),
    pytest.param((64, 16, 1, 80), {"sliding_window": 70}, np.float16, marks=pytest.mark.slow),
    pytest.param((16, 4, 2, 128), {}, BFLOAT16, marks=pytest.mark.slow),
    pytest.param((16, 2, 1, 256), {"logit_soft_cap": 0.5}, BFLOAT16, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "options", "dtype"), DECODES)
def test_decode(shape, options, dtype):
    """Lengths about a block's and several tiles, and a padding row; blocks of no row hold NaN."""
    rows = [(length, 1) for length in (1, shape[0] - 1, shape[0] + 1, 300)]
    check(case_of(rows, shape, dtype, num_rows=5, num_tokens=5, make=fp8_case), decode_only=True, **options)


CHUNKS = [
    ((16, 8, 2, 64), {}, BFLOAT16),
    ((32, 2, 1, 96), {"sliding_window": 40, "logit_soft_cap": 5.0, "sinks": SINKS}, np.float32),
    pytest.param((64, 3, 1, 80), {"sliding_window": 100}, np.float16, marks=pytest.mark.slow),
    pytest.param((32, 5, 1, 128), {"sliding_window": 200}, BFLOAT16, marks=pytest.mark.slow),
    pytest.param((16, 4, 1, 256), {}, BFLOAT16, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "options", "dtype"), CHUNKS)
def test_mixed_batch(shape, options, dtype):
    """A decode, a later chunk that is no multiple of anything, a whole prompt, padding tokens and a padding row."""
    rows = [(2 * shape[0], 1), (150, 39), (33, 33)]
    check(case_of(rows, shape, dtype, num_rows=4, num_tokens=75, make=fp8_case), decode_only=False, **options)


def test_several_queries_a_decode_row():
    rows = [(70, 1), (70, 4), (140, 3), (2, 2)]
    case = case_of(rows, (16, 4, 1, 64), np.float32, num_rows=5, num_tokens=12, make=fp8_case)
    case.num_decodes = 4
    check(case, decode_only=True, max_decode_queries=4, sliding_window=66)


def test_uint8_holds_the_same_numbers():
    case = case_of([(40, 1), (20, 9)], (16, 4, 2, 16), np.float32, make=fp8_case)
    expected = attend(case, decode_only=False)
    case.kv_cache = case.kv_cache.view(np.uint8)
    np.testing.assert_array_equal(attend(case, decode_only=False), expected)


@pytest.mark.parametrize("given", [(), ("k_scale",), ("v_scale",)])
def test_a_scale_that_is_not_given_is_1(given):
    case = case_of([(40, 1), (20, 9)], (16, 4, 2, 16), np.float32, make=fp8_case)
    scales = {name: scale for name, scale in case.scales().items() if name in given}
    for name in {"k_scale", "v_scale"} - set(given):
        setattr(case, name, np.ones(2, np.float32))
    out = paged_attention(*case.arrays(), **scales, scale=0.25, decode_only=False, implementation="triton")
    np.testing.assert_allclose(out, attention_spec(case.plain(), scale=0.25), atol=TOLERANCE["float32"], rtol=0)


@triton.jit
def widen_kernel(words_ptr, out_ptr):
    words = tl.load(words_ptr.to(tl.pointer_type(tl.uint32)) + tl.arange(0, 64))
    numbers = widen(words[None, :], out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.arange(0, 256)[None, :], numbers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("order", [1, 3, -1])
def test_each_of_the_256_numbers(dtype, order):
    """Without rounding: those below the normal ones, both zeros and both NaN too, in each place of a word."""
    bits = (np.arange(256) * order).astype(np.uint8)
    out = {"out_ptr": jax.ShapeDtypeStruct((256,), dtype)}
    [found] = call_triton(widen_kernel, Launch((1, 1, 1), 1, 1, None), {"words_ptr": jnp.asarray(bits)}, out=out)
    found, expected = np.asarray(found, np.float32) * 256, bits.view(FP8).astype(np.float32)
    assert np.isnan(expected).sum() == 2
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))


@pytest.mark.parametrize("num_decodes", [0, 1])
def test_each_of_the_256_numbers_as_a_value(num_decodes):
    """A row of one token: its value times the scale is the result. The row is a prompt to one kernel, a decode to the other."""
    numbers = np.arange(256, dtype=np.uint8).view(FP8)
    cache = jnp.asarray(np.stack([np.zeros(256, FP8), numbers]).reshape(1, 2, 2, 1, 128))
    integers = [jnp.asarray(x, jnp.int32) for x in ([[0]], [1], [0, 1], num_decodes)]
    scales = {"v_scale": jnp.array([3.0, 0.25])}
    out = paged_attention(
        jnp.ones((1, 2, 128)), cache, *integers, **scales, scale=1.0, decode_only=False, implementation="triton"
    )
    np.testing.assert_array_equal(out[0], numbers.astype(np.float32).reshape(2, 128) * [[3.0], [0.25]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_self_test_has_scales(dtype):
    call = Call(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, dtype=dtype, cache_dtype="float8_e4m3fn")
    assert self_test("triton", call, None) is None
