"""Lengths and contents of every data set."""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from jaxllm.bench.datasets import SampleRequest, add_dataset_args, load_requests, random_tokens, range_ratio
from jaxllm.bench.prompts import Prompts, TextPrompts, TokenPrompts


def load(
    flags: list[str], prompts: Prompts | None = None, *, as_text: bool = False, seed: int = 0, **kwargs: Any
) -> list[SampleRequest]:
    parser = argparse.ArgumentParser()
    add_dataset_args(parser)
    if prompts is None:
        prompts = TokenPrompts(1000)
    return load_requests(parser.parse_args(flags), prompts, seed=seed, as_text=as_text, **kwargs)


def write_lines(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_random_token_ids() -> None:
    requests = load(["--num-prompts", "7", "--input-len", "20", "--output-len", "5"])
    assert [(len(r.prompt), r.prompt_len, r.output_len) for r in requests] == [(20, 20, 5)] * 7
    assert all(0 <= token < 1000 for r in requests for token in r.prompt)
    assert len({tuple(r.prompt) for r in requests}) == 7


def test_the_same_seed_makes_the_same_requests() -> None:
    flags = ["--num-prompts", "5", "--input-len", "8", "--random-range-ratio", "0.5"]
    assert load(flags) == load(flags)
    assert load(flags) != load(flags, seed=1)


def test_range_of_random_lengths() -> None:
    flags = ["--num-prompts", "500", "--input-len", "10", "--output-len", "4", "--random-range-ratio"]
    requests = load([*flags, "0.3"])
    assert {r.prompt_len for r in requests} == set(range(7, 14))
    assert {r.output_len for r in requests} == set(range(2, 7))  # floor(2.8) to ceil(5.2)
    requests = load([*flags, '{"input": 0, "output": 0.5}'])
    assert {r.prompt_len for r in requests} == {10}
    assert {r.output_len for r in requests} == {2, 3, 4, 5, 6}


def test_random_prefix() -> None:
    requests = load(["--num-prompts", "4", "--input-len", "6", "--random-prefix-len", "3"])
    assert {len(r.prompt) for r in requests} == {9}
    assert len({tuple(r.prompt[:3]) for r in requests}) == 1
    assert len({tuple(r.prompt[3:]) for r in requests}) == 4


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 0.99), st.integers(0, 5))
def test_random_lengths_stay_in_range(input_len: int, output_len: int, ratio: float, prefix_len: int) -> None:
    prompts = TokenPrompts(50)
    for r in random_tokens(prompts, np.random.default_rng(0), 5, input_len, output_len, (ratio, ratio), prefix_len):
        own = len(r.prompt) - prefix_len
        assert r.prompt_len == len(r.prompt)
        assert input_len * (1 - ratio) - 1 <= own <= input_len * (1 + ratio) + 1
        assert 1 <= r.output_len <= output_len * (1 + ratio) + 1


@pytest.mark.parametrize("length", [1, 2, 33, 300])
def test_texts_have_the_length_that_was_asked_for(smollm2_tokenizer: PreTrainedTokenizerFast, length: int) -> None:
    flags = ["--num-prompts", "5", "--input-len", str(length)]
    for request in load(flags, TextPrompts(smollm2_tokenizer), as_text=True):
        assert isinstance(request.prompt, str)
        assert len(smollm2_tokenizer(request.prompt)["input_ids"]) == length == request.prompt_len


def test_texts_of_a_vocabulary_without_words(small_tokenizer: PreTrainedTokenizerFast) -> None:
    """Letters that lie side by side may be one token; then the text is filled up. The special token counts."""
    for request in load(["--num-prompts", "20", "--input-len", "30"], TextPrompts(small_tokenizer), as_text=True):
        assert len(small_tokenizer(request.prompt)["input_ids"]) == 30 == request.prompt_len


def test_prefix_repetition() -> None:
    flags = ["--dataset-name", "prefix_repetition", "--num-prompts", "10", "--prefix-repetition-num-prefixes", "3"]
    flags += ["--prefix-repetition-prefix-len", "8", "--prefix-repetition-suffix-len", "4", "--prefix-repetition-output-len", "2"]
    requests = load(flags)
    assert {(r.prompt_len, len(r.prompt), r.output_len) for r in requests} == {(12, 12, 2)}
    assert sorted(Counter(tuple(r.prompt[:8]) for r in requests).values()) == [3, 3, 4]
    assert len({tuple(r.prompt[8:]) for r in requests}) == 10
    # Shuffled: not in turn.
    order = [tuple(r.prompt[:8]) for r in requests]
    assert order != [order[i % 3] for i in range(10)]


def test_prefixes_are_shared_in_text_too(smollm2_tokenizer: PreTrainedTokenizerFast) -> None:
    flags = ["--dataset-name", "prefix_repetition", "--num-prompts", "8", "--prefix-repetition-num-prefixes", "2"]
    flags += ["--prefix-repetition-prefix-len", "20", "--prefix-repetition-suffix-len", "5"]
    requests = load(flags, TextPrompts(smollm2_tokenizer), as_text=True)
    ids = [smollm2_tokenizer.encode(r.prompt) for r in requests]
    assert {len(one) for one in ids} == {25}
    assert len({tuple(one[:20]) for one in ids}) == 2


def test_sharegpt(tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast) -> None:
    def talk(question: str, answer: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}

    kept, long = talk("Who is there?", "Nobody at all."), talk("x y " * 600, "Well, well.")
    entries = [kept, talk("?", "Too short a question"), talk("Too short an answer?", "!"), long, {"conversations": []}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries))
    prompts = TextPrompts(small_tokenizer)
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "3", "--no-oversample"]
    (request,) = load(flags, prompts)
    assert request.prompt == "Who is there?"
    assert request.prompt_len == 1 + len(small_tokenizer.encode("Who is there?", add_special_tokens=False))
    assert request.output_len == len(small_tokenizer.encode("Nobody at all.", add_special_tokens=False))
    # With a length of our own, the answer does not matter.
    requests = load([*flags, "--sharegpt-output-len", "9", "--disable-shuffle"], prompts)
    assert [(r.prompt, r.output_len) for r in requests] == [("Who is there?", 9), ("Too short an answer?", 9)]


def test_too_few_requests_are_asked_again(
    tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lines(tmp_path / "custom.jsonl", [{"prompt": f"prompt {i}"} for i in range(3)])
    flags = ["--dataset-name", "custom", "--dataset-path", path, "--num-prompts", "7"]
    requests = load(flags, TextPrompts(small_tokenizer))
    assert {r.prompt for r in requests[:3]} == {"prompt 0", "prompt 1", "prompt 2"}
    assert len(requests) == 7
    assert "some of the 7 are asked again" in caplog.text


def test_custom(tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast) -> None:
    lines = [{"prompt": "the end"}, {"prompt": "the dog", "output_tokens": 3}]
    flags = ["--dataset-name", "custom", "--num-prompts", "2", "--disable-shuffle"]
    flags += ["--dataset-path", write_lines(tmp_path / "custom.jsonl", lines)]
    prompts = TextPrompts(small_tokenizer)
    assert [r.output_len for r in load(flags, prompts)] == [256, 256]
    assert [r.output_len for r in load([*flags, "--custom-output-len", "-1"], prompts)] == [256, 3]
    assert [r.output_len for r in load([*flags, "--output-len", "5"], prompts)] == [5, 5]
    assert [r.prompt_len for r in load(flags, prompts)] == [len(small_tokenizer(line["prompt"])["input_ids"]) for line in lines]
    asked = load(flags, prompts, apply_chat_template=lambda prompt: f"<user>{prompt}<end>")
    assert [r.prompt for r in asked] == ["<user>the end<end>", "<user>the dog<end>"]
    # The template writes the special tokens itself.
    assert asked[0].prompt_len == len(small_tokenizer.encode("<user>the end<end>", add_special_tokens=False))


def trace(tmp_path: Path, lines: list[dict[str, Any]]) -> list[str]:
    path = write_lines(tmp_path / "trace.jsonl", lines)
    return ["--dataset-name", "timed_trace", "--dataset-path", path, "--timed-trace-chunk-hash-size", "4"]


def test_timed_trace(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 27000, "input_length": 10, "output_length": 3, "hash_ids": [5, 6, 7]},
        {"timestamp": 27500, "input_length": 8, "output_length": 1, "hash_ids": [5, 6]},
        {"timestamp": 29000, "input_length": 9, "output_length": 2, "hash_ids": [6]},
        {"timestamp": 30000, "input_length": 9, "output_length": 2},
    ]
    flags = [*trace(tmp_path, lines), "--timed-trace-sec-multiplier", "0.001"]
    first, second, third, fourth = load(flags)
    assert [r.timestamp for r in (first, second, third, fourth)] == pytest.approx([0, 0.5, 2, 3])
    assert [(len(r.prompt), r.prompt_len, r.output_len) for r in (first, second, third)] == [(10, 10, 3), (8, 8, 1), (9, 9, 2)]
    assert first.prompt[:8] == second.prompt
    assert third.prompt[:4] == first.prompt[4:8]
    # What no hash id stands for is the request's own.
    assert third.prompt[4:] != fourth.prompt[4:]
    assert load(flags) == [first, second, third, fourth]
    assert load([*flags, "--num-prompts", "2"]) == [first, second]


def test_timed_trace_with_other_names_and_out_of_order(tmp_path: Path) -> None:
    lines = [{"t": 2.0, "in": 4, "out": 1, "ids": ["a"]}, {"t": 1.0, "in": 4, "out": 2, "ids": ["a"]}]
    flags = trace(tmp_path, lines)
    for field, name in (("timestamp", "t"), ("input-length", "in"), ("output-length", "out"), ("hash-ids", "ids")):
        flags += [f"--timed-trace-label-{field}", name]
    first, second = load(flags)
    assert (first.timestamp, first.output_len) == (0.0, 2)
    assert (second.timestamp, second.output_len) == (1.0, 1)
    assert first.prompt == second.prompt


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--input-len", "0"], "--input-len must be at least 1, got 0"),
        (["--random-output-len", "-3"], "must be at least 1"),
        (["--dataset-path", "x.json"], "random takes no --dataset-path"),
        (["--dataset-name", "sharegpt"], "sharegpt needs --dataset-path"),
        (["--dataset-name", "sharegpt", "--dataset-path", "x"], "needs a tokenizer"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere/x"], "/nowhere/x: No such file"),
        (
            ["--dataset-name", "prefix_repetition", "--num-prompts", "3"],
            r"-num-prefixes must be in \[1, --num-prompts = 3\], got 10",
        ),
        (["--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "-1"], "must not be negative"),
    ],
)
def test_flags_that_are_wrong(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(flags)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("custom", "{", "line 1: no JSON"),
        ("custom", '\n{"prompt": ""}', "line 2: \"prompt\" must be a text, got ''"),
        ("custom", "[1]", "line 1: must be a JSON object"),
        ("custom", "", "no usable request"),
        ("sharegpt", "{}", "must be a JSON list"),
        ("sharegpt", '[{"text": "x"}]', "entry 0 has no list"),
        ("sharegpt", '[{"conversations": [{"value": "x"}, {"from": "gpt"}]}]', 'entry 0 has no "value"'),
        (
            "timed_trace",
            '{"timestamp": 1, "input_length": 0, "output_length": 1}',
            '"input_length" must be a number of at least 1',
        ),
        ("timed_trace", '{"input_length": 1, "output_length": 1}', '"timestamp" must be a number of at least 0, got None'),
        ("timed_trace", '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 3}', "must be a list of ids"),
        ("timed_trace", "", "the trace is empty"),
    ],
)
def test_files_that_are_wrong(
    tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast, name: str, text: str, message: str
) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(["--dataset-name", name, "--dataset-path", str(path)], TextPrompts(small_tokenizer))


def test_own_output_tokens_must_be_a_number(tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_lines(tmp_path / "custom.jsonl", [{"prompt": "x", "output_tokens": "many"}])
    flags = ["--dataset-name", "custom", "--dataset-path", path, "--custom-output-len"]
    with pytest.raises(ValueError, match=r"\"output_tokens\" must be an integer of at least 1, got 'many'"):
        load([*flags, "-1"], TextPrompts(small_tokenizer))
    with pytest.raises(ValueError, match="--custom-output-len must be at least 1, or -1, got 0"):
        load([*flags, "0"], TextPrompts(small_tokenizer))


@pytest.mark.parametrize("text", ["1", "-0.1", "x", '{"input": 0.5}', "[0.5]", "null"])
def test_ratios_that_are_wrong(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        range_ratio(text)
