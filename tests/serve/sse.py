"""Server-sent events, read as a browser reads them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
from pydantic import TypeAdapter

from jaxllm.serve.protocol.chat import ChatCompletionChunk
from jaxllm.serve.protocol.completion import CompletionResponse

CHAT_CHUNK = TypeAdapter(ChatCompletionChunk)
COMPLETION_CHUNK = TypeAdapter(CompletionResponse)


def events(body: str) -> Iterator[tuple[str | None, str]]:
    """(name, data) of each event; every one ends with an empty line."""
    assert body.endswith("\n\n"), body[-200:]
    for block in body[:-2].split("\n\n"):
        name, data = None, []
        for line in block.split("\n"):
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                data.append(value)
            else:
                assert line.startswith(":"), line
        if data:
            yield name, "\n".join(data)


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream of completions or chat completions, each checked against its type."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    data = [data for _, data in events(response.text)]
    assert data[-1] == "[DONE]"
    found = [json.loads(one) for one in data[:-1]]
    for chunk in found:
        if "error" not in chunk:
            (CHAT_CHUNK if chunk["object"] == "chat.completion.chunk" else COMPLETION_CHUNK).validate_python(chunk, strict=True)
    return found


def texts(found: list[dict[str, Any]], n: int = 1) -> list[str]:
    """The text of each choice."""
    result = [""] * n
    for chunk in found:
        for choice in chunk["choices"]:
            result[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return result
