"""/v1/responses."""

import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from sse import events
from toy_server import ServerThread

EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def respond(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    return response.json()


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    response = client.post("/v1/responses", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    found = []
    for number, (name, data) in enumerate(events(response.text)):
        event = json.loads(data)
        EVENT.validate_python(event)
        assert event["type"] == name
        assert event["sequence_number"] == number
        found.append(event)
    return found


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """What two runs have in common."""
    text = json.dumps({name: value for name, value in response.items() if name not in ("id", "created_at")})
    data = json.loads(text)
    for item in data["output"]:
        del item["id"]
        item.pop("call_id", None)
    data["usage"].pop("input_tokens_details")
    return data


def test_text(client: httpx.Client, server: ServerThread):
    answer = respond(client, input="SAY[Hello there]YAS", metadata={"a": "b"})
    assert text_of(answer) == "Hello there"
    assert (answer["status"], answer["object"], answer["error"]) == ("completed", "response", None)
    assert answer["id"].startswith("resp_")
    assert answer["metadata"] == {"a": "b"}
    [item] = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    usage = answer["usage"]
    assert usage["output_tokens"] == len(server.context.tokenizer("Hello there")["input_ids"]) + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_conversation(client: httpx.Client):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "SAY[Sunny]YAS"},
    ]
    assert text_of(respond(client, input=items, instructions="You are kind.")) == "Sunny"


def test_cut_short(client: httpx.Client):
    answer = respond(client, input="SAY[Hello there]YAS", max_output_tokens=1)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    last = stream(client, input="SAY[Hello there]YAS", max_output_tokens=1)[-1]
    assert last["type"] == "response.incomplete"


def test_stream(client: httpx.Client):
    found = stream(client, input="SAY[Hello there]YAS")
    names = [event["type"].removeprefix("response.") for event in found]
    deltas = names.count("output_text.delta")
    assert names == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta") == "Hello there"
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    whole = respond(client, input="SAY[Hello there]YAS")
    assert without_ids(found[-1]["response"]) == without_ids(whole)


def test_function_calls(client: httpx.Client):
    text = f"SAY[Look: {CALL}{CALL}]YAS"
    answer = respond(client, input=text, tools=TOOLS)
    assert [item["type"] for item in answer["output"]] == ["message", "function_call", "function_call"]
    assert text_of(answer) == "Look:"
    for item in answer["output"][1:]:
        assert (item["name"], item["arguments"]) == ("weather", '{"city": "Paris"}')
    assert answer["output"][1]["call_id"] != answer["output"][2]["call_id"]
    found = stream(client, input=text, tools=TOOLS)
    assert without_ids(found[-1]["response"]) == without_ids(answer)
    for position in (1, 2):
        arguments = [
            event["delta"]
            for event in found
            if event["type"] == "response.function_call_arguments.delta" and event["output_index"] == position
        ]
        assert "".join(arguments) == '{"city": "Paris"}'
    assert len(respond(client, input=text, tools=TOOLS, parallel_tool_calls=False)["output"]) == 2
    assert text_of(respond(client, input=text, tools=TOOLS, tool_choice="none")) == f"Look: {CALL}{CALL}"


def test_logprobs(client: httpx.Client):
    body = {"input": "SAY[Hi]YAS", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [item] = respond(client, **body)["output"]
    logprobs = item["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["H", "i", "<|im_end|>"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    found = stream(client, **body)
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == logprobs


def test_reasoning():
    server = ServerThread(reasoning_parser="deepseek_r1")
    try:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            answer = respond(client, input="SAY[Let me see</think>Yes]YAS", reasoning={"effort": "low"})
            assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
            assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me see"}]
            assert text_of(answer) == "Yes"
            num_tokens = len(server.context.tokenizer("Let me see")["input_ids"])
            assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": num_tokens}
            found = stream(client, input="SAY[Let me see</think>Yes]YAS")
            assert without_ids(found[-1]["response"])["output"] == without_ids(answer)["output"]
            assert [event["type"] for event in found].count("response.reasoning_text.done") == 1
    finally:
        assert server.stop() == 0
