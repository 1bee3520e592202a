"""Beam search against an exhaustive one, over a bigram model."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from toy_engine import EOS, IM_END, VOCAB_SIZE, ToyExecutor, check_idle, make_config
from transformers import PreTrainedTokenizerFast

from jaxllm.beam_search import BeamSearchParams
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.llm import LLM

LIKELY = [5, 6, 7, 8, IM_END]  # all that the model ever says


def log_softmax() -> np.ndarray:
    logits = np.full((VOCAB_SIZE, VOCAB_SIZE), -1e3)
    logits[:, LIKELY] = np.random.default_rng(0).normal(size=(VOCAB_SIZE, len(LIKELY)))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


LOGPROBS = log_softmax()


class BigramExecutor(ToyExecutor):
    next_token = staticmethod(lambda context: int(LOGPROBS[context[-1]].argmax()))

    @staticmethod
    def _logprobs(context: tuple[int, ...], token_id: int, count: int, ids: list[int] | None) -> Any:
        values = LOGPROBS[context[-1]]
        best = np.argsort(-values, kind="stable")[:count].tolist()
        return [token_id, *best], [values[token_id], *values[best]], int((values > values[token_id]).sum()) + 1


@pytest.fixture
def llm(tokenizer: PreTrainedTokenizerFast) -> LLM:
    return LLM.from_engine(LLMEngine(make_config(), tokenizer, BigramExecutor))


def exhaustive(prompt: list[int], length: int, eos: tuple[int, ...], penalty: float) -> list[tuple[float, list[int], bool]]:
    """(score, prompt and output without EOS, whether it ended), the best first."""
    found = {}
    for tokens in itertools.product(LIKELY, repeat=length):
        ends = [i for i, token in enumerate(tokens) if token in eos]
        kept = tokens[: ends[0]] if ends else tokens
        total, last = 0.0, prompt[-1]
        for token in (*kept, *tokens[len(kept) : len(kept) + 1]):
            total, last = total + LOGPROBS[last, token], token
        found[kept, bool(ends)] = total / (len(prompt) + len(kept)) ** penalty
    return sorted(((score, [*prompt, *kept], ended) for (kept, ended), score in found.items()), reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_finds_what_an_exhaustive_search_finds(
    llm: LLM, tokenizer: PreTrainedTokenizerFast, penalty: float, ignore_eos: bool
) -> None:
    """With as many beams as there are tokens, two steps miss nothing."""
    prompts = [[10, 11], [12]]
    params = BeamSearchParams(beam_width=5, max_tokens=2, length_penalty=penalty, ignore_eos=ignore_eos)
    outputs = llm.beam_search(prompts, params)
    assert len(outputs) == 2
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = exhaustive(prompt, 2, () if ignore_eos else (EOS, IM_END), penalty)[:5]
        assert [(beam.tokens, beam.finish_reason == "stop") for beam in output.sequences] == [one[1:] for one in expected]
        for beam, (score, tokens, ended) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(score * len(tokens) ** penalty, rel=1e-5)
            assert beam.text == tokenizer.decode(tokens)
            assert beam.stop_reason == (IM_END if ended else None)
            assert beam.finish_reason == ("stop" if ended else "length")
            assert len(beam.logprobs) == len(tokens) - len(prompt) + ended
    check_idle(llm.engine)


def test_kept_eos_has_no_part_in_the_length(llm: LLM) -> None:
    bare, kept = (
        llm.beam_search([10] * 9, BeamSearchParams(beam_width=5, max_tokens=2, include_stop_str_in_output=include))[0].sequences
        for include in (False, True)
    )
    assert any(beam.stop_reason for beam in bare)
    assert [beam.tokens + [IM_END] * (beam.stop_reason is not None) for beam in bare] == [beam.tokens for beam in kept]


def test_one_beam_is_greedy(llm: LLM) -> None:
    (output,) = llm.beam_search([10], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    tokens = [10]
    for _ in range(6):
        tokens.append(int(LOGPROBS[tokens[-1]].argmax()))
    assert [beam.tokens for beam in output.sequences] == [tokens]


def test_beams_that_fill_the_model(llm: LLM) -> None:
    (output,) = llm.beam_search([10] * 62, BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True))
    assert [len(beam.tokens) for beam in output.sequences] == [64] * 3
    assert [beam.finish_reason for beam in output.sequences] == ["length"] * 3
    assert len({tuple(beam.tokens) for beam in output.sequences}) == 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer of at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"temperature": -0.5}, r"temperature must be in \[0, 2\], got -0.5"),
        ({"temperature": math.nan}, "temperature"),
        ({"length_penalty": math.inf}, "length_penalty must be finite, got inf"),
    ],
)
def test_bad_params(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **params})


def test_what_the_engine_cannot_do(llm: LLM) -> None:
    with pytest.raises(ValueError, match="beam_width must be at most half of max_logprobs 20, got 11"):
        llm.beam_search([5], BeamSearchParams(beam_width=11, max_tokens=2))
    with pytest.raises(ValueError, match=r"temperature must be 0 or 1 under logprobs_mode 'raw_logprobs', got 0.5"):
        llm.beam_search([5], BeamSearchParams(beam_width=2, max_tokens=2, temperature=0.5))
    with pytest.raises(ValueError, match="prompt must not be empty"):
        llm.beam_search([[5], []], BeamSearchParams(beam_width=2, max_tokens=2))
    check_idle(llm.engine)
    processed = LLM.from_engine(LLMEngine(make_config(logprobs_mode="processed_logprobs"), None, BigramExecutor))
    (output,) = processed.beam_search([5], BeamSearchParams(beam_width=2, max_tokens=1, temperature=0.5))
    assert [beam.text for beam in output.sequences] == [None, None]
