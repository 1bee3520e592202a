"""The attention kernel for CPUs, beyond what every implementation is tested with in test_paged_attention.py."""

import functools
import itertools
import mmap
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_spec import Case, attention_spec, case_of
from foreign_frame import Pool

from kernels_pallas.llvm.library import unavailable_reason
from kernels_pallas.llvm.paged_attention import llvm_refusal, register_paged_attention
from kernels_pallas.paged_attention import paged_attention

pytestmark = pytest.mark.skipif(unavailable_reason("float32") is not None, reason=str(unavailable_reason("float32")))

needs_bfloat16 = pytest.mark.skipif(unavailable_reason("bfloat16") is not None, reason=str(unavailable_reason("bfloat16")))
BFLOAT16 = ml_dtypes.bfloat16
DTYPES = [np.float32, pytest.param(BFLOAT16, marks=needs_bfloat16)]
NO_RESERVE = 0x4000  # mmap.MAP_NORESERVE in Python 3.13
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2}


@functools.cache
def jitted(**options):
    return jax.jit(functools.partial(paged_attention, implementation="llvm", **options))


def attend(case, *, sinks=None, decode_only=False, scale=None, **options):
    run = jitted(scale=scale or case.q.shape[2] ** -0.5, decode_only=decode_only, **options)
    return np.asarray(run(*case.arrays(), sinks=None if sinks is None else jnp.asarray(sinks, jnp.float32)))


def check(case, *, decode_only=False, scale=None, atol=None, **options):
    found = attend(case, decode_only=decode_only, scale=scale, **options).copy()
    expected = attention_spec(case, scale=scale or case.q.shape[2] ** -0.5, **options)
    np.testing.assert_allclose(found.astype(np.float64), expected, atol=atol or TOLERANCE[case.q.dtype.name], rtol=0)
    return found


def part_of(case, row, start, stop):
    """The tokens from `start` to before `stop` of a row's, whose queries end where the row does, as a batch of their own."""
    begin, end = case.query_start_loc[row : row + 2]
    first = begin + start - (case.seq_lens[row] - (end - begin))
    q, table = case.q[first : first + stop - start], case.block_tables[row : row + 1]
    return Case(q, case.kv_cache, table, np.array([stop], np.int32), np.array([0, stop - start], np.int32), 0)


SINKS = np.array([-50.0, 0.0, 1.0, 20.0], np.float32)
OPTIONS = [{}, {"sliding_window": 37}, {"logit_soft_cap": 2.0, "sinks": SINKS}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_a_row_does_not_depend_on_the_others(dtype, options):
    rows = [(n, 1) for n in (1, 31, 32, 33, 333)]
    case = case_of(rows, (16, 4, 2, 32), dtype)
    together = attend(case, decode_only=True, **options)
    assert attend(case, **options).tobytes() == together.tobytes()
    for row, (length, _) in enumerate(rows):
        alone = part_of(case, row, length - 1, length)
        for decode_only in (False, True):
            assert attend(alone, decode_only=decode_only, **options).tobytes() == together[row].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("heads", [4, 12])
def test_a_prompt_can_be_cut_anywhere(dtype, options, heads):
    options = {**options, "sinks": np.tile(SINKS, heads // 4)} if "sinks" in options else options
    case = case_of([(200, 200), (45, 1)], (16, heads, 4, 32), dtype)
    whole = attend(case, **options)
    for cuts in ([0, 200], [0, 100, 200], [0, 1, 17, 48, 49, 131, 199, 200]):
        parts = [attend(part_of(case, 0, *cut), **options) for cut in itertools.pairwise(cuts)]
        assert np.concatenate(parts).tobytes() == whole[:200].tobytes()
    for token in (0, 31, 32, 100, 199):
        assert attend(part_of(case, 0, token, token + 1), decode_only=True, **options).tobytes() == whole[token].tobytes()


ROWS = [(1, 1), (64, 1), (100, 1), (70, 30), (20, 20)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
def test_block_sizes(dtype, block_size):
    check(case_of(ROWS, (block_size, 4, 2, 32), dtype))
    check(case_of(ROWS, (block_size, 4, 2, 32), dtype), sliding_window=21)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 5, 16, 17, 25, 48])
def test_group_sizes(dtype, group):
    check(case_of(ROWS, (16, 2 * group, 2, 32), dtype))


HEAD_SIZES = (16, 32, 48, 64, 80, 96, 112, 128, 176, 256)


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_head_sizes(head_dim):
    check(case_of(ROWS, (16, 4, 2, head_dim), np.float32))


@needs_bfloat16
@pytest.mark.parametrize("head_dim", HEAD_SIZES[1:])
def test_head_sizes_of_bfloat16(head_dim):
    check(case_of(ROWS, (16, 4, 2, head_dim), BFLOAT16))


GOOD = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": "float32", "cache_dtype": "float32"}
FLOAT16 = {"dtype": "float16", "cache_dtype": "float16"}
BFLOAT16S = {"dtype": "bfloat16", "cache_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 98}, "it needs at most 48 query heads a KV head, not 49"),
        ({"head_dim": 24}, "it needs a head size from 16 to 256 that is a multiple of 16, not 24"),
        ({"head_dim": 272}, "it needs a head size from 16 to 256 that is a multiple of 16, not 272"),
        ({"head_dim": 16, **BFLOAT16S}, "it needs a head size from 32 to 256 that is a multiple of 16, not 16"),
        ({"block_size": 4}, "it needs a block size that is a multiple of 16, not 4"),
        ({"cache_dtype": "bfloat16"}, "it needs a KV cache of the queries' type float32, not bfloat16"),
        ({"cache_dtype": "float8_e4m3fn"}, "it needs a KV cache of the queries' type float32, not float8_e4m3fn"),
        (FLOAT16, "it computes in float32 and bfloat16, not float16"),
    ],
)
def test_what_is_not_served(change, message):
    assert llvm_refusal(**GOOD) is None
    sizes = {**GOOD, **change}
    assert llvm_refusal(**sizes) == message
    q = jax.ShapeDtypeStruct((3, sizes["num_heads"], sizes["head_dim"]), sizes["dtype"])
    cache = jax.ShapeDtypeStruct((9, 2, sizes["num_kv_heads"], sizes["block_size"], sizes["head_dim"]), sizes["cache_dtype"])
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 4), (3,), (4,), ())]
    with pytest.raises(ValueError, match=f"'llvm' of paged_attention cannot be used: {message}"):
        jax.eval_shape(jitted(scale=1.0, decode_only=False), q, cache, *integers)


def signed_case(dtype, length=100, score=1.0):
    """A row whose every third key has the scores `score`, the others `-score`, whole numbers as values, and the case's mean of
    the values that belong to either."""
    case = case_of([(length, 1)], (16, 2, 1, 32), dtype)
    high = np.arange(length) % 3 == 0
    keys = np.zeros((length, 32))
    keys[:, 0] = np.where(high, 1, -1)
    values = np.random.default_rng(1).integers(-8, 9, (length, 32)).astype(np.float64)
    for key in range(length):
        block = case.block_tables[0, key // 16]
        case.kv_cache[block, 0, 0, key % 16], case.kv_cache[block, 1, 0, key % 16] = keys[key], values[key]
    case.q[:] = 0
    case.q[:, :, 0] = score
    return case, values[high].mean(axis=0), values[~high].mean(axis=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", [1e2, 1e4, 1e8, 1e30])
def test_far_scores(dtype, score):
    tolerance = {"atol": 1e-6} if dtype is np.float32 else {"rtol": 2**-8}
    for sign in (1, -1):
        case, high, low = signed_case(dtype, score=sign * score)
        found = attend(case, scale=1.0)[0].astype(np.float64)
        np.testing.assert_allclose(found, np.tile(high if sign > 0 else low, (2, 1)), **tolerance)


@pytest.mark.parametrize("score", [0.0, 3.0, -1e4, 1e4, -1e30, 1e30, -2e38])
def test_equal_scores_give_the_mean(score):
    case, _, _ = signed_case(np.float32)
    case.kv_cache[:, 0, :, :, 0] = 1
    case.q[:, :, 0] = score
    values = np.concatenate([case.kv_cache[block, 1, 0] for block in case.block_tables[0, :7]])[:100]
    np.testing.assert_allclose(attend(case, scale=1.0)[0], np.tile(values.mean(axis=0), (2, 1)), atol=1e-6)


@pytest.mark.parametrize("score", [1e4, -1e4, 1e30])
def test_a_soft_cap_of_far_scores(score):
    """Scores become the cap or its negative: 2 or -2."""
    case, high, low = signed_case(np.float32, score=score)
    weights = np.array([34, 66]) * np.exp([2.0, -2.0] if score > 0 else [-2.0, 2.0])
    expected = (weights[0] * high + weights[1] * low) / weights.sum()
    found = attend(case, scale=1.0, logit_soft_cap=2.0)[0]
    np.testing.assert_allclose(found, np.tile(expected, (2, 1)), atol=2e-6)


@pytest.mark.parametrize("cap", [0.1, 1.0, 30.0, 1e3, 1e6])
def test_soft_caps(cap):
    """As precise for scores far below the cap as for others."""
    check(case_of(ROWS, (16, 4, 2, 32), np.float32), scale=1.0, logit_soft_cap=cap, atol=6e-6)


def test_sinks_far_above_and_below_all_scores():
    case = case_of(ROWS, (16, 4, 2, 32), np.float32)
    plain = attend(case)
    for low in (-np.inf, -1e38, -1e4):
        assert attend(case, sinks=np.full(4, low)).tobytes() == plain.tobytes()
    for high in (1e3, 1e4, 1e38):
        np.testing.assert_array_equal(attend(case, sinks=np.full(4, high)), np.zeros_like(plain))
    mixed = attend(case, sinks=np.array([-np.inf, 1e4, -1e4, 0.0]))
    assert mixed[:, [0, 2]].tobytes() == plain[:, [0, 2]].tobytes()
    assert not mixed[:, 1].any()


def test_a_sink_beside_far_scores():
    """It counts like a key: 34 keys have its score."""
    case, high, _ = signed_case(np.float32, score=1e4)
    found = attend(case, scale=1.0, sinks=np.array([1e4, -1e4]))[0]
    np.testing.assert_allclose(found, [high * 34 / 35, high], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_of_one_gives_the_token_s_own_value(dtype):
    case = case_of([(33, 1), (70, 50)], (16, 4, 2, 32), dtype)
    found = attend(case, sliding_window=1)
    for token, (row, position) in enumerate([(0, 32), *((1, position) for position in range(20, 70))]):
        values = case.kv_cache[case.block_tables[row, position // 16], 1, :, position % 16]
        np.testing.assert_array_equal(found[token], np.repeat(values, 2, axis=0))


@pytest.mark.parametrize("garbage", [2**31 - 1, -(2**31), 10**8])
@pytest.mark.parametrize(("block_size", "window"), [(16, 1), (16, 20), (16, 33), (48, 50), (64, 20)])
def test_blocks_before_the_window_are_not_looked_for(block_size, window, garbage):
    """Neither the table's entries nor what they name: other rows may own it by now."""
    case = case_of([(300, 1), (17, 1), (290, 40)], (block_size, 4, 2, 32), np.float32)
    expected = attend(case, sliding_window=window)
    for row, first_query in ((0, 299), (2, 250)):
        unseen = max(0, first_query + 1 - window) // block_size
        assert unseen > 0
        case.kv_cache[case.block_tables[row, :unseen]] = np.nan
        case.block_tables[row, :unseen] = garbage
    assert attend(case, sliding_window=window).tobytes() == expected.tobytes()
    alone = part_of(case, 0, 299, 300)
    assert attend(alone, sliding_window=window, decode_only=True).tobytes() == expected[:1].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context(dtype):
    check(case_of([(20_000, 1), (5, 1)], (32, 4, 2, 32), dtype))
    check(case_of([(20_000, 1)], (32, 4, 2, 32), dtype), sliding_window=9_000)


def test_rows_without_tokens():
    """In the middle, with keys and without. Tokens of a row without keys, and after the last row, are zeros."""
    case = case_of([(40, 1), (50, 0), (20, 5), (0, 0), (33, 0), (60, 40)], (16, 4, 2, 32), np.float32, num_tokens=50)
    expected = check(case)
    assert not expected[46:].any()
    case.seq_lens[2] = 0
    expected[1:6] = 0
    np.testing.assert_array_equal(attend(case), expected)


@pytest.mark.parametrize("what", ["query", "key", "infinite key"])
def test_nan_is_not_hidden(what):
    """What went wrong before shows in all that depends on it, and nowhere else."""
    case = case_of([(20, 1), (40, 1), (50, 20)], (16, 4, 2, 32), np.float32)
    if what == "query":
        case.q[1, 0, 3] = np.nan
    else:
        case.q[1, :2, 3], case.q[1, 0, 3] = -1, 1
        case.kv_cache[case.block_tables[1, 1], 0, 0, 2, 3] = np.nan if what == "key" else np.inf
    found = attend(case)
    expected = np.zeros((22, 4), bool)
    expected[1, : 2 if what == "key" else 1] = True
    np.testing.assert_array_equal(np.isnan(found), np.repeat(expected[:, :, None], 32, axis=2))


def test_a_batch_of_no_tokens():
    arrays = [np.zeros((2, 3), np.int32), np.zeros(2, np.int32), np.zeros(3, np.int32), np.int32(0)]
    run = jitted(scale=1.0, decode_only=False)
    assert run(np.zeros((0, 4, 32), np.float32), np.zeros((4, 2, 2, 16, 32), np.float32), *arrays).shape == (0, 4, 32)


@needs_bfloat16
def test_a_cache_of_more_than_2_to_the_32_bytes():
    """Of memory that is not there until it is written."""
    case = case_of([(40, 1), (33, 20)], (16, 4, 2, 32), BFLOAT16)
    block_bytes = case.kv_cache[0].nbytes
    num_blocks = 5 * 2**30 // block_bytes
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, num_blocks * block_bytes, flags=flags)
    cache = np.frombuffer(memory, BFLOAT16).reshape(num_blocks, *case.kv_cache.shape[1:])
    table = np.linspace(0, num_blocks - 1, len(case.kv_cache)).astype(np.int32)
    cache[table] = case.kv_cache
    tables = table[np.clip(case.block_tables, 0, len(table) - 1)]
    numbers = [np.full(4, -np.inf, np.float32), np.array([32**-0.5, 0], np.float32), np.zeros(2, np.int32)]
    result = np.empty_like(case.q)
    operands = [case.q, cache, tables, case.seq_lens, case.query_start_loc, *numbers]
    Pool(1).call(register_paged_attention("bfloat16", 32), operands, result)
    np.testing.assert_array_equal(result, attend(case))


def test_no_memory_is_touched_but_the_arrays():
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parents[1]), str(tests)])}
    command = [sys.executable, str(tests / "llvm_guarded.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
