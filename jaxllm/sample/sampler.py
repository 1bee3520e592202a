"""From logits to token ids. One function inside the step's jit; no option of a request is static.

The order is fixed: allowed token ids, logit_bias, min_tokens, penalties, bad words, temperature, min_p, top_k, top_p, random
choice. (The bit mask of a structured output will come first of all: it is `mask_tokens` once more.) Greedy rows take the largest
logit after bad words.

What no row of the batch uses does not run: one `lax.cond` skips everything beyond the greedy choice, further ones inside it the
changes to the logits, the random choice and the log probabilities.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.config import LogprobsMode
from jaxllm.sample.limits import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jaxllm.sample.logprobs import LogprobsArrays, compute_logprobs, no_logprobs, num_columns
from jaxllm.sample.state import NO_LOGPROBS, SamplingMetadata
from kernels_pallas.sampling import apply_penalties, argmax, choose, mask_tokens, thresholds


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerOutput:
    """What a step sampled; zeros in `logprobs` if no row asks for any."""

    token_ids: jax.Array  # int32 [R], always in [0, V)
    logprobs: LogprobsArrays[jax.Array]


@dataclass(frozen=True)
class _Uses:
    """Which rows need which change of their logits. All bool [R]."""

    allowed: jax.Array
    bias: jax.Array
    min_tokens: jax.Array
    penalties: jax.Array
    bad_words: jax.Array

    @classmethod
    def of(cls, metadata: SamplingMetadata, num_outputs: jax.Array) -> "_Uses":
        return cls(
            allowed=metadata.num_allowed > 0,
            bias=metadata.num_bias > 0,
            min_tokens=(metadata.num_stop_ids > 0) & (num_outputs < metadata.min_tokens),
            penalties=metadata.uses_penalties,
            bad_words=metadata.num_bad_words > 0,
        )

    @property
    def any(self) -> jax.Array:
        return (self.allowed | self.bias | self.min_tokens | self.penalties | self.bad_words).any()


def row_uniforms(metadata: SamplingMetadata, positions: jax.Array) -> jax.Array:
    """Two uniforms in [0, 1 - 2**-24] a row, from the request's seed and the position of the token alone: float32 [R, 2]."""

    def draw(high: jax.Array, low: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.stack([high, low]), impl="threefry2x32")
        # The folded key is itself two words of threefry's output: hashing it once more would add nothing.
        bits = jax.random.key_data(jax.random.fold_in(key, position))
        return (bits >> 8).astype(jnp.float32) * 2.0**-24

    return jax.vmap(draw)(metadata.seed_high, metadata.seed_low, positions)


def _forbid(logits: jax.Array, token_ids: jax.Array, banned: jax.Array) -> jax.Array:
    """Set the logits of `token_ids` [R, n] to -inf where `banned` [R, n], except in a row that would have none left."""
    rows, vocab_size = logits.shape
    places = jnp.where(banned, token_ids, vocab_size)
    left = logits.at[jnp.arange(rows)[:, None], places].set(-jnp.inf, mode="drop")
    return jnp.where((left > -jnp.inf).any(axis=1, keepdims=True), left, logits)


def _add_bias(logits: jax.Array, metadata: SamplingMetadata, active: jax.Array) -> jax.Array:
    rows, vocab_size = logits.shape
    used = (jnp.arange(MAX_LOGIT_BIAS) < metadata.num_bias[:, None]) & active[:, None]
    places = jnp.where(used, metadata.tables.bias_ids[metadata.row_ids], vocab_size)
    return logits.at[jnp.arange(rows)[:, None], places].add(metadata.tables.bias_values[metadata.row_ids], mode="drop")


def _forbid_stop_ids(logits: jax.Array, metadata: SamplingMetadata, active: jax.Array) -> jax.Array:
    used = jnp.arange(MAX_STOP_TOKEN_IDS) < metadata.num_stop_ids[:, None]
    return _forbid(logits, metadata.tables.stop_ids[metadata.row_ids], used & active[:, None])


def _penalize(logits: jax.Array, metadata: SamplingMetadata, active: jax.Array) -> jax.Array:
    return apply_penalties(
        logits,
        metadata.row_ids,
        metadata.tables.prompt_bits,
        metadata.tables.output_counts,
        metadata.repetition_penalty,
        metadata.frequency_penalty,
        metadata.presence_penalty,
        active,
    )


def _forbid_bad_words(logits: jax.Array, metadata: SamplingMetadata, num_outputs: jax.Array, active: jax.Array) -> jax.Array:
    """A bad word's last token is forbidden where the output ends with its other tokens."""
    back = jnp.arange(1, MAX_BAD_WORD_LEN)
    places = (num_outputs[:, None] - back) % MAX_BAD_WORD_LEN
    ended_with = jnp.take_along_axis(metadata.tables.recent[metadata.row_ids], places, axis=1)
    # No token is -2: before its first output, a request's output ends with nothing.
    ended_with = jnp.where(back <= num_outputs[:, None], ended_with, -2)
    words = metadata.tables.bad_words[metadata.row_ids]
    before = words[:, :, 1:]
    matches = ((before == ended_with[:, None]) | (before == -1)).all(axis=2)
    used = (jnp.arange(MAX_BAD_WORDS) < metadata.num_bad_words[:, None]) & active[:, None]
    return _forbid(logits, words[:, :, 0], matches & used)


def _process(logits: jax.Array, metadata: SamplingMetadata, num_outputs: jax.Array, uses: _Uses) -> jax.Array:
    """All changes before temperature: float32 [R, V] -> float32 [R, V]."""

    def where_used(active: jax.Array, change: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
        return lax.cond(active.any(), change, lambda x: x, logits)

    m, u = metadata, uses
    logits = where_used(u.allowed, lambda x: mask_tokens(x, m.row_ids, m.tables.allowed_bits, u.allowed), logits)
    logits = where_used(u.bias, lambda x: _add_bias(x, m, u.bias), logits)
    logits = where_used(u.min_tokens, lambda x: _forbid_stop_ids(x, m, u.min_tokens), logits)
    logits = where_used(u.penalties, lambda x: _penalize(x, m, u.penalties), logits)
    return where_used(u.bad_words, lambda x: _forbid_bad_words(x, m, num_outputs, u.bad_words), logits)


def _choose(logits: jax.Array, metadata: SamplingMetadata, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Token ids, and the temperature and the lowest logit with which they were drawn (1 and -inf in greedy rows). All [R]."""
    greedy_ids, row_max = argmax(logits)
    random = metadata.temperature > 0.0
    temperature = jnp.where(random, metadata.temperature, 1.0)
    unlimited = jnp.full_like(row_max, -jnp.inf)

    def draw() -> tuple[jax.Array, jax.Array]:
        limited = (metadata.top_k > 0) | (metadata.top_p < 1.0) | (metadata.min_p > 0.0)
        lowest = lax.cond(
            limited.any(),
            lambda: thresholds(logits, row_max, temperature, metadata.top_k, metadata.top_p, metadata.min_p),
            lambda: unlimited,
        )
        token_ids = choose(logits, row_max, temperature, lowest, row_uniforms(metadata, positions))
        return jnp.where(random, token_ids, greedy_ids), lowest

    token_ids, lowest = lax.cond(random.any(), draw, lambda: (greedy_ids, unlimited))
    return token_ids, temperature, lowest


def sample(
    logits: jax.Array,
    metadata: SamplingMetadata,
    positions: jax.Array,
    *,
    max_logprobs: int,
    logprobs_mode: LogprobsMode,
) -> SamplerOutput:
    """Sample one token for each row. Inside jit.

    A row's token depends on its logits, its parameters, its seed and its position alone: not on the other rows, the number of
    rows or the row that the request has. Where min_tokens or bad words would forbid all that is left, they are passed over.

    Args:
        logits: float32 [R, V]; anything in padding rows.
        metadata: of these rows.
        positions: int32 [R]: where in its request the token sampled here will be; the first token of the prompt has position 0.
        max_logprobs: most log probabilities that a request may ask for, -1 for the whole vocabulary. Engine-wide: static.
        logprobs_mode: engine-wide: static.
    """
    rows, vocab_size = logits.shape
    num_best = num_columns(max_logprobs, vocab_size)
    num_outputs = positions - metadata.num_prompt_tokens
    uses = _Uses.of(metadata, num_outputs)
    asks = metadata.num_logprobs > NO_LOGPROBS

    def beyond_greedy() -> SamplerOutput:
        changed = lax.cond(uses.any, lambda x: _process(x, metadata, num_outputs, uses), lambda x: x, logits)
        token_ids, temperature, lowest = _choose(changed, metadata, positions)

        def logprobs() -> LogprobsArrays[jax.Array]:
            shown = logits
            if logprobs_mode.startswith("processed"):
                shown = jnp.where(changed >= lowest[:, None], changed / temperature[:, None], -jnp.inf)
            extra_ids = metadata.tables.logprob_ids[metadata.row_ids]
            any_extra = (metadata.num_logprob_ids > 0).any()
            return compute_logprobs(shown, token_ids, num_best, logprobs_mode.endswith("logprobs"), extra_ids, any_extra)

        return SamplerOutput(token_ids, lax.cond(asks.any(), logprobs, lambda: no_logprobs(rows, num_best)))

    return lax.cond(
        uses.any | asks.any() | (metadata.temperature > 0.0).any(),
        beyond_greedy,
        lambda: SamplerOutput(argmax(logits)[0], no_logprobs(rows, num_best)),
    )
