"""LLMEngine from prompt to text, with the real scheduler."""

from typing import Any

import pytest
from toy_engine import (
    check_idle,
    executor_of,
    expected_tokens,
    hash_next,
    make_config,
    make_engine,
    run,
    scheduler_of,
    scripted,
    toy_logprobs,
)
from transformers import PreTrainedTokenizerFast

from jaxllm.core.types import EngineCoreRequest
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.outputs import Logprob, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def test_text_of_many_requests(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = make_engine(tokenizer=tokenizer)
    prompts = [f"hello {i} world" for i in range(20)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=1 + i % 7, output_kind=FINAL_ONLY))
    outputs = {output.request_id: output for output in run(engine)}
    assert len(outputs) == 20
    for i, prompt in enumerate(prompts):
        (completion,) = outputs[str(i)].outputs
        assert outputs[str(i)].prompt == prompt
        assert outputs[str(i)].prompt_token_ids == tokenizer.encode(prompt)
        assert completion.token_ids == expected_tokens(tokenizer.encode(prompt), 1 + i % 7)
        assert completion.text.rstrip("�") == tokenizer.decode(completion.token_ids).rstrip("�")
        assert completion.finish_reason == "length"
    check_idle(engine)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
@pytest.mark.parametrize("interval", [1, 4])
def test_streams_agree_with_the_final_output(tokenizer: PreTrainedTokenizerFast, kind: RequestOutputKind, interval: int) -> None:
    engine = make_engine(make_config(stream_interval=interval), tokenizer=tokenizer)
    params = {"max_tokens": 11, "logprobs": 1, "stop": ["zq"]}
    engine.add_request("final", "hello", SamplingParams(**params, output_kind=FINAL_ONLY))
    engine.add_request("stream", "hello", SamplingParams(**params, output_kind=kind))
    outputs = run(engine)
    (final,) = [output.outputs[0] for output in outputs if output.request_id == "final"]
    streamed = [output.outputs[0] for output in outputs if output.request_id == "stream"]
    assert len(streamed) == (11 if interval == 1 else 4)
    if kind is DELTA:
        assert "".join(one.text for one in streamed) == final.text
        assert [token for one in streamed for token in one.token_ids] == final.token_ids
        assert [entry for one in streamed for entry in one.logprobs] == final.logprobs
    else:
        assert streamed[-1] == final
        for one, size in zip(streamed, [1, 5, 9, 11] if interval == 4 else range(1, 12), strict=True):
            assert one.token_ids == final.token_ids[:size]
            assert one.logprobs == final.logprobs[:size]
            assert final.text.startswith(one.text)


def test_stop_string_across_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    """The core goes on with the request until the front end aborts it; then nothing is left anywhere."""
    prompt = tuple(tokenizer.encode("hello"))
    answer = tokenizer.encode("ab") + tokenizer.encode("cd") + tokenizer.encode("efgh")
    engine = make_engine(tokenizer=tokenizer, next_token=scripted({prompt: answer}))
    engine.add_request("r", "hello", SamplingParams(max_tokens=20, stop=["bcd", "never"]))
    outputs = run(engine)
    (completion,) = outputs[-1].outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a", "stop", "bcd")
    assert completion.token_ids == answer[: len(completion.token_ids)]
    assert not scheduler_of(engine).has_unfinished_requests()
    check_idle(engine)


@pytest.mark.parametrize(
    ("params", "reason", "stop_reason", "num_tokens", "text"),
    [
        ({}, "stop", None, 3, "ab"),  # EOS, whose text is skipped
        ({"stop_token_ids": "b"}, "stop", "b", 2, "a"),
        ({"stop_token_ids": "b", "include_stop_str_in_output": True}, "stop", "b", 2, "ab"),
        ({"ignore_eos": True}, "stop", 2, 4, "ab"),  # <|im_end|> given as a stop token id
        ({"ignore_eos": True, "stop_token_ids": []}, "length", None, 6, "abcd"),
        ({"max_tokens": 2}, "length", None, 2, "ab"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "stop", None, 3, "ab<|endoftext|>"),
    ],
)
def test_reasons(
    tokenizer: PreTrainedTokenizerFast, params: dict[str, Any], reason: str, stop_reason: Any, num_tokens: int, text: str
) -> None:
    a, b, c, d = (tokenizer.encode(char)[0] for char in "abcd")
    engine = make_engine(tokenizer=tokenizer, next_token=scripted({(5, 6): [a, b, 0, 2, c, d]}))
    params = {"max_tokens": 6, "stop_token_ids": [2] if params.get("ignore_eos") else None, **params}
    if params["stop_token_ids"] == "b":
        params["stop_token_ids"] = [b]
    engine.add_request("r", [5, 6], SamplingParams(**params))
    (completion,) = run(engine)[-1].outputs
    assert (completion.finish_reason, completion.stop_reason) == (reason, b if stop_reason == "b" else stop_reason)
    assert (len(completion.token_ids), completion.text) == (num_tokens, text)


def test_second_eos_stops_with_its_id(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = make_engine(tokenizer=tokenizer, next_token=scripted({(5, 6): [70, 2]}))
    engine.add_request("r", [5, 6], SamplingParams())
    (completion,) = run(engine)[-1].outputs
    assert (completion.finish_reason, completion.stop_reason, len(completion.token_ids)) == ("stop", 2, 2)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_n(tokenizer: PreTrainedTokenizerFast, kind: RequestOutputKind) -> None:
    engine = make_engine(tokenizer=tokenizer)
    engine.add_request("r", "hello", SamplingParams(n=3, max_tokens=4, output_kind=kind, seed=7))
    assert engine.get_num_unfinished_requests() == 3
    engine.step()
    seeds = {row.params.seed for row in executor_of(engine).rows.values()}
    assert seeds == {7, 8, 9}
    outputs = run(engine)
    assert {output.request_id for output in outputs} == {"r"}
    assert [output.finished for output in outputs][-1]
    assert sum(output.finished for output in outputs) == 1
    if kind is FINAL_ONLY:
        (output,) = outputs
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        expected = expected_tokens(tokenizer.encode("hello"), 4)
        assert all(completion.token_ids == expected for completion in output.outputs)
    check_idle(engine)


def test_logprobs_and_prompt_logprobs(tokenizer: PreTrainedTokenizerFast) -> None:
    """Requests with different numbers of columns in one batch, and a prompt in several chunks."""
    engine = make_engine(make_config(max_num_batched_tokens=8), tokenizer=tokenizer)
    prompt = [10 + i for i in range(20)]
    engine.add_request("a", prompt, SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1, output_kind=FINAL_ONLY))
    engine.add_request("b", [5], SamplingParams(max_tokens=6, logprobs=0, output_kind=FINAL_ONLY))
    engine.add_request("c", [6], SamplingParams(max_tokens=6, logprob_token_ids=[9], output_kind=FINAL_ONLY))
    outputs = {output.request_id: output for output in run(engine)}

    def entries(context: list[int], token_id: int, count: int) -> dict[int, Logprob]:
        ids, values, rank = toy_logprobs(tuple(context), token_id, count)
        pairs = zip(ids, values, [rank, *range(1, count + 1)], strict=True)
        return {one: Logprob(value, number, texts(context, one)) for one, value, number in pairs}

    def texts(context: list[int], token_id: int) -> str:
        text = tokenizer.decode([token_id])
        if not text.endswith("�"):
            return text
        for size in (1, 2, 3):
            whole = tokenizer.decode([*context[-size:], token_id])
            if size <= len(context) and not whole.endswith("�"):
                return whole.removeprefix(tokenizer.decode(context[-size:]).rstrip("�"))
        return ""

    a, b, c = (outputs[name] for name in "abc")
    assert a.prompt_logprobs == [None] + [entries(prompt[:i], prompt[i], 1) for i in range(1, 20)]
    for output, count in ((a, 2), (b, 0)):
        completion = output.outputs[0]
        context, expected = list(output.prompt_token_ids), []
        for token_id in completion.token_ids:
            expected.append(entries(context, token_id, count))
            context.append(token_id)
        assert completion.logprobs == expected
        values = [one[token].logprob for one, token in zip(expected, completion.token_ids, strict=True)]
        assert completion.cumulative_logprob == sum(values)
    assert [set(one) for one in c.outputs[0].logprobs] == [{token, 9} for token in c.outputs[0].token_ids]
    assert {one[9].rank for one in c.outputs[0].logprobs} == {None}
    assert b.prompt_logprobs is None


def test_prompt_logprobs_need_the_whole_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    """A cached prompt is computed again for them."""
    engine = make_engine(tokenizer=tokenizer)
    for _ in range(2):
        engine.add_request("r", [5] * 10, SamplingParams(max_tokens=1))
        plain = run(engine)[-1]
    assert plain.num_cached_tokens == 8
    engine.add_request("r", [5] * 10, SamplingParams(max_tokens=1, prompt_logprobs=0))
    output = run(engine)[-1]
    assert output.num_cached_tokens == 0
    assert [entry is None for entry in output.prompt_logprobs] == [True] + [False] * 9


def test_prompt_logprobs_of_one_token() -> None:
    engine = make_engine()
    engine.add_request("r", [5], SamplingParams(max_tokens=2, prompt_logprobs=4))
    assert [output.prompt_logprobs for output in run(engine)] == [[None], [None]]


def test_cache_salt_keeps_prompts_apart() -> None:
    engine = make_engine()
    hits = []
    for salt in (None, "a", "a", "b", None):
        engine.add_request("r", [5] * 10, SamplingParams(max_tokens=1), cache_salt=salt)
        hits.append(run(engine)[-1].num_cached_tokens)
    assert hits == [0, 0, 8, 0, 8]
    assert engine.reset_prefix_cache()
    engine.add_request("r", [5] * 10, SamplingParams(max_tokens=1))
    assert run(engine)[-1].num_cached_tokens == 0


def test_priority() -> None:
    engine = make_engine(make_config(policy="priority", max_num_seqs=1))
    for name, priority in (("late", 5), ("soon", -5), ("between", 0)):
        engine.add_request(name, [5], SamplingParams(max_tokens=2, output_kind=FINAL_ONLY), priority=priority)
    assert [output.request_id for output in run(engine)] == ["soon", "between", "late"]


def test_abort(tokenizer: PreTrainedTokenizerFast) -> None:
    """Waiting, half prefilled, decoding; by the caller's id, which two requests may have."""
    engine = make_engine(make_config(max_num_batched_tokens=8, max_num_seqs=3), tokenizer=tokenizer)
    engine.add_request("a", [5], SamplingParams(max_tokens=9))
    engine.add_request("b", [6] * 30, SamplingParams(max_tokens=9))
    engine.add_request("a", [7], SamplingParams(max_tokens=9, n=3))
    engine.add_request("c", [8], SamplingParams(max_tokens=2))
    engine.step()
    engine.abort_request(["a", "b", "nobody"])
    outputs = run(engine)
    assert {output.request_id for output in outputs} == {"c"}
    assert outputs[-1].outputs[0].token_ids == expected_tokens([8], 2)
    check_idle(engine)


def test_same_name_twice() -> None:
    engine = make_engine()
    engine.add_request("r", [5], SamplingParams(max_tokens=1))
    engine.add_request("r", [6], SamplingParams(max_tokens=1))
    outputs = run(engine)
    assert [output.request_id for output in outputs] == ["r", "r"]
    assert [output.outputs[0].token_ids for output in outputs] == [expected_tokens([5], 1), expected_tokens([6], 1)]


def test_refused_request_leaves_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = make_engine(tokenizer=tokenizer)
    with pytest.raises(ValueError, match="out of vocabulary"):
        engine.add_request("r", [5, 10**6], SamplingParams())
    check_idle(engine)


@pytest.mark.parametrize("n", [1, 3])
def test_core_that_refuses_leaves_nothing(tokenizer: PreTrainedTokenizerFast, n: int) -> None:
    """All n or none."""
    engine = make_engine(tokenizer=tokenizer)
    checked = engine.check_request("r", "hello", SamplingParams(n=n))
    request: EngineCoreRequest = checked.request
    scheduler = scheduler_of(engine)
    taken = request.request_id if n == 1 else f"2_{request.request_id}"
    engine.engine_core.add_request(EngineCoreRequest(taken, [5], SamplingParams(max_tokens=3)))
    with pytest.raises(ValueError, match="is in use"):
        engine.queue_request(checked)
    assert not engine.has_unfinished_requests()
    engine.engine_core.abort_requests([taken])
    assert scheduler.requests == {}
    check_idle(engine)


def test_tokenizer_or_none(tokenizer: PreTrainedTokenizerFast) -> None:
    assert make_engine(tokenizer=tokenizer).get_tokenizer() is tokenizer
    engine = make_engine()
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        engine.get_tokenizer()
    engine.add_request("r", [5], SamplingParams(max_tokens=3))
    output: RequestOutput = run(engine)[-1]
    assert (output.prompt, output.outputs[0].text, len(output.outputs[0].token_ids)) == (None, "", 3)


def test_prompt_that_fills_the_model() -> None:
    """max_tokens is cut by the model's length."""
    engine = make_engine(make_config(max_model_len=16))
    for max_tokens in (None, 100, 1):
        engine.add_request("r", [5] * 12, SamplingParams(max_tokens=max_tokens, output_kind=FINAL_ONLY))
        (output,) = run(engine)
        assert output.outputs[0].token_ids == expected_tokens([5] * 12, 1 if max_tokens == 1 else 4)
        assert output.outputs[0].finish_reason == "length"


def test_shutdown() -> None:
    engine: LLMEngine = make_engine()
    engine.check_health()
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        engine.add_request("r", [5], SamplingParams())
    assert not engine.has_unfinished_requests()


def test_hash_is_no_special_token() -> None:
    """So that tests may count on lengths."""
    assert all(hash_next((i, j)) > 2 for i in range(30) for j in range(30))
