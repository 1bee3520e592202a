"""write_kv against one assignment a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.kv_cache_write import write_kv

NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 5, 2, 4, 6
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
NUM_TOKENS = 12

jitted = jax.jit(write_kv)


@settings(max_examples=50, deadline=None)
@given(
    slots=st.lists(st.integers(0, NUM_SLOTS - 1), max_size=NUM_TOKENS, unique=True),
    padding=st.lists(st.sampled_from([-1, -2, -NUM_SLOTS, NUM_SLOTS, NUM_SLOTS + 3, 2**31 - 1, -(2**31)]), min_size=NUM_TOKENS),
    seed=st.integers(0, 2**32 - 1),
)
def test_tokens_go_to_their_slots_and_padding_nowhere(slots, padding, seed):
    rng = np.random.default_rng(seed)
    mapping = np.array(slots + padding[len(slots) : NUM_TOKENS], np.int64)
    rng.shuffle(mapping)
    cache = rng.standard_normal((NUM_BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)).astype(np.float32)
    k, v = rng.standard_normal((2, NUM_TOKENS, KV_HEADS, HEAD_DIM)).astype(np.float32)
    expected = cache.copy()
    for token, slot in enumerate(mapping):
        if 0 <= slot < NUM_SLOTS:
            expected[slot // BLOCK_SIZE, 0, :, slot % BLOCK_SIZE] = k[token]
            expected[slot // BLOCK_SIZE, 1, :, slot % BLOCK_SIZE] = v[token]
    out = jitted(jnp.asarray(cache), jnp.asarray(k), jnp.asarray(v), jnp.asarray(mapping, jnp.int32))
    np.testing.assert_array_equal(out, expected)


def test_padding_may_hold_nan():
    cache = jnp.zeros((NUM_BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM))
    k = jnp.full((3, KV_HEADS, HEAD_DIM), jnp.nan).at[1].set(2.0)
    out = jitted(cache, k, k, jnp.array([-1, 7, NUM_SLOTS], jnp.int32))
    assert float(jnp.sum(out)) == 2 * 2.0 * KV_HEADS * HEAD_DIM


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_a_donated_cache_is_written_in_place(dtype, num_tokens):
    cache = jax.ShapeDtypeStruct((400, 2, 3, 16, 64), dtype)
    new = jax.ShapeDtypeStruct((num_tokens, 3, 64), dtype)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    memory = jax.jit(write_kv, donate_argnums=0).lower(cache, new, new, slots).compile().memory_analysis()
    size = 400 * 2 * 3 * 16 * 64 * jnp.dtype(dtype).itemsize
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 16


@pytest.mark.parametrize(
    ("cache", "k", "v", "slots", "message"),
    [
        ((5, 2, 4, 6), (3, 2, 6), (3, 2, 6), (3,), "kv_cache must be"),
        ((5, 3, 2, 4, 6), (3, 2, 6), (3, 2, 6), (3,), "kv_cache must be"),
        ((5, 2, 2, 4, 6), (3, 1, 6), (3, 2, 6), (3,), "k must be"),
        ((5, 2, 2, 4, 6), (3, 2, 6), (3, 2, 5), (3,), "v must be"),
        ((5, 2, 2, 4, 6), (3, 2, 6), (3, 2, 6), (4,), "k must be"),
        ((5, 2, 2, 4, 6), (3, 2, 6), (3, 2, 6), (3, 1), "slot_mapping must be"),
    ],
)
def test_bad_shapes_are_refused(cache, k, v, slots, message):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (cache, k, v)]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(write_kv, *arrays, jax.ShapeDtypeStruct(slots, jnp.int32))


@pytest.mark.parametrize("name", ["kv_cache", "k", "v", "slot_mapping"])
def test_bad_dtypes_are_refused(name):
    arrays = {
        "kv_cache": jax.ShapeDtypeStruct((5, 2, 2, 4, 6), jnp.float32),
        "k": jax.ShapeDtypeStruct((3, 2, 6), jnp.float32),
        "v": jax.ShapeDtypeStruct((3, 2, 6), jnp.float32),
        "slot_mapping": jax.ShapeDtypeStruct((3,), jnp.int32),
    }
    arrays[name] = jax.ShapeDtypeStruct(arrays[name].shape, jnp.int16)
    with pytest.raises(ValueError, match=rf"{name} must be (float32|int32).*got int16"):
        jax.eval_shape(lambda arrays: write_kv(**arrays), arrays)
