"""The load client against a server whose answers are known."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_openai import FakeServer, serving
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.bench.client import EventParser, NoServerError, OpenAIClient, RequestOptions, is_output, request_body
from jaxllm.bench.datasets import SampleRequest
from jaxllm.bench.load import probing, run_load, warm_up
from jaxllm.bench.metrics import RequestRecord
from jaxllm.bench.servers import free_port

REQUEST = SampleRequest("one two three", prompt_len=99, output_len=5)
OPTIONS = RequestOptions("fake")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer()) as server:
        yield server


def ask(server: FakeServer, backend: Any = "openai", options: RequestOptions = OPTIONS, **kwargs: Any) -> RequestRecord:
    async def run() -> RequestRecord:
        async with OpenAIClient(server.url, backend, **kwargs) as client:
            return await client.send(REQUEST, options, "request-1")

    return asyncio.run(run())


EVENTS = [b'{"a": "\xc3\xa4\\n"}', b"[DONE]", b"x", b"two\nlines"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@given(data=st.data())
def test_events_however_they_are_cut(end: bytes, data: st.DataObject) -> None:
    lines = b": a comment\n\nevent: message\nid: 7\ndata: " + b"\n\n:\n\ndata:".join(
        event.replace(b"\n", b"\ndata: ") for event in EVENTS
    )
    stream = (lines + b"\n\n").replace(b"\n", end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    parser, found = EventParser(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += parser.feed(stream[start:stop])
    assert found == EVENTS
    assert parser.close() == []


def test_a_last_event_without_a_blank_line() -> None:
    parser = EventParser()
    assert parser.feed(b"data: one\n\ndata: two") == [b"one"]
    assert parser.close() == [b"two"]


@pytest.mark.parametrize(
    ("choice", "counts"),
    [
        ({"text": "word"}, True),
        ({"text": ""}, True),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"role": "assistant"}, "finish_reason": None}, False),
        ({"delta": {"role": "assistant", "content": "word"}}, True),
        ({"delta": {"role": "assistant", "content": "", "reasoning": "hm"}}, True),
        ({"delta": {"role": "assistant", "content": ""}, "token_ids": [5]}, True),
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": "stop"}, True),
        ({"delta": {"content": ""}}, True),
        ({"delta": {}, "finish_reason": "stop"}, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
    ],
)
def test_what_counts_as_output(choice: dict[str, Any], counts: bool) -> None:
    assert is_output(choice) is counts


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_stream(server: FakeServer, backend: str) -> None:
    server.ttft, server.itl = 0.05, 0.02
    record = ask(server, backend)
    assert record.success
    assert record.text == " alpha beta gamma delta epsilon"
    assert (record.prompt_len, record.output_len) == (3, 5)
    assert len(record.chunk_times) == 5
    # The chunk that only says who speaks comes at once, and does not count.
    assert record.ttft >= 0.049
    assert record.latency >= 0.05 + 4 * 0.02 - 0.001
    assert record.latency == pytest.approx(record.ttft + sum(record.itls))


def test_bodies() -> None:
    options = RequestOptions(
        "m", ignore_eos=True, logprobs=2, sampling={"temperature": 0.5}, extra_body={"top_k": 3, "stream": True}
    )
    common = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "top_k": 3}
    assert request_body("openai", REQUEST, options) == common | {
        "prompt": "one two three",
        "max_tokens": 5,
        "logprobs": 2,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
    }
    assert request_body("openai-chat", REQUEST, options) == common | {
        "messages": [{"role": "user", "content": "one two three"}],
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "ignore_eos": True,
    }
    plain = RequestOptions("m", ignore_eos=True, openai_fields_only=True)
    assert set(request_body("openai", REQUEST, plain)) == {"model", "stream", "stream_options", "prompt", "max_tokens"}
    with pytest.raises(ValueError, match="cannot send token ids"):
        request_body("openai-chat", SampleRequest([1, 2], 2, 1), OPTIONS)


def test_headers(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    ask(server, headers={"x-team": "blue"})
    ask(server, headers={"authorization": "Bearer other"})
    (path, first, body), (_, second, _) = server.seen
    assert (path, body["prompt"]) == ("/v1/completions", "one two three")
    assert (first["X-Request-ID"], first["x-team"], first["Authorization"]) == ("request-1", "blue", "Bearer secret")
    assert second["Authorization"] == "Bearer other"


def test_a_server_that_does_not_count(server: FakeServer) -> None:
    server.usage = False
    record = ask(server)
    assert record.success
    assert (record.prompt_len, record.output_len) == (99, None)


def test_a_stream_in_small_pieces(server: FakeServer) -> None:
    server.piece = 3
    assert ask(server).text == " alpha beta gamma delta epsilon"


def test_several_tokens_a_chunk(server: FakeServer) -> None:
    server.tokens_per_chunk = 2
    record = ask(server)
    assert (len(record.chunk_times), record.output_len) == (3, 5)


def test_a_refusal(server: FakeServer) -> None:
    server.status = 400
    record = ask(server)
    assert record.error == "HTTP 400 Bad Request: the fake server refuses"
    assert record.latency == 0.0


def test_an_error_amid_the_stream(server: FakeServer) -> None:
    server.broken_after = 2
    record = ask(server)
    assert record.error == "the fake engine died"
    assert len(record.chunk_times) == 2


def test_a_connection_that_breaks(server: FakeServer) -> None:
    server.drop_after = 2
    record = ask(server)
    assert not record.success
    assert len(record.chunk_times) == 2


def test_empty_texts_are_output_but_no_chunk_is_not(server: FakeServer) -> None:
    server.answer = ["", ""]
    record = ask(server)
    assert record.success
    assert (len(record.chunk_times), record.text) == (2, "")
    server.answer = []
    assert ask(server, "openai-chat").error == "the stream ended without any output"


def test_a_timeout(server: FakeServer) -> None:
    server.ttft = 5.0
    record = ask(server, timeout=0.2)
    assert record.error == "timed out"


def test_nobody_there() -> None:
    async def run() -> None:
        async with OpenAIClient(f"http://127.0.0.1:{free_port()}") as client:
            record = await client.send(REQUEST, OPTIONS, "r")
            assert record.error == "Connection refused"
            assert await client.get_text("/metrics") is None
            assert not await client.post("/reset_prefix_cache")
            await client.models()

    with pytest.raises(NoServerError, match=r"no server answers at http://127.0.0.1:\d+ \(Connection refused\); start one with"):
        asyncio.run(run())


def test_addresses() -> None:
    with pytest.raises(ValueError, match="--base-url must begin with http:// or https://, got 'localhost:8000'"):
        OpenAIClient("localhost:8000")
    assert OpenAIClient("http://h:1/", "openai-chat").url == "http://h:1/v1/chat/completions"
    assert OpenAIClient("http://h:1", endpoint="/other").url == "http://h:1/other"


def test_models(server: FakeServer) -> None:
    async def run(models: list[Any]) -> list[dict[str, Any]]:
        server.models = models
        async with OpenAIClient(server.url) as client:
            return await client.models()

    assert asyncio.run(run([{"id": "a"}, {"id": "b"}])) == [{"id": "a"}, {"id": "b"}]
    with pytest.raises(ValueError, match="is it an OpenAI server"):
        asyncio.run(run(["a"]))


def load(
    server: FakeServer, requests: list[SampleRequest], times: list[float], **kwargs: Any
) -> tuple[list[RequestRecord], float]:
    async def run() -> tuple[list[RequestRecord], float]:
        async with OpenAIClient(server.url) as client:
            return await run_load(client, requests, OPTIONS, times, **kwargs)

    return asyncio.run(run())


def test_requests_are_sent_at_their_times(server: FakeServer) -> None:
    requests = [SampleRequest("word " * (i + 1), 0, i + 1) for i in range(4)]
    done: list[None] = []
    begin = time.perf_counter()
    records, duration = load(server, requests, [0.1, 0.1, 0.2, 0.4], on_done=lambda: done.append(None))
    assert len(done) == 4
    # In the order of the requests, each with its own answer.
    assert [record.prompt_len for record in records] == [1, 2, 3, 4]
    assert [record.output_len for record in records] == [1, 2, 3, 4]
    assert all(record.start - begin >= due for record, due in zip(records, [0.1, 0.1, 0.2, 0.4], strict=True))
    # From the first send, not from the wait before it.
    assert records[3].start - records[0].start <= duration <= time.perf_counter() - begin - 0.1


def test_concurrency_is_kept_and_waiting_is_the_clients(server: FakeServer) -> None:
    server.ttft = 0.05
    records, _ = load(server, [REQUEST] * 6, [0.0] * 6, max_concurrency=2)
    assert server.most_running == 2
    assert all(record.success for record in records)
    waits = sorted(record.queue_time for record in records)
    assert waits[2] >= 0.05
    assert waits[4] >= 0.1


def test_without_a_limit_all_run_at_once(server: FakeServer) -> None:
    server.ttft = 0.2
    load(server, [REQUEST] * 150, [0.0] * 150)
    assert server.most_running == 150


def test_warm_up(server: FakeServer) -> None:
    async def run() -> None:
        async with OpenAIClient(server.url) as client:
            await warm_up(client, REQUEST, OPTIONS, 3, 1)

    asyncio.run(run())
    assert [headers["X-Request-ID"] for _, headers, _ in server.seen] == ["bench-warmup-0", "bench-warmup-1", "bench-warmup-2"]
    assert server.most_running == 1
    server.status = 503
    with pytest.raises(ValueError, match="a warm-up request failed: HTTP 503"):
        asyncio.run(run())


def test_probes(server: FakeServer) -> None:
    async def run() -> list[RequestRecord]:
        async with OpenAIClient(server.url) as client, probing(client, OPTIONS, 50.0) as records:
            await asyncio.sleep(0.3)
        return records

    records = asyncio.run(run())
    assert 2 <= len(records) <= 15
    assert all(record.output_len == 1 for record in records)
    assert {json.dumps(body["prompt"]) for _, _, body in server.seen} == {'"Hi"'}
