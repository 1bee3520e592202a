"""A prompt and its parameters to an EngineCoreRequest: tokenized, completed and checked, before anything is queued."""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.core.types import EngineCoreRequest
from jaxllm.sample.limits import check_sampling_limits
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_CACHE_SALT_LEN = 128


class TextPrompt(TypedDict):
    """A prompt as text. `cache_salt`: only prompts with the same salt share cached blocks."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `prompt` is what RequestOutput.prompt says; it is not tokenized."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | list[int] | TextPrompt | TokensPrompt


def as_prompt_list(prompts: "Prompt | Sequence[Prompt]") -> "list[Prompt]":
    """One prompt or many as a list. A list of integers is one prompt, an empty list none.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {prompts!r}")
    if prompts and all(isinstance(item, int | np.integer) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


class InputProcessor:
    """Args:
    tokenizer: None if prompts are token ids only.
    """

    def __init__(self, config: EngineConfig, tokenizer: "PreTrainedTokenizerFast | None") -> None:
        model = config.model
        self.tokenizer = tokenizer
        self.max_model_len = model.max_model_len
        self.vocab_size = model.decoder.vocab_size
        self.max_logprobs = min(model.max_logprobs, self.vocab_size)
        self.eos_token_ids = model.eos_token_ids
        self.policy = config.scheduler.policy
        self._serial = itertools.count()

    def process_inputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> tuple[EngineCoreRequest, str | None]:
        """Make a request. `params` is left as it is, unless its `skip_clone` allows to change it.

        Args:
            request_id: the caller's own. The request's is this with a serial number: callers may use one twice. No
                random suffix, since a request without a seed of its own gets one made of its id, and runs should repeat.
            arrival_time: seconds, `time.time()`; by default now.
            cache_salt: for prompts that bring none of their own.

        Returns:
            The request, `n` still that of `params`, and the text of the prompt if it came as text.

        Raises:
            ValueError: naming the field, its value and the limit.
        """
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a non-empty string, got {request_id!r}")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {params!r}")
        self._check_priority(priority)
        text, token_ids, own_salt = self._parse(prompt)
        cache_salt = own_salt if own_salt is not None else cache_salt
        if cache_salt is not None:
            check_cache_salt(cache_salt)
        params = params.clone()
        params.__post_init__()  # its fields may have been changed since birth
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop needs a tokenizer, and the engine has none; got stop={params.stop!r}")
        self._complete_bad_words(params)
        self._complete_stop_tokens(params)
        check_sampling_limits(params, self.vocab_size, self.max_logprobs)
        if token_ids is None:
            assert text is not None
            token_ids = self._encode(text)
        token_ids = self._check_prompt(token_ids)
        self._complete_lengths(params, len(token_ids))
        request = EngineCoreRequest(
            request_id=f"{request_id}-{next(self._serial):x}",
            prompt_token_ids=token_ids,
            sampling_params=params,
            eos_token_id=self.eos_token_ids[0] if self.eos_token_ids else None,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
        )
        return request, text

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        if priority and self.policy != "priority":
            raise ValueError(f"priority must be 0 under scheduling_policy {self.policy!r}, got {priority}")

    def _parse(self, prompt: Prompt) -> tuple[str | None, Sequence[int] | None, str | None]:
        """(text, token ids, cache salt)"""
        if isinstance(prompt, str):
            return prompt, None, None
        if isinstance(prompt, Mapping):
            unknown = sorted(map(str, prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}))
            if unknown:
                raise ValueError(f"prompt has the unknown field {unknown[0]!r}; known are prompt, prompt_token_ids, cache_salt")
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                raise ValueError(f"prompt must be a string, got {text!r}")
            if text is None and token_ids is None:
                raise ValueError(f"prompt must hold 'prompt' or 'prompt_token_ids', got {dict(prompt)!r}")
            return text, token_ids, prompt.get("cache_salt")
        if isinstance(prompt, list | tuple):
            return None, prompt, None
        raise ValueError(f"prompt must be a string, a list of token ids, a TextPrompt or a TokensPrompt, got {prompt!r}")

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"a prompt of text needs a tokenizer, and the engine has none; got prompt {_short(text)}")
        check_unicode("prompt", text)
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def _check_prompt(self, token_ids: Sequence[int]) -> list[int]:
        if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
            raise ValueError(f"prompt_token_ids must be a list of integers, got {token_ids!r}")
        token_ids = list(token_ids)
        if not token_ids:
            raise ValueError("prompt must not be empty: it has no tokens")
        if set(map(type, token_ids)) != {int}:
            for token_id in token_ids:
                if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
                    raise ValueError(f"prompt_token_ids must hold integers, got {token_id!r}")
            token_ids = [int(token_id) for token_id in token_ids]
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            bad = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise ValueError(f"prompt_token_ids: token id {bad} is out of vocabulary: it must be in [0, {self.vocab_size - 1}]")
        num_tokens, longest = len(token_ids), self.max_model_len
        if num_tokens > longest:
            raise ValueError(f"prompt has {num_tokens} tokens, longer than the maximum model length of {longest} (max_model_len)")
        if num_tokens == longest:
            raise ValueError(
                f"prompt has {num_tokens} tokens; plus at least 1 output token it is longer than the maximum model length of "
                f"{longest} (max_model_len)"
            )
        return token_ids

    def _complete_bad_words(self, params: SamplingParams) -> None:
        if not params.bad_words:
            return
        if self.tokenizer is None:
            raise ValueError(f"bad_words needs a tokenizer, and the engine has none; got bad_words={params.bad_words!r}")
        sequences: list[list[int]] = []
        for word in params.bad_words:
            bare = word.lstrip()
            inside, leading = self._encode(bare or word, False), self._encode(f" {bare}" if bare else word, False)
            if not inside:
                raise ValueError(f"bad_words: {word!r} has no tokens")
            sequences.append(inside)
            # Where the space is a token of its own, the sequence without it forbids this one too.
            if leading[-len(inside) :] != inside:
                sequences.append(leading)
        params.bad_words_token_ids = sequences

    def _complete_lengths(self, params: SamplingParams, prompt_len: int) -> None:
        if params.max_tokens is None:
            params.max_tokens = self.max_model_len - prompt_len
            if params.min_tokens > params.max_tokens:
                raise ValueError(
                    f"min_tokens must be at most {params.max_tokens}, what max_model_len {self.max_model_len} leaves after "
                    f"a prompt of {prompt_len} tokens, got {params.min_tokens}"
                )
        if params.prompt_logprob_start is not None and params.prompt_logprob_start >= prompt_len:
            raise ValueError(
                f"prompt_logprob_start must be less than the prompt's {prompt_len} tokens, got {params.prompt_logprob_start}"
            )

    def _complete_stop_tokens(self, params: SamplingParams) -> None:
        # min_tokens forbids all of them, whether or not EOS ends the request.
        params.all_stop_token_ids.update(self.eos_token_ids)
        if not params.ignore_eos:
            assert params.stop_token_ids is not None
            others = [token_id for token_id in self.eos_token_ids[1:] if token_id not in params.stop_token_ids]
            params.stop_token_ids.extend(others)


def check_cache_salt(cache_salt: object) -> None:
    """Raise ValueError unless it is a string of 1 to MAX_CACHE_SALT_LEN characters, none of them @ / \\ or NUL."""
    if not isinstance(cache_salt, str) or not cache_salt:
        raise ValueError(f"cache_salt must be a non-empty string, got {cache_salt!r}")
    if len(cache_salt) > MAX_CACHE_SALT_LEN:
        raise ValueError(f"cache_salt must have at most {MAX_CACHE_SALT_LEN} characters, got {len(cache_salt)}")
    if bad := set(cache_salt) & set("@/\\\0"):
        raise ValueError(f"cache_salt must not contain {min(bad)!r}, got {cache_salt!r}")
    check_unicode("cache_salt", cache_salt)


def check_unicode(name: str, text: str) -> None:
    """Raise ValueError if `text` holds half a surrogate pair, as JSON and Python can: it is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode, got {text[error.start]!r} at character {error.start}") from None


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")
