"""Beam search: a client of `LLM.generate`, which extends all beams by one token at a time.

Beams share their past through the prefix cache.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxllm.config import check_at_least
from jaxllm.engine.input_processor import Prompt, TokensPrompt
from jaxllm.outputs import LogprobsOnePosition
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
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


def beam_search(llm: "LLM", prompts: Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool) -> list[BeamSearchOutput]:
    """See `LLM.beam_search`.

    Raises:
        ValueError: if the engine's `max_logprobs` or `logprobs_mode` does not suffice; and as `LLM.generate`.
    """
    model = llm.engine.config.model
    if model.max_logprobs != -1 and 2 * params.beam_width > model.max_logprobs:
        raise ValueError(f"beam_width must be at most half of max_logprobs {model.max_logprobs}, got {params.beam_width}")
    if params.temperature not in (0.0, 1.0) and model.logprobs_mode != "processed_logprobs":
        raise ValueError(
            f"temperature must be 0 or 1 under logprobs_mode {model.logprobs_mode!r}, got {params.temperature}; "
            "other values need 'processed_logprobs'"
        )
    one_token = SamplingParams(
        logprobs=min(2 * params.beam_width, model.decoder.vocab_size), max_tokens=1, temperature=params.temperature
    )
    checked = [llm.engine.check_request("beam", prompt, one_token) for prompt in prompts]
    live = [[BeamSearchSequence(one.request.prompt_token_ids)] for one in checked]
    ended: list[list[BeamSearchSequence]] = [[] for _ in live]
    eos_token_ids = () if params.ignore_eos else model.eos_token_ids

    for _ in range(params.max_tokens):
        for i, of_prompt in enumerate(live):  # a beam that fills the model cannot be extended
            ended[i] += [beam for beam in of_prompt if len(beam.tokens) >= model.max_model_len]
            live[i] = [beam for beam in of_prompt if len(beam.tokens) < model.max_model_len]
        beams = [(i, beam) for i, of_prompt in enumerate(live) for beam in of_prompt]
        if not beams:
            break
        tokens = [TokensPrompt(prompt_token_ids=beam.tokens) for _, beam in beams]
        candidates: list[list[BeamSearchSequence]] = [[] for _ in live]
        for (i, beam), output in zip(beams, llm.generate(tokens, one_token, use_tqdm=use_tqdm), strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            for token_id in logprobs[0]:
                longer = beam.extended(token_id, logprobs[0])
                if token_id not in eos_token_ids:
                    candidates[i].append(longer)
                    continue
                longer.finish_reason, longer.stop_reason = "stop", token_id
                if not params.include_stop_str_in_output:
                    longer.tokens.pop()
                ended[i].append(longer)
        live = [
            sorted(of_prompt, key=lambda beam: beam.cum_logprob, reverse=True)[: params.beam_width] for of_prompt in candidates
        ]

    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.stop_reason is not None and params.include_stop_str_in_output)
        return beam.cum_logprob / length**params.length_penalty

    results = []
    for of_prompt, done in zip(live, ended, strict=True):
        best = sorted([*done, *of_prompt], key=score, reverse=True)[: params.beam_width]
        for beam in best:
            beam.finish_reason = beam.finish_reason or "length"
            if llm.engine.tokenizer is not None:
                beam.text = llm.engine.tokenizer.decode(beam.tokens)
        results.append(BeamSearchOutput(best))
    return results
