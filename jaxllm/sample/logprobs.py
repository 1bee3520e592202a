"""Log probabilities of sampled and of prompt tokens: fixed shapes on the device, what each request asked for on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.config import LogprobsMode
from jaxllm.core.output import LogprobsLists
from jaxllm.sample.limits import MAX_LOGPROB_TOKEN_IDS
from jaxllm.sampling_params import SamplingParams
from kernels_pallas.sampling import log_sum_exp, token_ranks, top_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogprobsArrays[Array: (jax.Array, np.ndarray)]:
    """Log probabilities (or logits, as the engine's logprobs_mode says) of n tokens. K is `num_columns`.

    Attributes:
        token_ids: the first column is the sampled or prompt token, then come the K best, the best first.
        ranks: of the first column: 1 + the number of tokens that are more probable.
        extra: of the tokens that the request named, in its order; columns beyond their number mean nothing.
    """

    token_ids: Array  # int32 [n, 1 + K]
    logprobs: Array  # float32 [n, 1 + K]
    ranks: Array  # int32 [n]
    extra: Array  # float32 [n, MAX_LOGPROB_TOKEN_IDS]


def num_columns(max_logprobs: int, vocab_size: int) -> int:
    """K, the best tokens that a row of LogprobsArrays holds."""
    return vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)


def no_logprobs(num_rows: int, num_best: int) -> LogprobsArrays[jax.Array]:
    """The arrays of a batch in which nobody asks: zeros."""
    return LogprobsArrays(
        token_ids=jnp.zeros((num_rows, 1 + num_best), jnp.int32),
        logprobs=jnp.zeros((num_rows, 1 + num_best), jnp.float32),
        ranks=jnp.zeros(num_rows, jnp.int32),
        extra=jnp.zeros((num_rows, MAX_LOGPROB_TOKEN_IDS), jnp.float32),
    )


def compute_logprobs(
    logits: jax.Array,
    token_ids: jax.Array,
    num_best: int,
    normalize: bool,
    extra_ids: jax.Array,
    any_extra: jax.Array,
) -> LogprobsArrays[jax.Array]:
    """Log probabilities of given tokens, of the best and of named ones. Inside jit.

    Args:
        logits: float32 [n, V].
        token_ids: int32 [n], in [0, V).
        num_best: K; static.
        normalize: log probabilities if True, logits if False; static.
        extra_ids: int32 [n, MAX_LOGPROB_TOKEN_IDS]; looked at only if `any_extra` (bool []).
    """
    rows, vocab_size = logits.shape
    own = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    ids, values = token_ids[:, None], own
    if num_best:
        best_ids, best = top_tokens(logits, num_best)
        ids, values = jnp.concatenate([ids, best_ids], axis=1), jnp.concatenate([own, best], axis=1)
    normalizer = log_sum_exp(logits)[:, None] if normalize else jnp.zeros((rows, 1), jnp.float32)
    extra = lax.cond(
        any_extra,
        lambda: jnp.take_along_axis(logits, jnp.clip(extra_ids, 0, vocab_size - 1), axis=1) - normalizer,
        lambda: jnp.zeros(extra_ids.shape, jnp.float32),
    )
    return LogprobsArrays(ids, values - normalizer, token_ranks(logits, own[:, 0]), extra)


def prompt_logprobs(
    logits: jax.Array,
    target_ids: jax.Array,
    num_best: int,
    mode: LogprobsMode,
    extra_ids: jax.Array | None = None,
) -> LogprobsArrays[jax.Array]:
    """Log probabilities of prompt tokens. Inside jit. Nothing is sampled from a prompt: "processed" is the same as "raw".

    Args:
        logits: float32 [C, V], of C neighbouring prompt positions.
        target_ids: int32 [C]: the prompt token that follows each of them.
        num_best: K; static.
        mode: static.
        extra_ids: int32 [MAX_LOGPROB_TOKEN_IDS], the tokens that the request named, filled up with anything; None for none.
    """
    rows = logits.shape[0]
    ids = jnp.zeros(MAX_LOGPROB_TOKEN_IDS, jnp.int32) if extra_ids is None else extra_ids
    return compute_logprobs(
        logits,
        target_ids,
        num_best,
        mode.endswith("logprobs"),
        jnp.broadcast_to(ids, (rows, MAX_LOGPROB_TOKEN_IDS)),
        jnp.asarray(extra_ids is not None),
    )


def to_lists(
    arrays: LogprobsArrays[np.ndarray], rows: slice, num_best: int, named_ids: Sequence[int] | None = None
) -> LogprobsLists:
    """On the host: one request's rows of the arrays, cut to what it asked for.

    Args:
        arrays: copied from the device.
        num_best: as the request gave it; -1 for all columns.
        named_ids: the tokens that the request named; they take the place of the best.
    """
    ranks = arrays.ranks[rows]
    if named_ids is not None:
        named = np.broadcast_to(np.asarray(named_ids, np.int32), (len(ranks), len(named_ids)))
        token_ids = np.concatenate([arrays.token_ids[rows, :1], named], axis=1)
        logprobs = np.concatenate([arrays.logprobs[rows, :1], arrays.extra[rows, : len(named_ids)]], axis=1)
        return LogprobsLists(token_ids, logprobs, ranks)
    width = arrays.token_ids.shape[1] if num_best == -1 else 1 + num_best
    if width > arrays.token_ids.shape[1]:
        raise ValueError(f"num_best must be at most {arrays.token_ids.shape[1] - 1}, got {num_best}")
    return LogprobsLists(arrays.token_ids[rows, :width], arrays.logprobs[rows, :width], ranks)


def sampled_logprobs(arrays: LogprobsArrays[np.ndarray], row: int, params: SamplingParams) -> LogprobsLists | None:
    """What a request gets for the token sampled in batch row `row`; None if it asked for nothing."""
    if params.num_logprobs is None:
        return None
    return to_lists(arrays, slice(row, row + 1), params.num_logprobs, params.logprob_token_ids)


def concatenate(lists: Sequence[LogprobsLists]) -> LogprobsLists:
    """One after the other, the narrower filled up on the right with token id -1 and log probability -inf."""
    width = max(part.token_ids.shape[1] for part in lists)

    def widen(array: np.ndarray, fill: float) -> np.ndarray:
        return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=fill)

    return LogprobsLists(
        np.concatenate([widen(part.token_ids, -1) for part in lists]),
        np.concatenate([widen(part.logprobs, -np.inf) for part in lists]),
        np.concatenate([part.ranks for part in lists]),
    )
