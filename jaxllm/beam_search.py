"""Beam search: a client of `generate`, which extends all beams by one token at a time.

Beams share their past through the prefix cache.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxllm.checks import check_at_least
from jaxllm.config import ModelConfig
from jaxllm.engine.input_processor import Prompt, TokensPrompt
from jaxllm.outputs import LogprobsOnePosition, RequestOutput
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jaxllm.llm import LLM


@dataclass(frozen=True)
class BeamSearchParams:
    """
    Attributes:
        beam_width: beams kept after every token, and outputs; at most half of the engine's `max_logprobs`.
        max_tokens: most tokens of an output.
        ignore_eos: go on after the end-of-sequence token.
        temperature: divides the logits. Other than 0 and 1 it needs an engine with `logprobs_mode="processed_logprobs"`, since
            raw log probabilities do not know it.
        length_penalty: outputs are ranked by `cum_logprob / length**length_penalty`, the prompt counted and EOS not.
        include_stop_str_in_output: keep the end-of-sequence token.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_at_least("beam_width", self.beam_width, 1)
        check_at_least("max_tokens", self.max_tokens, 1)
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 2.0):
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature!r}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be finite, got {self.length_penalty!r}")


@dataclass(slots=True)
class BeamSearchSequence:
    """
    Attributes:
        tokens: the prompt's and the output's.
        logprobs: of the candidates for each output token.
        cum_logprob: sum over the output tokens.
        text: of `tokens`; None without a tokenizer.
        finish_reason: "stop" for EOS, else "length"; None while it goes on.
        stop_reason: the EOS token id.
    """

    tokens: list[int]
    logprobs: list[LogprobsOnePosition] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    def extended(self, token_id: int, logprobs: LogprobsOnePosition) -> "BeamSearchSequence":
        return BeamSearchSequence(
            [*self.tokens, token_id], [*self.logprobs, logprobs], self.cum_logprob + logprobs[token_id].logprob
        )


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search over some prompts, without what runs it:

        while prompts := search.live_prompts():
            search.advance([the output of one token for each, under search.one_token])
        search.results(tokenizer)

    Args:
        prompts: token ids, checked.
    """

    def __init__(self, model: ModelConfig, prompts: Sequence[list[int]], params: BeamSearchParams) -> None:
        check_beam_search(model, params)
        self.model = model
        self.params = params
        self.one_token = SamplingParams(
            logprobs=min(2 * params.beam_width, model.decoder.vocab_size), max_tokens=1, temperature=params.temperature
        )
        self.eos_token_ids = () if params.ignore_eos else model.eos_token_ids
        self.num_tokens = 0
        self.live = [[BeamSearchSequence(prompt)] for prompt in prompts]
        self.ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]

    def _beams(self) -> list[tuple[int, BeamSearchSequence]]:
        return [(i, beam) for i, of_prompt in enumerate(self.live) for beam in of_prompt]

    def live_prompts(self) -> list[TokensPrompt]:
        """The beams that can be extended; none when the search is over."""
        if self.num_tokens == self.params.max_tokens:
            return []
        longest = self.model.max_model_len
        for i, of_prompt in enumerate(self.live):  # a beam that fills the model cannot be extended
            self.ended[i] += [beam for beam in of_prompt if len(beam.tokens) >= longest]
            self.live[i] = [beam for beam in of_prompt if len(beam.tokens) < longest]
        return [TokensPrompt(prompt_token_ids=beam.tokens) for _, beam in self._beams()]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Extend the beams by the outputs of `live_prompts`, in the same order."""
        candidates: list[list[BeamSearchSequence]] = [[] for _ in self.live]
        for (i, beam), output in zip(self._beams(), outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            for token_id in logprobs[0]:
                longer = beam.extended(token_id, logprobs[0])
                if token_id not in self.eos_token_ids:
                    candidates[i].append(longer)
                    continue
                longer.finish_reason, longer.stop_reason = "stop", token_id
                if not self.params.include_stop_str_in_output:
                    longer.tokens.pop()
                self.ended[i].append(longer)
        width = self.params.beam_width
        self.live = [sorted(of_prompt, key=lambda beam: beam.cum_logprob, reverse=True)[:width] for of_prompt in candidates]
        self.num_tokens += 1

    def results(self, tokenizer: "PreTrainedTokenizerFast | None") -> list[BeamSearchOutput]:
        """The best sequences of each prompt."""
        results = []
        for of_prompt, done in zip(self.live, self.ended, strict=True):
            best = sorted([*done, *of_prompt], key=self._score, reverse=True)[: self.params.beam_width]
            for beam in best:
                beam.finish_reason = beam.finish_reason or "length"
                if tokenizer is not None:
                    beam.text = tokenizer.decode(beam.tokens)
            results.append(BeamSearchOutput(best))
        return results

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.stop_reason is not None and self.params.include_stop_str_in_output)
        return beam.cum_logprob / length**self.params.length_penalty


def check_beam_search(model: ModelConfig, params: BeamSearchParams) -> None:
    """Raise ValueError if the engine's `max_logprobs` or `logprobs_mode` does not suffice."""
    if model.max_logprobs != -1 and 2 * params.beam_width > model.max_logprobs:
        raise ValueError(f"beam_width must be at most half of max_logprobs {model.max_logprobs}, got {params.beam_width}")
    if params.temperature not in (0.0, 1.0) and model.logprobs_mode != "processed_logprobs":
        raise ValueError(
            f"temperature must be 0 or 1 under logprobs_mode {model.logprobs_mode!r}, got {params.temperature}; "
            "other values need 'processed_logprobs'"
        )


def beam_search(llm: "LLM", prompts: Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool) -> list[BeamSearchOutput]:
    """See `LLM.beam_search`.

    Raises:
        ValueError: if the engine's `max_logprobs` or `logprobs_mode` does not suffice; and as `LLM.generate`.
    """
    model = llm.engine.config.model
    check_beam_search(model, params)
    one_token = SamplingParams(max_tokens=1)
    checked = [llm.engine.check_request("beam", prompt, one_token) for prompt in prompts]
    search = BeamSearch(model, [one.request.prompt_token_ids for one in checked], params)
    while live := search.live_prompts():
        search.advance(llm.generate(live, search.one_token, use_tqdm=use_tqdm))
    return search.results(llm.engine.tokenizer)
