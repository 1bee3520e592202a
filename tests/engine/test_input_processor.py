"""What a prompt and its parameters become, and everything that is refused."""

import re
from typing import Any

import numpy as np
import pytest
from toy_engine import EOS, IM_END, VOCAB_SIZE, make_config
from transformers import PreTrainedTokenizerFast

from jaxllm.core.types import EngineCoreRequest
from jaxllm.engine.input_processor import InputProcessor, as_prompt_list
from jaxllm.sampling_params import SamplingParams


@pytest.fixture
def processor(tokenizer: PreTrainedTokenizerFast) -> InputProcessor:
    return InputProcessor(make_config(), tokenizer)


def process(processor: InputProcessor, prompt: Any = (5, 6), **params: Any) -> EngineCoreRequest:
    return processor.process_inputs("r", prompt, SamplingParams(**params))[0]


def test_request_is_complete(processor: InputProcessor, tokenizer: PreTrainedTokenizerFast) -> None:
    params = SamplingParams(max_tokens=None, stop_token_ids=[9])
    request, text = processor.process_inputs("mine", "hello", params, arrival_time=12.5, trace_headers={"a": "b"})
    assert text == "hello"
    assert re.fullmatch("mine-[0-9a-f]+", request.request_id)
    assert request.prompt_token_ids == tokenizer.encode("hello")
    assert (request.eos_token_id, request.arrival_time, request.priority, request.cache_salt) == (EOS, 12.5, 0, None)
    assert request.trace_headers == {"a": "b"}
    got = request.sampling_params
    assert got.max_tokens == 64 - len(request.prompt_token_ids)
    assert got.stop_token_ids == [9, IM_END]
    assert got.all_stop_token_ids == {9, EOS, IM_END}
    # The caller's own object is as it was.
    assert got is not params
    assert (params.max_tokens, params.stop_token_ids) == (None, [9])


def test_ids_are_unique(processor: InputProcessor) -> None:
    assert len({process(processor).request_id for _ in range(100)}) == 100


def test_skip_clone_uses_the_callers_object(processor: InputProcessor) -> None:
    params = SamplingParams(skip_clone=True)
    assert processor.process_inputs("r", [5], params)[0].sampling_params is params


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens(processor: InputProcessor, ignore_eos: bool) -> None:
    """Other EOS ids stop too, unless EOS is ignored; min_tokens forbids them all in either case."""
    params = process(processor, ignore_eos=ignore_eos, stop_token_ids=[IM_END, 7] if not ignore_eos else [7]).sampling_params
    assert params.stop_token_ids == ([7] if ignore_eos else [IM_END, 7])
    assert params.all_stop_token_ids == {EOS, IM_END, 7}


def test_model_without_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    request = process(InputProcessor(make_config(eos_token_ids=()), tokenizer))
    assert request.eos_token_id is None
    assert request.sampling_params.all_stop_token_ids == set()


@pytest.mark.parametrize(
    ("prompt", "text", "salt"),
    [
        ("hi", "hi", None),
        ({"prompt": "hi"}, "hi", None),
        ({"prompt": "hi", "cache_salt": "s"}, "hi", "s"),
        ([75, 76], None, None),
        ((75, 76), None, None),
        ({"prompt_token_ids": [75, 76]}, None, None),
        ({"prompt_token_ids": [75, np.int64(76)], "prompt": "shown", "cache_salt": "s"}, "shown", "s"),
    ],
)
def test_forms_of_a_prompt(
    processor: InputProcessor, tokenizer: PreTrainedTokenizerFast, prompt: Any, text: str | None, salt: str | None
) -> None:
    request, got = processor.process_inputs("r", prompt, SamplingParams(), cache_salt=None)
    assert (got, request.cache_salt) == (text, salt)
    assert request.prompt_token_ids == (tokenizer.encode("hi") if text == "hi" else [75, 76])
    assert {type(token_id) for token_id in request.prompt_token_ids} == {int}


def test_cache_salt_of_the_call_is_for_prompts_without_one(processor: InputProcessor) -> None:
    for prompt, salt in ([5], "call"), ({"prompt_token_ids": [5], "cache_salt": "own"}, "own"):
        assert processor.process_inputs("r", prompt, SamplingParams(), cache_salt="call")[0].cache_salt == salt


@pytest.mark.parametrize("prompt", ["a", "", {"prompt": "a"}, [1, 2], [np.int32(1)], (3,), [True]])
def test_one_prompt_or_many(prompt: Any) -> None:
    assert as_prompt_list(prompt) == [prompt]
    assert as_prompt_list([prompt]) == [prompt]
    assert as_prompt_list((prompt, "b")) == [prompt, "b"]
    assert as_prompt_list([]) == []


@pytest.mark.parametrize("prompts", [5, None, b"ab", {5}])
def test_neither_one_prompt_nor_many(prompts: Any) -> None:
    with pytest.raises(ValueError, match="prompts must be a prompt or a list of prompts, got"):
        as_prompt_list(prompts)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt must not be empty"),
        ([], "prompt must not be empty"),
        ({"prompt_token_ids": []}, "prompt must not be empty"),
        ([5] * 65, "prompt has 65 tokens, longer than the maximum model length of 64"),
        ([5] * 64, "prompt has 64 tokens; plus at least 1 output token .* maximum model length of 64"),
        ([5, VOCAB_SIZE], f"prompt_token_ids: token id {VOCAB_SIZE} is out of vocabulary: it must be in .0, {VOCAB_SIZE - 1}."),
        ([5, -1], "token id -1 is out of vocabulary"),
        ([5, 10**30], "is out of vocabulary"),
        ([5, True], "prompt_token_ids must hold integers, got True"),
        ([5, 6.0], "prompt_token_ids must hold integers, got 6.0"),
        (["a", "b"], "prompt_token_ids must hold integers, got 'a'"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids must be a list of integers, got 'ab'"),
        ({"prompt_token_ids": 7}, "prompt_token_ids must be a list of integers, got 7"),
        ({"prompt": 7}, "prompt must be a string, got 7"),
        ({"prompt": None}, "prompt must hold 'prompt' or 'prompt_token_ids'"),
        ({}, "prompt must hold"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompt has the unknown field 'multi_modal_data'"),
        (7, "prompt must be a string, a list of token ids, .* got 7"),
        (None, "got None"),
        ("a\ud800", r"prompt must be valid Unicode, got '\\ud800' at character 1"),
    ],
)
def test_bad_prompts(processor: InputProcessor, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        process(processor, prompt)


@pytest.mark.parametrize("length", [1, 63])
def test_lengths_that_fit(processor: InputProcessor, length: int) -> None:
    assert process(processor, [5] * length, max_tokens=None).sampling_params.max_tokens == 64 - length


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [VOCAB_SIZE]}, f"stop_token_ids holds token id {VOCAB_SIZE}, which is not in the vocabulary"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias holds token id"),
        ({"allowed_token_ids": [3, VOCAB_SIZE]}, "allowed_token_ids holds token id"),
        ({"logprob_token_ids": [VOCAB_SIZE]}, "logprob_token_ids holds token id"),
        ({"prompt_logprob_token_ids": [VOCAB_SIZE]}, "prompt_logprob_token_ids holds token id"),
        ({"logprobs": 21}, r"logprobs must be at most 20 \(max_logprobs 20\), got 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be at most 20"),
        ({"logprobs": -1}, "logprobs can be -1 only with max_logprobs -1, got -1 with max_logprobs 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs can be -1 only"),
        ({"prompt_logprobs": 1, "prompt_logprob_start": 2}, "start must be less than the prompt's 2 tokens, got 2"),
        ({"max_tokens": None, "min_tokens": 63}, "min_tokens must be at most 62, .* after a prompt of 2 tokens, got 63"),
        ({"bad_words": ["#" * 33]}, "bad_words may hold at most 32 tokens in a word, got 33"),
        ({"stop_token_ids": list(range(3, 130)), "min_tokens": 1}, "stop_token_ids may hold at most 128 .* got 129"),
        ({"bad_words": [f"name{i}" for i in range(65)]}, "bad_words may hold at most 128 token sequences, got 130"),
    ],
)
def test_bad_params(processor: InputProcessor, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        process(processor, **params)


def test_params_at_their_limits(processor: InputProcessor) -> None:
    last = VOCAB_SIZE - 1
    process(processor, stop_token_ids=[last], logit_bias={last: 1.0}, allowed_token_ids=[last, 0], logprobs=20)
    process(processor, logprob_token_ids=[last, *range(100)], prompt_logprobs=20, prompt_logprob_start=1)
    process(processor, max_tokens=None, min_tokens=62)
    process(processor, bad_words=[f"name{i}" for i in range(64)])


def test_params_that_were_changed_since_birth(processor: InputProcessor) -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(ValueError, match="temperature"):
        processor.process_inputs("r", [5], params)


def test_whole_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    processor = InputProcessor(make_config(max_logprobs=-1), tokenizer)
    assert process(processor, logprobs=-1, prompt_logprobs=VOCAB_SIZE).sampling_params.logprobs == -1
    with pytest.raises(ValueError, match=f"logprobs must be at most {VOCAB_SIZE}"):
        process(processor, logprobs=VOCAB_SIZE + 1)


def test_vocabulary_smaller_than_max_logprobs(tokenizer: PreTrainedTokenizerFast) -> None:
    processor = InputProcessor(make_config(max_logprobs=1000), tokenizer)
    assert process(processor, logprobs=VOCAB_SIZE).sampling_params.logprobs == VOCAB_SIZE
    with pytest.raises(ValueError, match=f"logprobs must be at most {VOCAB_SIZE} "):
        process(processor, logprobs=VOCAB_SIZE + 1)


@pytest.mark.parametrize("argument", [{"priority": 1.0}, {"priority": True}, {"priority": "1"}])
def test_priority_is_an_integer(processor: InputProcessor, argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="priority must be an integer"):
        processor.process_inputs("r", [5], SamplingParams(), **argument)


def test_priority_needs_the_policy(processor: InputProcessor, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="priority must be 0 under scheduling_policy 'fcfs', got 3"):
        processor.process_inputs("r", [5], SamplingParams(), priority=3)
    by_priority = InputProcessor(make_config(policy="priority"), tokenizer)
    assert by_priority.process_inputs("r", [5], SamplingParams(), priority=-3)[0].priority == -3


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        ("", "cache_salt must be a non-empty string, got ''"),
        (5, "cache_salt must be a non-empty string, got 5"),
        ("x" * 129, "cache_salt must have at most 128 characters, got 129"),
        ("a@b", "cache_salt must not contain '@'"),
        ("a/b", "cache_salt must not contain '/'"),
        ("a\\b", "cache_salt must not contain"),
        ("a\0b", "cache_salt must not contain"),
        ("a\ud800", "cache_salt must be valid Unicode"),
    ],
)
def test_bad_cache_salt(processor: InputProcessor, salt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processor.process_inputs("r", [5], SamplingParams(), cache_salt=salt)
    with pytest.raises(ValueError, match=message):
        process(processor, {"prompt_token_ids": [5], "cache_salt": salt})


def test_longest_cache_salt(processor: InputProcessor) -> None:
    assert process(processor, {"prompt": "a", "cache_salt": "x" * 128}).cache_salt == "x" * 128


@pytest.mark.parametrize("request_id", ["", None, 5])
def test_bad_request_id(processor: InputProcessor, request_id: Any) -> None:
    with pytest.raises(ValueError, match="request_id must be a non-empty string"):
        processor.process_inputs(request_id, [5], SamplingParams())


def test_params_of_another_kind(processor: InputProcessor) -> None:
    with pytest.raises(ValueError, match=r"sampling_params must be SamplingParams, got \{\}"):
        processor.process_inputs("r", [5], {})  # type: ignore[arg-type]


def test_bad_words(processor: InputProcessor, tokenizer: PreTrainedTokenizerFast) -> None:
    """A word is forbidden at the start of a text and after a space; where the space is a token apart, once is enough."""
    name, leading = tokenizer.encode("name"), tokenizer.encode(" name")
    assert leading[-len(name) :] != name  # the toy tokenizer has learned " name"
    odd, odd_leading = tokenizer.encode("#!"), tokenizer.encode(" #!")
    assert odd_leading == [tokenizer.encode(" ")[0], *odd]
    params = process(processor, bad_words=["name", " #!", " "]).sampling_params
    assert params.bad_words_token_ids == [name, leading, odd, tokenizer.encode(" ")]


def test_engine_without_tokenizer() -> None:
    processor = InputProcessor(make_config(), None)
    assert process(processor, [5, 6]).prompt_token_ids == [5, 6]
    with pytest.raises(ValueError, match=r"a prompt of text needs a tokenizer, .*got prompt 'hello'"):
        process(processor, "hello")
    with pytest.raises(ValueError, match=r"stop needs a tokenizer, .*got stop=\['a'\]"):
        process(processor, stop="a")
    with pytest.raises(ValueError, match=r"bad_words needs a tokenizer, .*got bad_words=\['a'\]"):
        process(processor, bad_words=["a"])
