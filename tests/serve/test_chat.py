"""/v1/chat/completions over a model that says what it is told to."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from sse import chunks, texts
from toy_server import ServerThread

from jaxllm.serve.protocol.chat import ChatCompletionResponse

RESPONSE = TypeAdapter(ChatCompletionResponse)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"SAY[{text}]YAS"}]


def chat(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return RESPONSE.validate_python(response.json(), strict=True)


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    return chunks(client.post("/v1/chat/completions", json={**body, "stream": True}))


def test_answer(client: httpx.Client, server: ServerThread):
    answer = chat(client, messages=said("Hello wörld"), return_token_ids=True, return_prompt_text=True)
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello wörld", "refusal": None}
    assert choice["finish_reason"] == "stop"
    tokenizer = server.context.tokenizer
    prompt = "<|im_start|>user\nSAY[Hello wörld]YAS<|im_end|>\n<|im_start|>assistant\n"
    assert answer["prompt_text"] == prompt
    assert answer["prompt_token_ids"] == tokenizer(prompt)["input_ids"]
    assert choice["token_ids"][:-1] == tokenizer("Hello wörld")["input_ids"]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert answer["id"].startswith("chatcmpl-")


def test_stream(client: httpx.Client):
    found = stream(client, messages=said("Hello wörld"), stream_options={"include_usage": True}, return_prompt_text=True)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "SAY[" in found[0]["prompt_text"]
    assert texts(found) == ["Hello wörld"]
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] > 0
    assert found[-2]["choices"][0]["finish_reason"] == "stop"
    for chunk in found[1:-1]:
        assert chunk["choices"][0]["delta"].get("content") or chunk["choices"][0]["finish_reason"]
        assert "usage" not in chunk
    assert {chunk["id"] for chunk in found} == {found[0]["id"]}


def test_stream_of_several_choices_with_usage_everywhere(client: httpx.Client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = stream(client, messages=said("Hello"), n=3, stream_options=options, return_token_ids=True)
    assert [chunk["choices"][0]["delta"].get("role") for chunk in found[:3]] == ["assistant"] * 3
    assert [chunk["choices"][0]["index"] for chunk in found[:3]] == [0, 1, 2]
    assert found[0]["usage"]["completion_tokens"] == 0
    assert texts(found[:-1], 3) == ["Hello"] * 3
    assert found[-1]["usage"]["completion_tokens"] == 3 * 2
    assert "prompt_token_ids" in found[0]
    assert all("prompt_token_ids" not in chunk for chunk in found[1:])
    counts = [0, 0, 0]
    for chunk in found[3:-1]:
        [choice] = chunk["choices"]
        counts[choice["index"]] += len(choice["token_ids"])
        assert chunk["usage"]["completion_tokens"] == counts[choice["index"]]


@pytest.mark.parametrize("top", [0, 2])
def test_logprobs(client: httpx.Client, top: int):
    body = {"messages": said("Hi ü"), "logprobs": True, "top_logprobs": top, "return_token_ids": True}
    [choice] = chat(client, **body)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    assert [len(entry["top_logprobs"]) for entry in content] == [top] * len(content)
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == "Hi ü"
    assert all(entry["bytes"] == list(entry["token"].encode()) for entry in content)
    if top:
        assert [other["logprob"] for other in content[0]["top_logprobs"]] == [-0.5, -1.0]
    found = stream(client, **body)
    streamed = [entry for chunk in found[1:] for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    ids = chat(client, **body, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in ids] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


def test_logprobs_of_named_tokens(client: httpx.Client):
    [choice] = chat(client, messages=said("Hi"), logprobs=True, logprob_token_ids=[40, 41, 42], return_token_ids=True)["choices"]
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert len(entry["top_logprobs"]) == len({40, 41, 42} - {token_id})


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def joined_calls(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for chunk in found:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", []) if chunk["choices"] else []:
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [(CALL, None, 1), (f"Look:\n{CALL}\n{CALL}", "Look:", 2), ("No call <here>", "No call <here>", 0)],
)
def test_tool_calls(client: httpx.Client, text: str, content: str | None, num_calls: int):
    body = {"messages": said(text), "tools": TOOLS}
    [choice] = chat(client, **body)["choices"]
    message = choice["message"]
    assert message["content"] == content
    calls = message.get("tool_calls", [])
    assert [call["function"] for call in calls] == [{"name": "weather", "arguments": '{"city": "Paris"}'}] * num_calls
    assert len({call["id"] for call in calls}) == num_calls
    assert choice["finish_reason"] == ("tool_calls" if num_calls else "stop")
    found = stream(client, **body)
    assert [call["function"] for call in joined_calls(found)] == [call["function"] for call in calls]
    assert texts(found) == [content or ""]
    assert found[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_tool_calls_are_left_alone_where_nobody_asked(client: httpx.Client):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        [choice] = chat(client, messages=said(CALL), **fields)["choices"]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
    [choice] = chat(client, messages=said(CALL + CALL), tools=TOOLS, parallel_tool_calls=False)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


def test_a_call_cut_short(client: httpx.Client):
    body = {"messages": said(CALL), "tools": TOOLS, "max_completion_tokens": 45}
    [choice] = chat(client, **body)["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert '{"city": "Paris"}'.startswith(call["function"]["arguments"])
    assert [call["function"] for call in joined_calls(stream(client, **body))] == [call["function"]]


def test_content_of_parts(client: httpx.Client):
    parts = [{"type": "text", "text": "SAY[Hel"}, "lo]YAS"]
    answer = chat(client, messages=[{"role": "user", "content": parts}], return_prompt_text=True)
    assert "SAY[Hel\nlo]YAS" in answer["prompt_text"]
    assert answer["choices"][0]["message"]["content"] == "Hel\nlo"
    answer = chat(client, messages=[{"role": "assistant", "content": None}, *said("x")], return_prompt_text=True)
    assert "<|im_start|>assistant\n<|im_end|>" in answer["prompt_text"]


def test_going_on_with_a_message(client: httpx.Client):
    messages = [*said("ignored"), {"role": "assistant", "content": "The answer is"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True, "max_tokens": 2}
    answer = chat(client, **body, return_prompt_text=True)
    assert answer["prompt_text"].endswith("assistant\nThe answer is")
    plain = answer["choices"][0]["message"]["content"]
    assert chat(client, **body, echo=True)["choices"][0]["message"]["content"] == "The answer is" + plain
    assert texts(stream(client, **body, echo=True)) == ["The answer is" + plain]


def test_max_tokens_is_all_that_fits_unless_given(client: httpx.Client, server: ServerThread):
    body = {"messages": [{"role": "user", "content": "word " * 70}], "ignore_eos": True}
    answer = chat(client, **body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == server.context.max_model_len
    assert chat(client, **body, max_tokens=3)["usage"]["completion_tokens"] == 3
    assert chat(client, **body, max_tokens=3, max_completion_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.fixture(scope="module")
def special() -> Iterator[httpx.Client]:
    """A server with a template, a role and a reasoning parser of its own."""
    template = (
        "{{ greeting }}{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
        "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    server = ServerThread(
        chat_template=template,
        response_role="model",
        reasoning_parser="qwen3",
        enable_auto_tool_choice=True,
        tool_call_parser="llama3_json",
        default_chat_template_kwargs={"greeting": "Good day. "},
        trust_request_chat_template=True,
        exclude_tools_when_tool_choice_none=True,
        enable_force_include_usage=True,
        enable_per_request_metrics=True,
        served_model_name=("toy", "alias"),
        sse_keep_alive_interval=30.0,
        return_tokens_as_token_ids=True,
    )
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client
    assert server.stop() == 0


def test_reasoning(special: httpx.Client):
    body = {"messages": said("<think>Let me see</think>Yes")}
    [choice] = chat(special, **body)["choices"]
    assert choice["message"] == {"role": "model", "content": "Yes", "refusal": None, "reasoning": "Let me see"}
    found = stream(special, **body)
    assert "".join(chunk["choices"][0]["delta"].get("reasoning", "") for chunk in found[:-1]) == "Let me see"
    assert texts(found) == ["Yes"]
    [choice] = chat(special, **body, include_reasoning=False)["choices"]
    assert choice["message"] == {"role": "model", "content": "Yes", "refusal": None}
    assert "reasoning" not in json.dumps(stream(special, **body, include_reasoning=False))


def test_templates_and_what_they_get(special: httpx.Client):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        *said("a"),
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
    ]
    body = {"messages": messages, "return_prompt_text": True, "max_tokens": 1}
    text = chat(special, **body, tools=TOOLS, reasoning_effort="low", documents=[{"text": "doc"}])["prompt_text"]
    assert text.startswith("Good day. <weather><|im_start|>assistant\nRome<|im_end|>")
    assert "SAY[a]YAS<|im_end|>\n<|im_start|>user\nb<|im_end|>\nlowdoc" in text
    assert "<weather>" not in chat(special, **body, tools=TOOLS, tool_choice="none")["prompt_text"]
    assert chat(special, **body, chat_template_kwargs={"greeting": "Hi!"})["prompt_text"].startswith("Hi!")
    assert chat(special, **body, chat_template="just {{ messages | length }}")["prompt_text"] == "just 3"


def test_llama_tool_calls(special: httpx.Client):
    body = {"messages": said('{"name": "weather", "parameters": {"city": "Rome"}}'), "tools": TOOLS}
    [choice] = chat(special, **body)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert joined_calls(stream(special, **body))[0]["function"]["arguments"] == '{"city": "Rome"}'


def test_options_of_the_server(special: httpx.Client):
    answer = chat(special, messages=said("Hi"), model="alias", logprobs=True)
    assert answer["model"] == "alias"
    assert set(answer["metrics"]) == {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms"}
    assert all(0 <= value < 10_000 for value in answer["metrics"].values())
    assert answer["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    assert "prompt_tokens_details" not in answer["usage"]
    found = stream(special, messages=said("Hi"))
    assert all("usage" in chunk for chunk in found)
    assert "metrics" in found[-1]
    assert [card["id"] for card in special.get("/v1/models").json()["data"]] == ["toy", "alias"]
    assert special.get("/v1/models/alias").json()["id"] == "alias"
