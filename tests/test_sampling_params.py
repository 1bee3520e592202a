"""SamplingParams: every field, its default, its limits, and who reads it."""

import dataclasses
import logging
import pickle
from pathlib import Path

import pytest

import jaxllm
from jaxllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams

JAXLLM = Path(jaxllm.__path__[0])

DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "prompt_logprob_start": None,
    "prompt_logprob_token_ids": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "stream_interval": None,
    "skip_clone": False,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "extra_args": None,
    "skip_reading_prefix_cache": False,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "bad_words_token_ids": [],
    "all_stop_token_ids": set(),
}

# Who reads each field, by package of jaxllm.
CONSUMERS = {
    "sample": {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
        "logprobs",
        "logprob_token_ids",
        "logit_bias",
        "allowed_token_ids",
        "bad_words_token_ids",
        "all_stop_token_ids",
    },
    "core": {"stop_token_ids", "ignore_eos", "max_tokens", "skip_reading_prefix_cache", "repetition_detection"},
    "worker": {"prompt_logprobs", "prompt_logprob_token_ids"},
    "engine": {
        "n",
        "stop",
        "bad_words",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "prompt_logprob_start",
    },
    "itself": {"skip_clone"},  # SamplingParams.clone
    "the user": {"extra_args"},  # carried along, for custom use
    "refused": {"structured_outputs", "thinking_token_budget"},
}


def test_defaults():
    params = SamplingParams()
    assert {field.name: getattr(params, field.name) for field in dataclasses.fields(params)} == DEFAULTS


def test_every_field_has_exactly_one_place():
    placed = [name for names in CONSUMERS.values() for name in names]
    assert len(placed) == len(set(placed))
    assert set(placed) == {field.name for field in dataclasses.fields(SamplingParams)}


def _reads(name, sources):
    return any(f".{spelling}" in sources for spelling in (name, f"num_{name}"))


def test_the_sampler_reads_its_fields():
    sources = "\n".join(path.read_text() for path in (JAXLLM / "sample").glob("*.py"))
    assert not {name for name in CONSUMERS["sample"] if not _reads(name, sources)}


def test_the_other_fields_are_read():
    readers = [JAXLLM / name for name in ("core/scheduler.py", "worker/model_runner.py", "engine/output_processor.py")]
    if not all(path.exists() for path in readers):
        pytest.skip("the scheduler, the worker or the front end is not there yet")
    sources = "\n".join(path.read_text() for folder in ("core", "worker", "engine") for path in (JAXLLM / folder).glob("*.py"))
    assert not {name for package in ("core", "worker", "engine") for name in CONSUMERS[package] if not _reads(name, sources)}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [1, 2, 16384]),
        ("presence_penalty", [-2, -2.0, 0, 2.0]),
        ("frequency_penalty", [-2.0, 2]),
        ("repetition_penalty", [1e-6, 1, 100.0]),
        ("temperature", [0, 0.01, 1, 2.0]),
        ("top_p", [1e-6, 1, 1.0]),
        ("top_k", [-1, 0, 1, 10**6]),
        ("min_p", [0, 0.5, 1]),
        ("seed", [None, 0, -(2**63), 2**64 - 1]),
        ("stop_token_ids", [[], [0], [7, 3]]),
        ("max_tokens", [None, 1, 10**9]),
        ("min_tokens", [0, 16]),
        ("logprobs", [None, 0, 20, -1]),
        ("prompt_logprobs", [None, 0, 20, -1]),
        ("logprob_token_ids", [None, [0], list(range(128))]),
        ("prompt_logprob_token_ids", [None, [5], list(range(128))]),
        ("ignore_eos", [True]),
        ("flat_logprobs", [True]),
        ("detokenize", [False]),
        ("skip_special_tokens", [False]),
        ("spaces_between_special_tokens", [False]),
        ("include_stop_str_in_output", [True]),
        ("output_kind", list(RequestOutputKind)),
        ("stream_interval", [None, 1, 100]),
        ("skip_clone", [True]),
        ("logit_bias", [None, {}, {0: 1.5, 9: -100.0}]),
        ("allowed_token_ids", [None, [0], [3, 1]]),
        ("bad_words", [[], ["no"], ["no", " never"]]),
        ("extra_args", [None, {}, {"a": [1, {"b": 2**64 - 1}], "c": "text", "d": -(2**63)}]),
        ("skip_reading_prefix_cache", [True, False]),
        ("repetition_detection", [None, RepetitionDetectionParams(4), RepetitionDetectionParams(9, 2, 3)]),
    ],
)
def test_accepted(name, values):
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 16385, 1.0, True, None]),
        ("presence_penalty", [-2.01, 2.01, float("nan"), "1", None]),
        ("frequency_penalty", [-2.01, 2.01, float("inf"), True]),
        ("repetition_penalty", [0, 0.0, -1, float("inf"), float("nan")]),
        ("temperature", [-0.1, 2.01, float("nan"), float("inf"), "0"]),
        ("top_p", [0, -0.5, 1.01, float("nan")]),
        ("top_k", [-2, 1.5, True, None]),
        ("min_p", [-0.1, 1.1, float("nan")]),
        ("seed", [-(2**63) - 1, 2**64, 1.0, True]),
        ("stop", ["", [""], [3], 3, ["a", ""]]),
        ("stop_token_ids", [[-1], ["a"], [1.0], [True], 0, "12", {1: 2}]),
        ("max_tokens", [0, -1, 1.5, True]),
        ("min_tokens", [-1, 17, 2.0, True]),
        ("logprobs", [-2, 1.0, False]),
        ("prompt_logprobs", [-2, 1.0, "5"]),
        ("prompt_logprob_start", [-1, 0.5, 3]),
        ("prompt_logprob_token_ids", [[], [-1], list(range(129))]),
        ("logprob_token_ids", [[], [1.0], list(range(129))]),
        ("ignore_eos", [1, "false", None]),
        ("flat_logprobs", [0]),
        ("detokenize", [None]),
        ("skip_special_tokens", ["yes"]),
        ("spaces_between_special_tokens", [1]),
        ("include_stop_str_in_output", [2]),
        ("output_kind", [3, "delta", None]),
        ("stream_interval", [0, 1.5, True]),
        ("skip_clone", [1]),
        ("structured_outputs", [{"json": "{}"}, {}]),
        (
            "logit_bias",
            [{"a": 1}, {-1: 1}, {1.5: 1}, {True: 1}, {1: "x"}, {1: float("nan")}, {1: float("inf")}, [1], {1: 1, "1": 2}],
        ),
        ("allowed_token_ids", [[], [-1], 5, "5"]),
        ("bad_words", ["word", [""], [1], 1]),
        ("extra_args", [[], "a", {"a": 2**64}, {"a": [{"b": -(2**63) - 1}]}]),
        ("skip_reading_prefix_cache", [1, "no"]),
        ("thinking_token_budget", [0, 5, -2, 1.0]),
        ("repetition_detection", [3, {"max_pattern_size": 3, "size": 1}, {"min_count": 2}, {"max_pattern_size": 0}]),
    ],
)
def test_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


def test_the_refusal_names_the_value():
    with pytest.raises(ValueError, match=r"temperature must be in \[0, 2\], got 3"):
        SamplingParams(temperature=3)
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 0"):
        SamplingParams(top_p=0)
    with pytest.raises(ValueError, match=r"min_tokens must be at most max_tokens 4, got 5"):
        SamplingParams(max_tokens=4, min_tokens=5)


@pytest.mark.parametrize(
    "arguments",
    [{"max_pattern_size": 3, "min_pattern_size": 4}, {"max_pattern_size": 3, "min_count": 1}, {"max_pattern_size": 3.0}],
)
def test_repetition_detection_is_checked(arguments):
    with pytest.raises(ValueError, match="repetition_detection"):
        RepetitionDetectionParams(**arguments)


def test_repetition_detection_from_json():
    params = SamplingParams(repetition_detection={"max_pattern_size": 5, "min_count": 3})
    assert params.repetition_detection == RepetitionDetectionParams(5, 1, 3)


def test_small_temperatures_are_raised_and_zero_is_greedy(caplog):
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert "temperature" in caplog.text
    assert not SamplingParams(temperature=1e-6).is_greedy
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=4, min_p=0.2)
    assert greedy.is_greedy
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    with pytest.raises(ValueError, match="n must be 1 for greedy sampling"):
        SamplingParams(temperature=0, n=2)


def test_minus_one_means_none():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None


def test_stop():
    assert SamplingParams(stop="end").stop == ["end"]
    assert SamplingParams(stop=("a", "b")).stop == ["a", "b"]
    with pytest.raises(ValueError, match="stop needs detokenize"):
        SamplingParams(stop="end", detokenize=False)
    params = SamplingParams(stop_token_ids=[5, 3, 5])
    assert params.stop_token_ids == [5, 3]
    assert params.all_stop_token_ids == {3, 5}


def test_logprobs_true_is_one():
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.num_logprobs, params.num_prompt_logprobs) == (1, 1)


def test_named_logprobs_count_as_many():
    params = SamplingParams(logprob_token_ids=[4, 5], prompt_logprob_token_ids=[1])
    assert (params.num_logprobs, params.num_prompt_logprobs) == (2, 1)
    assert SamplingParams(logprobs=2, logprob_token_ids=[4, 5]).num_logprobs == 2
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ValueError, match=f"{name} must equal the length"):
            SamplingParams(**{name: 3, f"{name.removesuffix('s')}_token_ids": [4, 5]})


def test_prompt_logprobs_skip_the_prefix_cache():
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache
    assert SamplingParams(prompt_logprob_token_ids=[1], prompt_logprob_start=3).skip_reading_prefix_cache
    assert not SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False).skip_reading_prefix_cache


def test_logit_bias_takes_json_keys_and_is_clamped():
    assert SamplingParams(logit_bias={"3": 200, 4: -1e9, 5: 1}).logit_bias == {3: 100.0, 4: -100.0, 5: 1.0}


def test_bad_words_are_deduplicated():
    assert SamplingParams(bad_words=["a", "b", "a"]).bad_words == ["a", "b"]


def test_from_optional():
    params = SamplingParams.from_optional(temperature=None, top_p=0.5, seed=None, stop=None)
    assert params == SamplingParams(top_p=0.5)
    assert SamplingParams.from_optional().max_tokens == 16
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    with pytest.raises(ValueError, match="unknown sampling parameter 'best_of', got 3"):
        SamplingParams.from_optional(best_of=3)
    with pytest.raises(ValueError, match="bad_words_token_ids"):
        SamplingParams.from_optional(bad_words_token_ids=[[1]])


def test_clone_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, extra_args={"x": [1]})
    copied = params.clone()
    assert copied == params
    copied.stop.append("b")
    copied.extra_args["x"].append(2)
    copied.all_stop_token_ids.add(9)
    assert (params.stop, params.extra_args, params.all_stop_token_ids) == (["a"], {"x": [1]}, set())
    kept = SamplingParams(skip_clone=True)
    assert kept.clone() is kept


def test_pickles():
    params = SamplingParams(seed=3, stop=["a"], repetition_detection=RepetitionDetectionParams(3))
    params.bad_words_token_ids = [[1, 2]]
    assert pickle.loads(pickle.dumps(params)) == params
