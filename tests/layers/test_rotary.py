"""Rotary embedding: frequencies by hand, rotation by its properties."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import RopeConfig
from jaxllm.layers.rotary import apply_rope, rope_cos_sin, rope_frequencies


def test_default_frequencies_by_hand():
    frequencies, factor = rope_frequencies(RopeConfig(theta=10000.0), 8, 100)
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    assert factor == 1.0
    assert frequencies.dtype == np.float32


def test_linear_divides_all():
    frequencies, _ = rope_frequencies(RopeConfig(theta=10000.0, type="linear", factor=4.0), 8, 100)
    np.testing.assert_allclose(frequencies, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)


def test_dynamic_by_hand():
    """Factor 2: the base grows by (2 * 2 - 1) ** (4 / 2) = 9."""
    frequencies, _ = rope_frequencies(RopeConfig(theta=100.0, type="dynamic", factor=2.0, original_max_position=16), 4, 16)
    np.testing.assert_allclose(frequencies, [1.0, 1 / 30], rtol=1e-6)


def test_llama3_by_hand():
    """Trained on 64: wavelengths 2 pi 10^i turn 10.19, 1.02, 0.10 and 0.01 times in it; kept above 4, divided below 1."""
    rope = RopeConfig(theta=1e4, type="llama3", factor=8.0, original_max_position=64, low_freq_factor=1.0, high_freq_factor=4.0)
    frequencies, _ = rope_frequencies(rope, 8, 100)
    share = (64 * 0.1 / (2 * np.pi) - 1) / 3
    np.testing.assert_allclose(frequencies, [1.0, 0.1 * (share + (1 - share) / 8), 0.01 / 8, 0.001 / 8], rtol=1e-6)


def test_yarn_by_hand():
    """Base 10000, trained on 628 tokens: pair 1 turns 10 times in them and is kept, pair 2 turns once and is divided."""
    rope = RopeConfig(
        theta=1e4, type="yarn", factor=4.0, original_max_position=628, beta_fast=10.0, beta_slow=1.0, truncate=False
    )
    frequencies, factor = rope_frequencies(rope, 8, 628)
    dimension = 8 * np.log(628 / (2 * np.pi * np.array([10.0, 1.0]))) / (2 * np.log(1e4))
    ramp = np.clip((np.arange(4) - dimension[0]) / (dimension[1] - dimension[0]), 0, 1)
    np.testing.assert_allclose(dimension, [1.0, 2.0], atol=1e-3)
    np.testing.assert_allclose(ramp, [0, 0, 1, 1], atol=1e-3)
    np.testing.assert_allclose(frequencies, 10.0 ** -np.arange(4) * (1 - ramp * 0.75), rtol=1e-6)
    assert factor == pytest.approx(1 + 0.1 * np.log(4))


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, 1 + 0.1 * np.log(8)),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (1 + 0.2 * np.log(8)) / (1 + 0.1 * np.log(8))),
        ({"mscale": 2.0}, 1 + 0.1 * np.log(8)),
    ],
)
def test_yarn_attention_factor(fields, factor):
    rope = RopeConfig(type="yarn", factor=8.0, original_max_position=128, **fields)
    assert rope_frequencies(rope, 16, 128)[1] == pytest.approx(factor)


def test_a_quarter_turn_by_hand():
    """Frequencies 1 and 0: the first pair, dimensions 0 and 2, turns by 90 degrees, the second stays."""
    cos, sin = jnp.array([[0.0, 1.0]]), jnp.array([[1.0, 0.0]])
    np.testing.assert_allclose(apply_rope(jnp.array([[[1.0, 2.0, 3.0, 4.0]]]), cos, sin), [[[-3.0, 2.0, 1.0, 4.0]]])


@settings(max_examples=20, deadline=None)
@given(a=st.integers(0, 5000), b=st.integers(0, 5000), shift=st.integers(0, 3000), seed=st.integers(0, 1000))
def test_products_depend_on_the_distance_alone(a, b, shift, seed):
    frequencies, factor = rope_frequencies(RopeConfig(theta=500.0), 16, 8192)
    q, k = jnp.asarray(np.random.default_rng(seed).standard_normal((2, 1, 1, 16)), jnp.float32)

    def product(position_q, position_k):
        turned = [
            apply_rope(x, *rope_cos_sin(jnp.array([position], jnp.int32), frequencies, factor))
            for x, position in ((q, position_q), (k, position_k))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert product(a + shift, b + shift) == pytest.approx(product(a, b), abs=0.02)


def test_rotation_is_done_in_float32():
    x = jnp.full((1, 1, 4), 1.0, jnp.bfloat16)
    out = apply_rope(x, jnp.full((1, 2), 0.6, jnp.float32), jnp.full((1, 2), 0.8, jnp.float32))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32)[0, 0], [-0.2, -0.2, 1.4, 1.4], rtol=2**-8)
