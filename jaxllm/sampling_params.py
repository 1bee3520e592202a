"""SamplingParams: how to turn a request's logits into tokens. Names, defaults and limits are vLLM's."""

import copy
import enum
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

logger = logging.getLogger(__name__)

MIN_TEMPERATURE = 1e-2  # a smaller one, unless it is 0, would overflow the logits
MAX_N = 16384
BOOLEANS = (
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_clone",
)
MAX_LOGPROB_TOKEN_IDS = 128


class RequestOutputKind(enum.IntEnum):
    """What each RequestOutput of a request holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, at the end


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """End a request whose output repeats itself.

    The output ends once its last tokens are `min_count` copies of one pattern of `min_pattern_size` to `max_pattern_size` tokens.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        _check_int("repetition_detection.min_pattern_size", self.min_pattern_size, 1)
        _check_int("repetition_detection.max_pattern_size", self.max_pattern_size, self.min_pattern_size)
        _check_int("repetition_detection.min_count", self.min_count, 2)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "RepetitionDetectionParams":
        """From what a request's JSON holds. A name that is unknown or missing is a ValueError."""
        known = {f.name for f in fields(cls)}
        if unknown := [name for name in mapping if name not in known]:
            raise ValueError(f"repetition_detection has no {unknown[0]!r}, got {dict(mapping)!r}")
        if "max_pattern_size" not in mapping:
            raise ValueError(f"repetition_detection needs max_pattern_size, got {dict(mapping)!r}")
        return cls(**mapping)


def _check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} must be {f'at least {least}' if most is None else f'in [{least}, {most}]'}, got {value}")


def _check_float(name: str, value: object, inside: str, low: float, high: float = math.inf, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        raise ValueError(f"{name} must be {inside}, got {value}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _check_strings(name: str, value: object) -> list[str]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list of strings, got {value!r}")
    for string in value:
        if not isinstance(string, str) or not string:
            raise ValueError(f"{name} must hold non-empty strings, got {string!r}")
    return list(value)


def _check_serializable(name: str, value: object) -> None:
    """Integers must fit in 64 bits, signed or not: wider ones could not be sent to another process."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_serializable(f"{name}[{key!r}]", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_serializable(f"{name}[{index}]", inner)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} must be in [-2**63, 2**64 - 1], got {value}")


def _check_token_ids(name: str, value: object) -> list[int]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"{name} must hold token ids (integers of at least 0), got {token!r}")
    return list(value)


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of one request, checked at birth.

    Attributes:
        n: number of outputs for the prompt.
        presence_penalty: subtracted from the logits of tokens that are in the output; in [-2, 2].
        frequency_penalty: subtracted once for each time that the token is in the output; in [-2, 2].
        repetition_penalty: logits of tokens in prompt or output are divided (if positive) or multiplied by it; above 0.
        temperature: 0 is greedy.
        top_p: keep the most probable tokens that together have this probability; in (0, 1].
        top_k: keep this many of the most probable tokens; 0 or -1 for all.
        min_p: drop tokens less probable than `min_p` times the most probable; in [0, 1].
        seed: makes the request's tokens reproducible, whatever runs beside it.
        stop: strings that end the output; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output; part of its token ids, not of its text.
        ignore_eos: go on after the end-of-sequence token.
        max_tokens: most tokens in an output; None for as many as the model's length allows.
        min_tokens: until there are this many, neither EOS nor stop tokens are sampled and stop strings are not looked for.
        logprobs: log probabilities of each sampled token and this many of the most probable; -1 for the whole vocabulary.
        prompt_logprobs: the same for prompt tokens.
        prompt_logprob_start: the first prompt position whose log probabilities are returned; needs prompt log probabilities.
        prompt_logprob_token_ids: log probabilities of exactly these tokens at every prompt position.
        logprob_token_ids: log probabilities of exactly these tokens, beside the sampled one; at most 128.
        flat_logprobs: return log probabilities as FlatLogprobs, which is cheaper to build than a list of dicts.
        detokenize: whether to make text.
        skip_special_tokens, spaces_between_special_tokens: how to make it.
        output_kind: what each RequestOutput holds.
        stream_interval: tokens between two outputs of a stream; only raises the engine's own.
        skip_clone: the caller promises not to use the object again, so that it need not be copied.
        structured_outputs, thinking_token_budget: not supported yet: refused.
        logit_bias: added to the logits of these tokens; values are clamped to [-100, 100].
        allowed_token_ids: the only tokens that may be sampled.
        bad_words: strings that may not be sampled.
        extra_args: for custom use; the engine itself reads nothing from it. Integers in it must fit in 64 bits.
        skip_reading_prefix_cache: compute the whole prompt; by default when prompt log probabilities are asked for.
        repetition_detection: end an output that repeats itself.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int | None = None
    prompt_logprob_token_ids: list[int] | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    # Filled in by the input processor, which knows the model and the tokenizer.
    bad_words_token_ids: list[list[int]] = field(default_factory=list, init=False, repr=False)
    all_stop_token_ids: set[int] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        self.stop_token_ids = list(dict.fromkeys(_check_token_ids("stop_token_ids", self.stop_token_ids)))
        if self.bad_words is None:
            self.bad_words = []
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        self._check()
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            logger.warning("temperature %s is so small that logits could overflow; %s is used", self.temperature, MIN_TEMPERATURE)
            self.temperature = MIN_TEMPERATURE
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None
        self.all_stop_token_ids = set(self.stop_token_ids)

    def _check(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("presence_penalty", self.presence_penalty, "in [-2, 2]", -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, "in [-2, 2]", -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, "greater than 0", 0.0, open_low=True)
        _check_float("temperature", self.temperature, "in [0, 2]", 0.0, 2.0)
        _check_float("top_p", self.top_p, "in (0, 1]", 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, -1)
        _check_float("min_p", self.min_p, "in [0, 1]", 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n must be 1 for greedy sampling (temperature 0), got {self.n}")
        for name in BOOLEANS:
            _check_bool(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            _check_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        self._check_stopping()
        self._check_logprobs()
        if self.stream_interval is not None:
            _check_int("stream_interval", self.stream_interval, 1)
        if self.output_kind not in list(RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        self.output_kind = RequestOutputKind(self.output_kind)
        if self.structured_outputs is not None:
            raise ValueError(f"structured_outputs is not supported, got {self.structured_outputs!r}")
        if self.thinking_token_budget is not None:
            _check_int("thinking_token_budget", self.thinking_token_budget, 0)
            raise ValueError(f"thinking_token_budget needs a reasoning parser, got {self.thinking_token_budget}")
        if self.extra_args is not None:
            if not isinstance(self.extra_args, dict):
                raise ValueError(f"extra_args must be a dict, got {self.extra_args!r}")
            _check_serializable("extra_args", self.extra_args)
        if isinstance(self.repetition_detection, Mapping):
            self.repetition_detection = RepetitionDetectionParams.from_mapping(self.repetition_detection)
        elif not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            raise ValueError(f"repetition_detection must be RepetitionDetectionParams, got {self.repetition_detection!r}")
        self._check_token_choice()

    def _check_stopping(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens {self.max_tokens}, got {self.min_tokens}")
        self.stop = _check_strings("stop", self.stop)
        if self.stop and not self.detokenize:
            raise ValueError(f"stop needs detokenize=True, got stop={self.stop!r}")

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), -1)
        if self.prompt_logprob_start is not None:
            _check_int("prompt_logprob_start", self.prompt_logprob_start, 0)
            if self.prompt_logprobs is None and self.prompt_logprob_token_ids is None:
                raise ValueError(
                    f"prompt_logprob_start needs prompt_logprobs or prompt_logprob_token_ids, got {self.prompt_logprob_start}"
                )
        for name, count in (("logprob_token_ids", self.logprobs), ("prompt_logprob_token_ids", self.prompt_logprobs)):
            ids = getattr(self, name)
            if ids is None:
                continue
            ids = _check_token_ids(name, ids)
            if not 1 <= len(ids) <= MAX_LOGPROB_TOKEN_IDS:
                raise ValueError(f"{name} must hold 1 to {MAX_LOGPROB_TOKEN_IDS} token ids, got {len(ids)}")
            if count is not None and count != len(ids):
                raise ValueError(f"{name.removesuffix('_token_ids')}s must equal the length of {name} ({len(ids)}), got {count}")
            setattr(self, name, ids)

    def _check_token_choice(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            bias: dict[int, float] = {}
            for token, value in self.logit_bias.items():
                # JSON has no other keys than strings.
                token_id = int(token) if isinstance(token, str) and token.isdecimal() else token
                _check_token_ids("logit_bias", [token_id])
                if token_id in bias:
                    raise ValueError(f"logit_bias holds token id {token_id} twice, got {self.logit_bias!r}")
                _check_float(f"logit_bias[{token_id}]", value, "finite", -math.inf)
                bias[token_id] = min(100.0, max(-100.0, float(value)))
            self.logit_bias = bias
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must not be empty, got []")
        self.bad_words = list(dict.fromkeys(_check_strings("bad_words", self.bad_words)))

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0

    @property
    def num_logprobs(self) -> int | None:
        """Columns beside the sampled token's in the log probabilities; None if none were asked for."""
        return len(self.logprob_token_ids) if self.logprob_token_ids is not None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for prompt positions."""
        return len(self.prompt_logprob_token_ids) if self.prompt_logprob_token_ids is not None else self.prompt_logprobs

    @classmethod
    def from_optional(cls, **kwargs: Any) -> "SamplingParams":
        """Like the constructor, but None means the default, except for `max_tokens`. An unknown name is a ValueError."""
        known = {f.name for f in fields(cls) if f.init}
        if unknown := sorted(kwargs.keys() - known):
            raise ValueError(f"unknown sampling parameter {unknown[0]!r}, got {kwargs[unknown[0]]!r}")
        return cls(**{name: value for name, value in kwargs.items() if value is not None or name == "max_tokens"})

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing mutable with this one, unless `skip_clone` promises that this one is not used again."""
        return self if self.skip_clone else copy.deepcopy(self)
