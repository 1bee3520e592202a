"""Products with packed weights."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from foreign_frame import Pool
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.llvm.library import unavailable_reason
from kernels_pallas.llvm.matmul import pack, packed_columns, packed_matmul, packed_shape, packing_refusal, register_matmul

pytestmark = pytest.mark.skipif(unavailable_reason("float32") is not None, reason=str(unavailable_reason("float32")))

needs_bfloat16 = pytest.mark.skipif(unavailable_reason("bfloat16") is not None, reason=str(unavailable_reason("bfloat16")))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# (type of the operands, of the result)
TYPES = [
    ("float32", "float32"),
    pytest.param("bfloat16", "bfloat16", marks=needs_bfloat16),
    pytest.param("bfloat16", "float32", marks=needs_bfloat16),
]
DTYPES = ["float32", pytest.param("bfloat16", marks=needs_bfloat16)]


@functools.partial(jax.jit, static_argnums=(2, 3))
def product(x, packed, out_features, out_dtype=None):
    return packed_matmul(x, packed, out_features, out_dtype=out_dtype)


def random(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def check(rows, in_features, out_features, dtype, out_dtype):
    """Against float64: sums may round at every step, and once more for their result."""
    x, weight = random((rows, in_features), dtype, rows), random((in_features, out_features), dtype, out_features)
    found = product(x, pack(jnp.asarray(weight)), out_features, out_dtype)
    assert (found.shape, found.dtype.name) == ((rows, out_features), out_dtype)
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    exact, size = x @ weight, np.abs(x) @ np.abs(weight)
    bound = in_features * 2.0**-24 * size + (2.0**-8 * np.abs(exact) if out_dtype == "bfloat16" else 0)
    assert (np.abs(np.asarray(found, np.float64) - exact) <= bound).all()


@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
@pytest.mark.parametrize("rows", [1, 2, 13, 14, 15, 29, 168, 169, 200])
def test_every_number_of_rows(rows, dtype, out_dtype):
    check(rows, 70, 72, dtype, out_dtype)


@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
@pytest.mark.parametrize("columns", [1, 16, 31, 32, 33, 40, 72])
def test_every_number_of_columns(columns, dtype, out_dtype):
    check(15, 34, columns, dtype, out_dtype)
    check(3, 2, columns, dtype, out_dtype)


@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
def test_long_sums(dtype, out_dtype):
    check(5, 9000, 33, dtype, out_dtype)


def test_sums_of_one_number():
    x, weight = random((17, 1), "float32"), random((1, 37), "float32", 1)
    np.testing.assert_array_equal(product(x, pack(jnp.asarray(weight)), 37), x * weight)


def test_nothing_is_multiplied():
    assert product(np.zeros((0, 4), np.float32), pack(jnp.ones((4, 40))), 40).shape == (0, 40)


def test_by_hand():
    """[1 2] [[10 20] [30 40]] = [70 100]"""
    weight = pack(jnp.array([[10.0, 20.0], [30.0, 40.0]]))
    assert product(np.array([[1.0, 2.0]], np.float32), weight, 2).tolist() == [[70.0, 100.0]]


@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
def test_a_row_does_not_depend_on_the_others(dtype, out_dtype):
    x, weight = random((400, 46), dtype), pack(jnp.asarray(random((46, 75), dtype, 1)))
    together = np.asarray(product(x, weight, 75, out_dtype))
    for rows in (slice(0, 1), slice(399, 400), slice(5, 18), slice(160, 175), slice(100, 400)):
        assert np.asarray(product(x[rows], weight, 75, out_dtype)).tobytes() == together[rows].tobytes()
    for row in range(0, 400, 7):
        assert np.asarray(product(x[row : row + 1], weight, 75, out_dtype)).tobytes() == together[row].tobytes()


@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 31), (3, 33), (14, 40), (169, 15)])
def test_nothing_is_written_but_the_result(shape, dtype, out_dtype):
    x, weight = random((shape[0], 6), dtype), random((6, shape[1]), dtype, 1)
    around = np.full(300 + np.prod(shape) + 300, 7, jnp.dtype(out_dtype))
    result = around[300:-300].reshape(shape)
    for num_rows in (shape[0], shape[0] - 1):
        operands = [x, np.asarray(pack(jnp.asarray(weight))), np.array(num_rows, np.int32)]
        Pool(1).call(register_matmul(dtype, out_dtype), operands, result)
        expected = np.asarray(product(x, pack(jnp.asarray(weight)), shape[1], out_dtype)).copy()
        expected[num_rows:] = 0
        np.testing.assert_array_equal(result, expected)
        assert (around[:300] == 7).all()
        assert (around[-300:] == 7).all()


@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
def test_rows_that_are_padding_give_zeros(dtype, out_dtype):
    """Whatever they hold; the others are the same bits as without them."""
    x, weight = random((200, 6), dtype), pack(jnp.asarray(random((6, 40), dtype, 1)))
    whole = np.asarray(product(x, weight, 40, out_dtype))
    run = jax.jit(lambda x, n: packed_matmul(x, weight, 40, num_rows=n, out_dtype=out_dtype))
    for num_rows in (0, 1, 13, 14, 168, 169, 199, 200, 201, 2**31 - 1, -1):
        used = min(max(num_rows, 0), 200)
        x[used:] = np.nan
        found = np.asarray(run(x, np.int32(num_rows)))
        assert found[:used].tobytes() == whole[:used].tobytes()
        np.testing.assert_array_equal(found[used:], np.zeros((200 - used, 40)))
        x = random((200, 6), dtype)


@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
def test_infinity_and_nan_stay_in_their_rows_and_columns(dtype, out_dtype):
    x, weight = np.ones((20, 4), jnp.dtype(dtype)), np.ones((4, 40), jnp.dtype(dtype))
    x[3, 1], x[16, 0], weight[2, 37] = np.inf, np.nan, -np.inf
    found = np.asarray(product(x, pack(jnp.asarray(weight)), 40, out_dtype), np.float32)
    expected = np.full((20, 40), 4, np.float32)
    expected[3], expected[16], expected[:, 37] = np.inf, np.nan, -np.inf
    expected[[3, 16], 37] = np.nan
    np.testing.assert_array_equal(found, expected)


def bits_of_rounded(value):
    """Of a number that float32 holds, as a sum of two that bfloat16 holds, rounded to bfloat16."""
    high = (np.array(value, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    low = np.float32(value) - high
    assert low.astype(BFLOAT16) == low
    weight = np.array([[high], [low]], BFLOAT16)
    return np.asarray(product(np.ones((1, 2), BFLOAT16), pack(jnp.asarray(weight)), 1)).view(np.uint16).item()


@needs_bfloat16
@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (-1.0, 0xBF80),
        (1.0 + 2**-8, 0x3F80),  # between 1 and 1 + 2^-7: to the even one, below
        (1.0 + 3 * 2**-8, 0x3F82),  # above
        (-1.0 - 2**-8, 0xBF80),
        (1.0 + 2**-8 + 2**-15, 0x3F81),
        (1.0 + 2**-8 - 2**-16, 0x3F80),
        (2.0 - 2**-8, 0x4000),  # carries into the exponent
        (2.0**127 * (2 - 2**-8), 0x7F80),  # half way to what would be 2^128
        (2.0**127 * (2 - 2**-8 - 2**-15), 0x7F7F),
        (0.0, 0x0000),
    ],
)
def test_rounding_is_to_the_nearest_and_to_even_between_two(value, bits):
    assert bits_of_rounded(value) == bits


@needs_bfloat16
@pytest.mark.parametrize("bits", [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC1, 0xFFFF])
def test_nan_stays_nan_whatever_its_bits(bits):
    x = np.array([[bits, 0x3F80]], np.uint16).view(BFLOAT16)
    for out_dtype in ("bfloat16", "float32"):
        found = product(x, pack(jnp.ones((2, 3), jnp.bfloat16)), 3, out_dtype)
        assert np.isnan(np.asarray(found, np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_by_hand(dtype):
    """The first panel is full, the second has one column. bfloat16 has pairs of rows side by side."""
    weight = jnp.arange(2 * 33).reshape(2, 33).astype(dtype)
    packed = np.asarray(pack(weight), np.float32)
    assert packed.shape == packed_shape(2, 33, dtype)
    rows = packed if dtype == "float32" else packed[:, 0].transpose(0, 2, 1)
    assert rows[0].tolist() == [list(range(32)), list(range(33, 65))]
    assert rows[1].tolist() == [[32] + [0] * 31, [65] + [0] * 31]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(half_rows=st.integers(1, 20), columns=st.integers(1, 100), seed=st.integers(0, 99))
def test_every_column_is_read_back(dtype, half_rows, columns, seed):
    weight = random((2 * half_rows, columns), dtype, seed)
    packed = pack(jnp.asarray(weight))
    assert packed.shape == packed_shape(2 * half_rows, columns, dtype)
    order = np.random.default_rng(seed).permutation(columns)
    np.testing.assert_array_equal(packed_columns(packed, jnp.asarray(order)), weight.T[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_weight_is_an_argument_like_others(dtype):
    x, weight = random((6, 40), dtype), random((40, 40), dtype, 1)

    @functools.partial(jax.jit, donate_argnums=1)
    def twice(x, packed):
        x = packed_matmul(packed_matmul(x, packed, 40), packed, 40)
        return x, packed + packed

    packed = pack(jnp.asarray(weight))
    found, doubled = twice(x, packed)
    assert packed.is_deleted()
    once = product(x, pack(jnp.asarray(weight)), 40)
    np.testing.assert_array_equal(found, product(once, pack(jnp.asarray(weight)), 40))
    np.testing.assert_array_equal(doubled, pack(jnp.asarray(weight) * 2))


def shaped(x, weight, out_features, **options):
    return jax.eval_shape(lambda x, weight: packed_matmul(x, weight, out_features, **options), x, weight)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("x", "weight", "options", "message"),
    [
        (array(5, 4), array(2, 5, 32), {}, r"weight must be float32 \(2, 4, 32\), got float32 \(2, 5, 32\)"),
        (array(5, 4), array(1, 4, 32), {}, r"weight must be float32 \(2, 4, 32\), got float32 \(1, 4, 32\)"),
        (array(5, 4), array(4, 40), {}, r"weight must be float32 \(2, 4, 32\), got float32 \(4, 40\)"),
        (array(5, 4), array(2, 4, 32, dtype="bfloat16"), {}, r"weight must be float32 \(2, 4, 32\), got bfloat16 \(2, 4, 32\)"),
        (array(5, 4), array(2, 4, 32), {"out_dtype": jnp.bfloat16}, "out_dtype must be float32 or float32, got bfloat16"),
        (array(5, 4), array(2, 4, 32), {"out_dtype": jnp.int32}, "out_dtype must be .*, got int32"),
        (array(5, 4, dtype="float16"), array(2, 4, 32), {}, "used here: it computes in float32 and bfloat16, not float16"),
        (array(5, 4), array(2, 4, 32), {"num_rows": np.float32(3)}, r"num_rows must be int32 \(\), got float32 \(\)"),
        (array(5, 4), array(2, 4, 32), {"num_rows": np.zeros(1, np.int32)}, r"num_rows must be int32 \(\), got int32 \(1,\)"),
        (array(4), array(2, 4, 32), {}, r"x must be \[T, in\], got \(4,\)"),
        (array(2, 5, 4), array(2, 4, 32), {}, r"x must be \[T, in\], got \(2, 5, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(x, weight, options, message):
    with pytest.raises(ValueError, match=message):
        shaped(x, weight, 40, **options)


def test_an_odd_number_of_rows_is_refused():
    assert packing_refusal(3, "bfloat16") == "bfloat16 needs an even number of rows, not 3"
    assert packing_refusal(3, "float32") is None
    x, weight = array(5, 3, dtype="bfloat16"), array(2, 1, 32, 2, dtype="bfloat16")
    with pytest.raises(ValueError, match="cannot be used here: bfloat16 needs an even number of rows, not 3"):
        shaped(x, weight, 40)
