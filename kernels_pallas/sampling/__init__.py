"""Operations of the sampler on logits [R, V]. Each is one pass or few over the logits; `reference.py` is the specification.

All take float32 logits and treat every row alone: what is in one row (NaN in a padding row included) never reaches another.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.sampling import reference

__all__ = [
    "apply_penalties",
    "argmax",
    "choose",
    "log_sum_exp",
    "mask_tokens",
    "thresholds",
    "token_ranks",
    "top_tokens",
]


def _check_logits(logits: jax.Array) -> None:
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32 [R, V], got {logits.dtype} {list(logits.shape)}")


def _check(name: str, array: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype | type) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} must be {jnp.dtype(dtype)} {list(shape)}, got {array.dtype} {list(array.shape)}")


def argmax(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit of each row and its token, the lowest id on ties.

    Args:
        logits: float32 [R, V].

    Returns:
        token ids int32 [R], always in [0, V), and logits float32 [R].
    """
    _check_logits(logits)
    return reference.argmax(logits)


def thresholds(
    logits: jax.Array,
    row_max: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """The lowest logit of each row that min-p, top-k and top-p, applied in this order, leave.

    With w = exp((logit - row_max) / temperature): min-p keeps the tokens with w >= min_p; top-k the k largest logits, those equal
    to the k-th included; top-p the smallest set of the largest logits, of what the other two left, whose share of their w
    reaches top_p, those equal to its smallest included.

    Args:
        logits: float32 [R, V].
        row_max: float32 [R], as `argmax` gives it.
        temperature: float32 [R], above 0.
        top_k: int32 [R]; below 1 for no limit.
        top_p: float32 [R]; 1 or more for no limit.
        min_p: float32 [R]; 0 or less for no limit.

    Returns:
        float32 [R]; -inf where nothing is dropped. The tokens with logits at or above it are the ones to choose from.
    """
    _check_logits(logits)
    rows = logits.shape[:1]
    for name, array in (("row_max", row_max), ("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        _check(name, array, rows, jnp.float32)
    _check("top_k", top_k, rows, jnp.int32)
    return reference.thresholds(logits, row_max, temperature, top_k, top_p, min_p)


def choose(
    logits: jax.Array,
    row_max: jax.Array,
    temperature: jax.Array,
    threshold: jax.Array,
    uniforms: jax.Array,
) -> jax.Array:
    """Draw a token from each row: softmax(logits / temperature) over the logits that are at least `threshold`.

    The first uniform chooses a block of the vocabulary by its mass, the second a token inside it, both by inverting the
    distribution function; the resolution is 2**-48 of the mass, the error that of float32 sums. A token without mass is never
    drawn from a row that has any.

    Args:
        logits: float32 [R, V].
        row_max: float32 [R], as `argmax` gives it.
        temperature: float32 [R], above 0.
        threshold: float32 [R], as `thresholds` gives it.
        uniforms: float32 [R, 2] in [0, 1 - 2**-24].

    Returns:
        token ids int32 [R], always in [0, V).
    """
    _check_logits(logits)
    rows = logits.shape[0]
    for name, array in (("row_max", row_max), ("temperature", temperature), ("threshold", threshold)):
        _check(name, array, (rows,), jnp.float32)
    _check("uniforms", uniforms, (rows, 2), jnp.float32)
    return reference.choose(logits, row_max, temperature, threshold, uniforms)


def top_tokens(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest logits of each row, largest first, lower ids first on ties (-0.0 and 0.0 in any order).

    Args:
        logits: float32 [R, V].
        k: in [1, V]; static.

    Returns:
        token ids int32 [R, k] and logits float32 [R, k].
    """
    _check_logits(logits)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be in [1, {logits.shape[1]}], got {k}")
    return reference.top_tokens(logits, k)


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """log(sum(exp(logits))) of each row: float32 [R, V] -> float32 [R]."""
    _check_logits(logits)
    return reference.log_sum_exp(logits)


def token_ranks(logits: jax.Array, token_logits: jax.Array) -> jax.Array:
    """1 + the number of logits in the row that are greater: float32 [R, V], float32 [R] -> int32 [R]."""
    _check_logits(logits)
    _check("token_logits", token_logits, logits.shape[:1], jnp.float32)
    return reference.token_ranks(logits, token_logits)


def mask_tokens(logits: jax.Array, row_ids: jax.Array, bits: jax.Array, active: jax.Array) -> jax.Array:
    """Set the logits of tokens whose bit is 0 to -inf, in the rows that are active.

    Args:
        logits: float32 [R, V].
        row_ids: int32 [R]: the row of `bits` for each row of logits; clamped into range.
        bits: int32 [S, ceil(V / 32)]: bit v % 32, the lowest first, of word v // 32 is token v's.
        active: bool [R].

    Returns:
        float32 [R, V].
    """
    _check_logits(logits)
    rows, vocab_size = logits.shape
    _check("row_ids", row_ids, (rows,), jnp.int32)
    _check("bits", bits, (bits.shape[0], -(-vocab_size // 32)), jnp.int32)
    _check("active", active, (rows,), jnp.bool_)
    return reference.mask_tokens(logits, row_ids, bits, active)


def apply_penalties(
    logits: jax.Array,
    row_ids: jax.Array,
    prompt_bits: jax.Array,
    output_counts: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
    active: jax.Array,
) -> jax.Array:
    """Penalties for tokens that have been seen, in the rows that are active.

    A token of the prompt or the output has its logit divided, if above 0, or multiplied, if not, by `repetition`. Then
    `frequency` times its count in the output and, if that is above 0, `presence` are subtracted.

    Args:
        logits: float32 [R, V].
        row_ids: int32 [R]: the row of the two tables for each row of logits; clamped into range.
        prompt_bits: int32 [S, ceil(V / 32)], as in `mask_tokens`.
        output_counts: uint16 [S, V].
        repetition, frequency, presence: float32 [R].
        active: bool [R].

    Returns:
        float32 [R, V].
    """
    _check_logits(logits)
    rows, vocab_size = logits.shape
    _check("row_ids", row_ids, (rows,), jnp.int32)
    _check("prompt_bits", prompt_bits, (prompt_bits.shape[0], -(-vocab_size // 32)), jnp.int32)
    _check("output_counts", output_counts, (prompt_bits.shape[0], vocab_size), jnp.uint16)
    for name, array in (("repetition", repetition), ("frequency", frequency), ("presence", presence)):
        _check(name, array, (rows,), jnp.float32)
    _check("active", active, (rows,), jnp.bool_)
    return reference.apply_penalties(logits, row_ids, prompt_bits, output_counts, repetition, frequency, presence, active)
