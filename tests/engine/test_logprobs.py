"""Log probabilities by hand."""

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from toy_engine import lists_of
from transformers import PreTrainedTokenizerFast

from jaxllm.core.output import LogprobsLists
from jaxllm.core.types import EngineCoreOutput, EngineCoreRequest
from jaxllm.engine.logprobs import LogprobsProcessor, TokenTexts
from jaxllm.outputs import FlatLogprobs, Logprob
from jaxllm.sampling_params import SamplingParams


def processor_of(tokenizer: Any, prompt: list[int], **params: Any) -> LogprobsProcessor:
    request = EngineCoreRequest("r", prompt, SamplingParams(**params))
    processor = LogprobsProcessor.from_new_request(TokenTexts(tokenizer) if tokenizer is not None else None, request)
    assert processor is not None
    return processor


def sampled(*rows: tuple[list[int], list[float], int]) -> EngineCoreOutput:
    return EngineCoreOutput("r", [row[0][0] for row in rows], new_logprobs=lists_of(list(rows)))


def prompt_rows(*rows: tuple[list[int], list[float], int]) -> EngineCoreOutput:
    return EngineCoreOutput("r", [9], new_prompt_logprobs=lists_of(list(rows)))


def test_not_asked_for() -> None:
    assert LogprobsProcessor.from_new_request(None, EngineCoreRequest("r", [5], SamplingParams())) is None


@pytest.mark.parametrize("flat", [False, True])
def test_sampled_token_first_then_the_best(flat: bool) -> None:
    processor = processor_of(None, [5], logprobs=2, flat_logprobs=flat)
    # The second row's token is among the best; the batch has a column that this request did not ask for.
    processor.update(sampled(([7, 8, 9, 10], [-3.0, -1.0, -2.0, -2.5], 4)), 1)
    processor.update(sampled(([9, 8, 9, 10], [-2.0, -1.0, -2.0, -2.5], 2)), 1)
    assert isinstance(processor.logprobs, FlatLogprobs if flat else list)
    first, second = processor.logprobs
    assert first == {7: Logprob(-3.0, 4), 8: Logprob(-1.0, 1), 9: Logprob(-2.0, 2)}
    assert list(first) == [7, 8, 9]
    assert second == {9: Logprob(-2.0, 2), 8: Logprob(-1.0, 1)}
    assert list(second) == [9, 8]
    assert processor.cumulative_logprob == -5.0
    assert processor.prompt_logprobs is None


def test_zero_is_the_sampled_token_alone() -> None:
    processor = processor_of(None, [5], logprobs=0)
    processor.update(sampled(([7, 8], [-3.0, -1.0], 4)), 1)
    assert processor.logprobs == [{7: Logprob(-3.0, 4)}]


def test_minus_one_is_all() -> None:
    processor = processor_of(None, [5], logprobs=-1)
    processor.update(sampled(([2, 1, 2, 0], [-3.0, -1.0, -3.0, -4.0], 2)), 1)
    assert processor.logprobs == [{2: Logprob(-3.0, 2), 1: Logprob(-1.0, 1), 0: Logprob(-4.0, 3)}]


def test_tokens_asked_for_by_id_have_no_rank() -> None:
    processor = processor_of(None, [5], logprob_token_ids=[11, 7])
    processor.update(sampled(([7, 11, 7], [-3.0, -9.0, -3.0], 4)), 1)
    assert processor.logprobs == [{7: Logprob(-3.0, 4), 11: Logprob(-9.0, None)}]


def test_tokens_after_a_stop_string_are_dropped() -> None:
    processor = processor_of(None, [5], logprobs=0)
    processor.update(sampled(([7], [-1.0], 1), ([8], [-2.0], 1), ([9], [-4.0], 1)), 2)
    assert processor.logprobs == [{7: Logprob(-1.0, 1)}, {8: Logprob(-2.0, 1)}]
    assert processor.cumulative_logprob == -3.0


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("start", "num_missing"), [(None, 1), (0, 1), (1, 1), (2, 2), (3, 3)])
def test_prompt(flat: bool, start: int | None, num_missing: int) -> None:
    """One entry a prompt token; none for the first, and for those before the start."""
    processor = processor_of(None, [5, 6, 7, 8], prompt_logprobs=1, prompt_logprob_start=start, flat_logprobs=flat)
    processor.update(prompt_rows(([6, 1], [-1.0, -0.5], 3), ([7, 7], [-2.0, -2.0], 1), ([8, 2], [-3.0, -0.1], 2)), 1)
    entries = [
        {6: Logprob(-1.0, 3), 1: Logprob(-0.5, 1)},
        {7: Logprob(-2.0, 1)},
        {8: Logprob(-3.0, 2), 2: Logprob(pytest.approx(-0.1), 1)},
    ]
    assert processor.prompt_logprobs is not None
    assert len(processor.prompt_logprobs) == 4
    nothing: Any = {} if flat else None
    assert list(processor.prompt_logprobs) == [nothing] * num_missing + entries[num_missing - 1 :]
    assert processor.logprobs is None
    taken = processor.take_prompt_logprobs()
    assert taken is not None
    assert processor.take_prompt_logprobs() is None


def test_prompt_of_which_only_the_end_was_computed() -> None:
    processor = processor_of(None, [5, 6, 7, 8], prompt_logprobs=0, skip_reading_prefix_cache=False)
    processor.update(prompt_rows(([8], [-3.0], 2)), 1)
    assert processor.prompt_logprobs == [None, None, None, {8: Logprob(-3.0, 2)}]


@pytest.mark.parametrize("flat", [False, True])
def test_prompt_of_one_token(flat: bool) -> None:
    """Nothing predicts it. The arrays have no rows, and columns of no meaning."""
    processor = processor_of(None, [5], prompt_logprobs=3, flat_logprobs=flat)
    nothing = LogprobsLists(np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32), np.zeros(0, np.int32))
    processor.update(EngineCoreOutput("r", [9], new_prompt_logprobs=nothing), 1)
    assert processor.prompt_logprobs is not None
    assert list(processor.prompt_logprobs) == [{} if flat else None]


def test_prompt_tokens_by_id() -> None:
    processor = processor_of(None, [5, 6], prompt_logprob_token_ids=[3, 4])
    processor.update(prompt_rows(([6, 3, 4], [-1.0, -2.0, -3.0], 9)), 1)
    assert processor.prompt_logprobs == [None, {6: Logprob(-1.0, 9), 3: Logprob(-2.0), 4: Logprob(-3.0)}]


def tokens_of_bytes(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """One token a byte; the toy tokenizer has learned no words of these bytes."""
    return tokenizer.encode(text, add_special_tokens=False)


def test_text_of_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    (token_id,) = tokenizer.encode(" hello")
    processor = processor_of(tokenizer, [5], logprobs=1)
    processor.update(sampled(([token_id, 0], [-1.0, -2.0], 2)), 1)
    assert processor.logprobs == [{token_id: Logprob(-1.0, 2, " hello"), 0: Logprob(-2.0, 1, "<|endoftext|>")}]
    without = processor_of(tokenizer, [5], logprobs=1, detokenize=False)
    without.update(sampled(([token_id, 0], [-1.0, -2.0], 2)), 1)
    assert without.logprobs == [{token_id: Logprob(-1.0, 2), 0: Logprob(-2.0, 1)}]


def test_bytes_of_a_character(tokenizer: PreTrainedTokenizerFast) -> None:
    """The token that completes a character has its text, those before it none, whatever stands before them."""
    smile, other = tokens_of_bytes(tokenizer, "🙂"), tokens_of_bytes(tokenizer, "🙃")
    assert len(smile) == 4
    assert smile[:3] == other[:3]
    processor = processor_of(tokenizer, tokenizer.encode("x"), logprobs=1)
    for token_id, alternative in zip(smile, [*other[:2], tokenizer.encode("y")[0], other[3]], strict=True):
        processor.update(sampled(([token_id, alternative], [-1.0, -2.0], 1)), 1)
    assert processor.logprobs is not None
    texts = [[entry.decoded_token for entry in position.values()] for position in processor.logprobs]
    assert texts == [[""], [""], ["", "y"], ["🙂", "🙃"]]


def test_text_before_the_bytes_of_a_character_is_not_repeated() -> None:
    """A token that holds a space and the first byte of "é", and one that holds the second."""
    bytes_ = Tokenizer(models.BPE(vocab={"x": 0, "ĠÃ": 1, "©": 2}, merges=[]))
    bytes_.decoder = decoders.ByteLevel()
    processor = processor_of(PreTrainedTokenizerFast(tokenizer_object=bytes_), [0], logprobs=0)
    for token_id in (1, 2):
        processor.update(sampled(([token_id], [-1.0], 1)), 1)
    assert processor.logprobs == [{1: Logprob(-1.0, 1, "")}, {2: Logprob(-1.0, 1, "é")}]


def test_character_begun_by_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokens_of_bytes(tokenizer, "é")
    processor = processor_of(tokenizer, [*tokenizer.encode("x"), tokens[0]], logprobs=0, prompt_logprobs=0)
    processor.update(sampled(([tokens[1]], [-1.0], 1)), 1)
    assert processor.logprobs == [{tokens[1]: Logprob(-1.0, 1, "é")}]
    processor = processor_of(tokenizer, tokenizer.encode("xé"), prompt_logprobs=0)
    processor.update(prompt_rows(([tokens[0]], [-1.0], 1), ([tokens[1]], [-1.0], 1)), 1)
    assert processor.prompt_logprobs == [
        None,
        {tokens[0]: Logprob(-1.0, 1, "")},
        {tokens[1]: Logprob(-1.0, 1, "é")},
    ]


def test_flat_is_a_sequence_of_dicts() -> None:
    entries = [{1: Logprob(-1.0, 1, "a"), 2: Logprob(-2.0, 2, "b")}, {}, {3: Logprob(-3.0, None, None)}]
    flat = FlatLogprobs()
    for entry in entries:
        flat.append(entry)
    assert list(flat) == entries == [flat[i] for i in range(3)]
    assert flat[-1] == entries[-1]
    assert list(flat[1:]) == entries[1:]
    assert list(flat[::2]) == entries[::2]
    flat.append(None)
    assert flat[3] == {}
    assert (len(flat), len(flat.token_ids)) == (4, 3)
    with pytest.raises(IndexError):
        flat[4]


def test_too_few_columns_is_our_own_mistake() -> None:
    processor = processor_of(None, [5], logprobs=2)
    with pytest.raises(AssertionError, match="2 columns of logprobs, 3 wanted"):
        processor.update(sampled(([7, 8], [-1.0, -2.0], 1)), 1)
    assert np.isclose(processor.cumulative_logprob, 0.0)
