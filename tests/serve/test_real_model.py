"""The demo model, served as a user would, to the openai client."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FLAGS = (
    "--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "4", "--max-model-len", "512", "--max-num-batched-tokens", "64",
    "--compile-sizes", "16",
    "--num-gpu-blocks-override", "129", "--no-use-tqdm-on-load", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--no-background-compilation",
)  # fmt: skip


@pytest.fixture(scope="module")
def url(pytestconfig: pytest.Config) -> Iterator[str]:
    cache = pytestconfig.cache
    assert cache is not None
    command = [sys.executable, "-m", "jaxllm.serve", *FLAGS, "--compilation-cache-dir", str(cache.mkdir("compiled"))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        log: list[str] = []
        reader = threading.Thread(target=lambda: log.extend(server.stderr or ()))
        reader.start()
        phases = []
        address = None
        for line in server.stdout:
            phases.append(line.split()[0])
            if match := re.search(r"serving smollm2-135m-instruct on (\S+)", line):
                address = match[1]
                break
        assert address is not None, "".join(log)
        assert phases == ["configuration", "tokenizer", "engine", "front", "ready", "serving"]
        yield address
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
        reader.join(10)
        assert "weights and first programs: " in "".join(log)
        assert "Traceback" not in "".join(log)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    [model] = client.models.list().data
    assert model.id == "smollm2-135m-instruct"
    assert client.models.retrieve(model.id).id == model.id
    return model.id


def test_chat(client: openai.OpenAI, model: str):
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    [choice] = answer.choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    found = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices)
    assert text == choice.message.content
    assert found[-1].usage == answer.usage


def test_chat_with_curl(url: str):
    """What the documentation shows, byte for byte a stream."""
    body = json.dumps({"messages": QUESTION, "stream": True, "temperature": 0}).encode()
    response = httpx.post(url + "/v1/chat/completions", content=body, headers={"content-type": "application/json"}, timeout=60)
    assert "Paris" in response.text
    assert response.text.endswith("data: [DONE]\n\n")


def test_completions(client: openai.OpenAI, model: str):
    prompts = ["The capital of France is", "The capital of Italy is"]
    answer = client.completions.create(model=model, prompt=prompts, max_tokens=4, temperature=0, logprobs=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for prompt, city, choice in zip(prompts, ("Paris", "Rome"), answer.choices, strict=True):
        assert choice.text.startswith(prompt)
        assert city in choice.text
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs[0] is None
        assert all(-30 < logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])
        # At temperature 0 the token that was taken is the most probable one.
        assert max(choice.logprobs.top_logprobs[-1].values()) == choice.logprobs.token_logprobs[-1]
    stream = client.completions.create(model=model, prompt=prompts, max_tokens=4, temperature=0, echo=True, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_logprobs(client: openai.OpenAI, model: str):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert bytes(entry.bytes).decode() == entry.token


def test_seeds(client: openai.OpenAI, model: str):
    def text(seed: int) -> str:
        answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=1.5, max_tokens=12, seed=seed)
        return answer.choices[0].message.content

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_tools(client: openai.OpenAI, model: str):
    """The demo model calls none; what a client sends back after a call is understood all the same."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=3)
    assert 1 <= answer.usage.completion_tokens <= 3


def test_responses(client: openai.OpenAI, model: str):
    answer = client.responses.create(model=model, input="What is the capital of France?", temperature=0)
    assert "Paris" in answer.output_text
    with client.responses.stream(model=model, input="What is the capital of France?", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == answer.output_text == stream.get_final_response().output_text


def test_asynchronous_client(url: str, model: str):
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> str:
                stream = await client.completions.create(
                    model=model, prompt=f"{i} + {i} =", max_tokens=6, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            async def whole(i: int) -> str:
                answer = await client.completions.create(model=model, prompt=f"{i} + {i} =", max_tokens=6, temperature=0)
                return answer.choices[0].text

            streamed = await asyncio.gather(*(one(i) for i in range(6)))
            assert streamed == await asyncio.gather(*(whole(i) for i in range(6)))

    asyncio.run(run())


def test_metrics(client: openai.OpenAI, model: str, url: str):
    def counters() -> dict[str, float]:
        lines = httpx.get(url + "/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def named(found: dict[str, float], name: str) -> float:
        return sum(value for key, value in found.items() if key.startswith(f"jaxllm:{name}{{"))

    before = counters()
    client.completions.create(model=model, prompt=[1, 2, 3, 4, 5], max_tokens=4, temperature=0, extra_body={"ignore_eos": True})
    after = counters()
    assert named(after, "compiles_after_warm_up_total") == 0
    assert named(after, "generation_tokens_total") - named(before, "generation_tokens_total") == 4
    # One step of five tokens in a bucket of 16, and three of one row, for which there is a bucket.
    assert named(after, "padding_tokens_total") - named(before, "padding_tokens_total") == 11
    stages = [key for key in after if key.startswith("jaxllm:step_time_seconds_total{")]
    assert len(stages) == 4
    assert all(after[key] > before[key] for key in stages)


def test_errors(client: openai.OpenAI, model: str):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=QUESTION)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "BadRequestError")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt="word " * 600)
    assert long.value.param == "input_tokens"
