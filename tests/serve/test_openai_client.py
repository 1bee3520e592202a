"""The openai client's ways to call tools, with a model that calls them when told to."""

import asyncio
import json

import openai
import pytest
from toy_server import ServerThread

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
MESSAGES = [{"role": "user", "content": f"SAY[Let me see.{CALL}{CALL}]YAS"}]


def check(message: openai.types.chat.ChatCompletionMessage) -> None:
    assert message.content == "Let me see."
    assert message.tool_calls is not None
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("weather", {"city": "Paris"})
    ] * 2


def test_tools(server: ServerThread):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
        check(answer.choices[0].message)
        assert answer.choices[0].finish_reason == "tool_calls"
        # The client puts the chunks of a stream together itself.
        with client.chat.completions.stream(model="toy", messages=MESSAGES, tools=TOOLS) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        check(final.choices[0].message)
        assert final.choices[0].finish_reason == "tool_calls"
        # The next turn.
        messages = [*MESSAGES, answer.choices[0].message]
        for call in answer.choices[0].message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "SAY[It is sunny.]YAS"})
        answer = client.chat.completions.create(model="toy", messages=messages, tools=TOOLS)
        assert answer.choices[0].message.content == "It is sunny."


def test_tools_asynchronously(server: ServerThread):
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS) for _ in range(8))
            )
            for answer in answers:
                check(answer.choices[0].message)
            async with client.chat.completions.stream(model="toy", messages=MESSAGES, tools=TOOLS) as stream:
                final = await stream.get_final_completion()
            check(final.choices[0].message)

    asyncio.run(run())


def test_extra_fields(server: ServerThread):
    """What OpenAI's API has not comes in by extra_body, as for vLLM."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="toy", prompt=[70, 71], max_tokens=3, extra_body={"return_token_ids": True, "top_k": 1, "cache_salt": "x"}
        )
        assert len(answer.choices[0].token_ids) == 3
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="toy", prompt=[70], extra_body={"guided_regex": "a+"})
        assert caught.value.param == "guided_regex"
