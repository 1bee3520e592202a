"""/v1/completions over a model whose every token is known."""

from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from sse import chunks, texts
from toy_engine import expected_tokens, toy_logprobs
from toy_server import MAX_MODEL_LEN, ServerThread

from jaxllm.serve.protocol.completion import CompletionResponse

RESPONSE = TypeAdapter(CompletionResponse)
PROMPT = [70, 71, 72, 73, 74]


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return RESPONSE.validate_python(response.json(), strict=True)


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    return chunks(client.post("/v1/completions", json={**body, "stream": True}))


@pytest.fixture(scope="module")
def tokenizer(server: ServerThread):
    return server.context.tokenizer


def test_token_ids_in_and_out(client: httpx.Client, tokenizer):
    answer = complete(client, prompt=PROMPT, max_tokens=6, return_token_ids=True)
    expected = expected_tokens(PROMPT, 6)
    [choice] = answer["choices"]
    assert choice["token_ids"] == expected
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["text"] == tokenizer.decode(expected)
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("length", None, None)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 6, 11)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "toy")


def test_text_is_tokenized_with_special_tokens_or_without(client: httpx.Client, tokenizer):
    ids = tokenizer("Hello world")["input_ids"]
    for special in (True, False):
        answer = complete(client, prompt="Hello world", max_tokens=1, return_token_ids=True, add_special_tokens=special)
        assert answer["choices"][0]["prompt_token_ids"] == ids


@pytest.mark.parametrize("prompt", [["Hello", "A name"], [PROMPT, PROMPT[:2]], ["Hello"]])
def test_several_prompts_and_samples(client: httpx.Client, tokenizer, prompt):
    body = {"prompt": prompt, "max_tokens": 4, "n": 3, "temperature": 1.0, "return_token_ids": True}
    answer = complete(client, **body)
    ids = [one if isinstance(one, list) else tokenizer(one)["input_ids"] for one in prompt]
    assert [choice["index"] for choice in answer["choices"]] == list(range(3 * len(prompt)))
    for choice in answer["choices"]:
        own = ids[choice["index"] // 3]
        assert choice["prompt_token_ids"] == own
        assert choice["token_ids"] == expected_tokens(own, 4)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 12 * len(prompt)
    found = stream(client, **body)
    assert texts(found, 3 * len(prompt)) == [choice["text"] for choice in answer["choices"]]


def test_max_tokens_is_16_unless_given_and_cut_to_what_fits(client: httpx.Client):
    assert complete(client, prompt=PROMPT)["usage"]["completion_tokens"] == 16
    assert complete(client, prompt=PROMPT, max_tokens=None)["usage"]["completion_tokens"] == 16
    long = [70] * (MAX_MODEL_LEN - 3)
    assert complete(client, prompt=long, max_tokens=100)["usage"]["completion_tokens"] == 3


def test_truncation(client: httpx.Client, tokenizer):
    body = {"prompt": PROMPT, "max_tokens": 1, "return_token_ids": True}
    for fields, expected in (
        ({"truncate_prompt_tokens": 2}, PROMPT[-2:]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, PROMPT[-2:]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, PROMPT[:2]),
        ({"truncate_prompt_tokens": 9}, PROMPT),
        ({"truncate_prompt_tokens": -1}, PROMPT),
    ):
        assert complete(client, **body, **fields)["choices"][0]["prompt_token_ids"] == expected
    long = {"prompt": list(range(70, 170)) * 6, "max_tokens": 10, "truncate_prompt_tokens": -1, "return_token_ids": True}
    [choice] = complete(client, **long)["choices"]
    assert len(choice["prompt_token_ids"]) == MAX_MODEL_LEN - 10
    assert len(choice["token_ids"]) == 10
    text = "Hello world, the quick brown fox"
    echoed = complete(client, prompt=text, truncate_prompt_tokens=2, echo=True, max_tokens=0)["choices"][0]["text"]
    assert echoed == tokenizer.decode(tokenizer(text)["input_ids"][-2:])


@pytest.mark.parametrize("prompt", ["Hello world", PROMPT])
def test_echo(client: httpx.Client, tokenizer, prompt):
    ids = prompt if isinstance(prompt, list) else tokenizer(prompt)["input_ids"]
    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    plain = complete(client, prompt=prompt, max_tokens=3)["choices"][0]["text"]
    assert complete(client, prompt=prompt, max_tokens=3, echo=True)["choices"][0]["text"] == text + plain
    found = stream(client, prompt=prompt, max_tokens=3, echo=True)
    assert found[0]["choices"][0]["text"].startswith(text)
    assert texts(found) == [text + plain]
    only = complete(client, prompt=prompt, max_tokens=0, echo=True, logprobs=1, return_token_ids=True)
    [choice] = only["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (text, "length", [])
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert only["usage"]["completion_tokens"] == 0
    assert texts(stream(client, prompt=prompt, max_tokens=0, echo=True)) == [text]


def test_logprobs(client: httpx.Client, tokenizer):
    [choice] = complete(client, prompt=PROMPT, max_tokens=3, logprobs=2, return_tokens_as_token_ids=True, echo=True)["choices"]
    ids = [*PROMPT, *expected_tokens(PROMPT, 3)]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    for position in range(1, len(ids)):
        top, values, _ = toy_logprobs(tuple(ids[:position]), ids[position], 2)
        assert logprobs["token_logprobs"][position] == values[0]
        pairs = zip(top, values, strict=True)
        assert logprobs["top_logprobs"][position] == {f"token_id:{token_id}": value for token_id, value in pairs}
    # Offsets count the characters of what is listed.
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
    found = stream(client, prompt=PROMPT, max_tokens=3, logprobs=2, return_tokens_as_token_ids=True, echo=True)
    for name in logprobs:
        assert [entry for chunk in found for entry in chunk["choices"][0]["logprobs"][name]] == logprobs[name]


def test_logprobs_of_the_sampled_token_only_and_of_named_tokens(client: httpx.Client):
    body = {"prompt": PROMPT, "max_tokens": 2, "return_tokens_as_token_ids": True}
    [choice] = complete(client, **body, logprobs=0)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1, 1]
    [choice] = complete(client, **body, logprob_token_ids=[5, 6])["choices"]
    for token_id, top in zip(expected_tokens(PROMPT, 2), choice["logprobs"]["top_logprobs"], strict=True):
        assert set(top) == {f"token_id:{one}" for one in (token_id, 5, 6)}


def test_prompt_logprobs(client: httpx.Client):
    [choice] = complete(client, prompt=PROMPT, max_tokens=1, prompt_logprobs=1)["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(PROMPT)
    _, values, rank = toy_logprobs(tuple(PROMPT[:1]), PROMPT[1], 1)
    entry = choice["prompt_logprobs"][1][str(PROMPT[1])]
    assert (entry["logprob"], entry["rank"]) == (values[0], rank)


def test_stop_strings_and_stop_tokens(client: httpx.Client):
    ids = expected_tokens(PROMPT, 40)
    text = complete(client, prompt=PROMPT, max_tokens=40)["choices"][0]["text"]
    stop = text[10:13]
    cut = text[: text.index(stop)]
    for fields, expected in (({}, cut), ({"include_stop_str_in_output": True}, cut + stop)):
        [choice] = complete(client, prompt=PROMPT, max_tokens=40, stop=[stop], **fields)["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
        found = stream(client, prompt=PROMPT, max_tokens=40, stop=stop, **fields)
        assert texts(found) == [expected]
        assert (found[-1]["choices"][0]["finish_reason"], found[-1]["choices"][0]["stop_reason"]) == ("stop", stop)
    [choice] = complete(client, prompt=PROMPT, max_tokens=40, stop_token_ids=[ids[5]], return_token_ids=True)["choices"]
    assert choice["token_ids"] == ids[: ids.index(ids[5]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[5])


def test_stream_usage(client: httpx.Client):
    body = {"prompt": PROMPT, "max_tokens": 5}
    assert all("usage" not in chunk for chunk in stream(client, **body))
    found = stream(client, **body, stream_options={"include_usage": True})
    assert found[-1]["choices"] == []
    usage = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert found[-1]["usage"].items() >= usage.items()
    assert all("usage" not in chunk for chunk in found[:-1])
    found = stream(client, **body, stream_options={"include_usage": True, "continuous_usage_stats": True}, return_token_ids=True)
    num_tokens = 0
    for chunk in found[:-1]:
        num_tokens += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["completion_tokens"] == num_tokens
    assert num_tokens == 5
    assert found[0]["choices"][0]["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in found[1:-1])
    # Only include_usage makes continuous_usage_stats act.
    found = stream(client, **body, stream_options={"include_usage": False, "continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in found)


def test_no_chunk_is_empty(client: httpx.Client):
    found = stream(client, prompt=PROMPT, max_tokens=100)
    for chunk in found:
        [choice] = chunk["choices"]
        assert choice["text"] or choice["finish_reason"]
    assert [choice["finish_reason"] for chunk in found for choice in chunk["choices"]][-1] == "length"
    assert "system_fingerprint" in found[-1]
    assert all("system_fingerprint" not in chunk for chunk in found[:-1])


def test_cached_tokens(client: httpx.Client):
    prompt = [90, 91, 92] * 7
    assert complete(client, prompt=prompt, cache_salt="a")["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert complete(client, prompt=prompt, cache_salt="a")["usage"]["prompt_tokens_details"] == {"cached_tokens": 20}
    assert complete(client, prompt=prompt, cache_salt="b")["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_request_id(client: httpx.Client):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "request_id": "mine"})
    assert answer.json()["id"] == "cmpl-mine"
    headers = {"X-Request-Id": "header"}
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "request_id": "mine"}, headers=headers)
    assert answer.json()["id"] == "cmpl-header"
    assert answer.headers["x-request-id"] == "header"
    answer = client.post("/v1/completions", json={"prompt": PROMPT})
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"


def test_sampling_parameters_reach_the_engine(client: httpx.Client):
    ids = expected_tokens(PROMPT, 8)
    # Repetition of one token: the toy model never repeats, a pattern of one token does not come.
    answer = complete(client, prompt=PROMPT, max_tokens=8, repetition_detection={"max_pattern_size": 2}, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == ids
    found = stream(client, prompt=PROMPT, max_tokens=9, stream_interval=4, return_token_ids=True)
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in found]
    # The first token comes at once, then at least four at a time; a slow reader gets more.
    assert len(sizes) <= 4
    assert all(size >= 4 for size in sizes[1:-1])
    assert sum(sizes) == 9


def test_beam_search(client: httpx.Client, tokenizer):
    body = {"prompt": PROMPT, "max_tokens": 3, "n": 2, "use_beam_search": True, "return_token_ids": True, "temperature": 0}
    answer = complete(client, **body)
    best, second = answer["choices"]
    # Each of the toy model's tokens has the log probability -0.5 at best, -1.0 next.
    assert best["token_ids"] == expected_tokens(PROMPT, 3)
    assert best["text"] == tokenizer.decode(best["token_ids"])
    assert len(second["token_ids"]) == 3
    assert second["token_ids"] != best["token_ids"]
    assert answer["usage"]["completion_tokens"] == 6
    response = client.post("/v1/completions", json={**body, "top_p": 0.5})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_p")
    chat = {"messages": [{"role": "user", "content": "Hello"}], "n": 2, "use_beam_search": True, "max_tokens": 2}
    assert [len(choice["message"]["content"]) > 0 for choice in client.post("/v1/chat/completions", json=chat).json()["choices"]]
