"""Rotary position embedding in Hugging Face's layout: the two halves of a head rotate against each other.

Source: Su et al., 2021, arXiv 2104.09864; the stretched kinds are cited at their functions.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[np.ndarray, float]:
    """Angle per position of each pair of dimensions, and the factor on cos and sin.

    Args:
        max_position_embeddings: of the model's config.

    Returns:
        (float32 [D/2] in radians, factor): the factor is 1 for every kind but yarn.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    if rope.type == "dynamic":
        return _f32(_dynamic_theta(rope, head_dim, max_position_embeddings) ** -exponents), 1.0
    inv_freq = rope.theta**-exponents
    if rope.type == "linear":
        return _f32(inv_freq / rope.factor), 1.0
    if rope.type == "llama3":
        return _f32(_llama3(rope, inv_freq)), 1.0
    if rope.type == "yarn":
        return _f32(_yarn(rope, inv_freq, head_dim)), _yarn_attention_factor(rope)
    return _f32(inv_freq), 1.0


def rope_cos_sin(positions: jax.Array, inv_freq: np.ndarray, factor: float) -> tuple[jax.Array, jax.Array]:
    """positions int [T] -> (cos, sin), each float32 [T, D/2], multiplied by `factor`."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [T, heads, D] by cos and sin [T, D/2], in float32; the result has the dtype of x."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def _dynamic_theta(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> float:
    """The NTK-aware base at the longest length, used at every length: keys stay valid in the cache as a request grows.

    (factor * L' / L - (factor - 1)) ** (D / (D - 2)) with L' = L * factor, as vLLM has it.
    """
    longest = max_position_embeddings * rope.factor
    stretch = rope.factor * longest / max_position_embeddings - (rope.factor - 1)
    return rope.theta * stretch ** (head_dim / (head_dim - 2))


def _llama3(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Long wavelengths divided by the factor, short ones kept, a linear ramp between. Source: Llama 3.1's model code."""
    assert rope.original_max_position is not None
    wavelengths = 2 * math.pi / inv_freq
    turns = rope.original_max_position / wavelengths
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return inv_freq / rope.factor * (1 - smooth) + inv_freq * smooth


def _yarn(rope: RopeConfig, inv_freq: np.ndarray, head_dim: int) -> np.ndarray:
    """Pairs that turn often keep their frequency, the others are interpolated. Source: Peng et al., 2023, arXiv 2309.00071."""
    assert rope.original_max_position is not None

    def dimension_with(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    interpolated = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return inv_freq / rope.factor * interpolated + inv_freq * (1 - interpolated)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """0.1 m ln(factor) + 1 (arXiv 2309.00071, section 3.4), or the ratio of two such where the config gives both scales."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return of(rope.mscale) / of(rope.mscale_all_dim)
    return of(1.0)
