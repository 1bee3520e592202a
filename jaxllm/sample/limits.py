"""What the device rows can hold, and the check of a request against it. Imports no jax, so that any front end can call it."""

from collections.abc import Iterable

from jaxllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams

MAX_STOP_TOKEN_IDS = 128  # that min_tokens keeps from being sampled, EOS included
MAX_LOGIT_BIAS = 1024  # tokens
MAX_BAD_WORDS = 128  # token sequences
MAX_BAD_WORD_LEN = 32  # tokens in one of them

__all__ = [
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_LEN",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROB_TOKEN_IDS",
    "MAX_STOP_TOKEN_IDS",
    "check_sampling_limits",
]


def _check_in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds token id {token}, which is not in the vocabulary of {vocab_size} tokens")


def _check_most(name: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{name} may hold at most {most} {what}, got {count}")


def check_sampling_limits(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Check what `SamplingParams` cannot check at birth, because it depends on the model and on the size of the device rows.

    Call it once `bad_words_token_ids` and `all_stop_token_ids` are filled in.

    Args:
        vocab_size: of the model; every token id must be below it.
        max_logprobs: most log probabilities that a request may ask for; -1 for the whole vocabulary.

    Raises:
        ValueError: naming the field and what is wrong with it.
    """
    _check_in_vocabulary("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_in_vocabulary("logit_bias", params.logit_bias or (), vocab_size)
    _check_in_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_in_vocabulary("logprob_token_ids", params.logprob_token_ids or (), vocab_size)
    _check_in_vocabulary("prompt_logprob_token_ids", params.prompt_logprob_token_ids or (), vocab_size)
    for word in params.bad_words_token_ids:
        if not word:
            raise ValueError(f"bad_words holds a word without tokens, got {params.bad_words!r}")
        _check_in_vocabulary("bad_words", word, vocab_size)
        _check_most("bad_words", "tokens in a word", len(word), MAX_BAD_WORD_LEN)

    _check_most("bad_words", "token sequences", len(params.bad_words_token_ids), MAX_BAD_WORDS)
    _check_most("logit_bias", "tokens", len(params.logit_bias or ()), MAX_LOGIT_BIAS)
    if params.min_tokens > 0:
        _check_in_vocabulary("all_stop_token_ids", params.all_stop_token_ids, vocab_size)
        _check_most("stop_token_ids", "tokens (EOS included) with min_tokens", len(params.all_stop_token_ids), MAX_STOP_TOKEN_IDS)

    most = vocab_size if max_logprobs == -1 else max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is None or getattr(params, f"{name.removesuffix('s')}_token_ids") is not None:
            continue
        if count == -1 and max_logprobs != -1:
            raise ValueError(f"{name} can be -1 only with max_logprobs -1, got -1 with max_logprobs {max_logprobs}")
        if count > most:
            raise ValueError(f"{name} must be at most {most} (max_logprobs {max_logprobs}), got {count}")
