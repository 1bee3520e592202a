"""Many streams, clients that go, clients that read slowly, and servers that stop amid all that."""

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from saying import SlowExecutor
from sse import chunks, texts
from toy_engine import expected_tokens
from toy_server import ServerThread

PROMPT = [70, 71, 72, 73, 74]


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerThread]:
    """20 ms a token."""
    server = ServerThread(SlowExecutor, dev_mode=True, config={"max_num_seqs": 256, "num_blocks": 8193, "max_logprobs": -1})
    yield server
    assert server.stop() == 0


def wait_until_idle(server: ServerThread) -> None:
    """Until the engine has no request and no block is in use."""
    deadline = time.monotonic() + 10
    while True:
        stats = server.call(server.engine.get_stats())
        if not (server.engine.num_unfinished_requests or stats.num_running_reqs or stats.num_waiting_reqs):
            break
        assert time.monotonic() < deadline, stats
        time.sleep(0.02)
    assert stats.kv_cache_usage == 0.0
    assert server.context.streams == set()
    assert server.call(server.engine.reset_prefix_cache())


def open_stream(server: ServerThread, **body) -> tuple[socket.socket, bytes]:
    """A stream of which the beginning has been read. A plain socket, to be closed when a test wants it."""
    where = urlsplit(server.url)
    sock = socket.socket()
    sock.settimeout(10)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((where.hostname, where.port))
    content = json.dumps({"prompt": PROMPT, "max_tokens": 400, "stream": True, **body}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    sock.sendall(head % len(content) + content)
    read = b""
    while b"data: " not in read:
        read += sock.recv(4096)
    return sock, read


def test_a_client_that_goes_ends_its_request(slow: ServerThread):
    for body in ({}, {"prompt": [PROMPT, [80]], "n": 2}):
        sock, _ = open_stream(slow, **body)
        assert slow.engine.num_unfinished_requests >= 1
        sock.close()
        wait_until_idle(slow)


def test_a_client_that_goes_before_its_answer(slow: ServerThread):
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 400}),
        ("/v1/completions", {"prompt": [PROMPT, [80]], "max_tokens": 400}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 400, "n": 2, "use_beam_search": True}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 400}),
    ):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(slow.url + path, json=body, timeout=0.3)
        wait_until_idle(slow)


def test_abort_by_id(slow: ServerThread):
    with httpx.Client(base_url=slow.url, timeout=30) as client:
        body = {"prompt": [PROMPT, [80]], "max_tokens": 400, "request_id": "victim", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            abort = {"request_ids": ["cmpl-victim", "cmpl-unknown"]}
            assert httpx.post(slow.url + "/abort_requests", json=abort).json() == {"aborted": 1}
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        reasons = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in rest[:-1]]
        assert reasons.count("abort") == 2
        assert httpx.post(slow.url + "/abort_requests", json={}).json() == {"aborted": 0}
    wait_until_idle(slow)


def test_many_streams_of_which_many_break_off(slow: ServerThread):
    rng = random.Random(0)

    async def one(client: httpx.AsyncClient, i: int) -> str | None:
        prompt, max_tokens, patience = [70 + i % 20, 3 + i, 90], rng.randint(2, 20), rng.choice([None, 0, 1, 3])
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "return_token_ids": True}
        ids: list[int] = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            num_lines = 0
            async for line in response.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                [choice] = json.loads(line[6:])["choices"]
                ids += choice["token_ids"]
                if num_lines == patience:
                    return None  # closes the connection
                num_lines += 1
        assert ids == expected_tokens(prompt, max_tokens)
        return "whole"

    async def all_of_them() -> list[str | None]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=slow.url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(one(client, i) for i in range(200)))

    results = asyncio.run(all_of_them())
    assert 20 < results.count("whole") < 150
    wait_until_idle(slow)


def test_a_slow_reader_loses_nothing_and_holds_nobody_up(slow: ServerThread):
    """Megabytes of log probabilities, into a socket that nobody reads until the engine is long done."""
    body = {"logprobs": -1, "return_tokens_as_token_ids": True, "max_tokens": 60, "n": 8, "return_token_ids": True}
    sock, read = open_stream(slow, **body)
    deadline = time.monotonic() + 20
    while slow.engine.num_unfinished_requests:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # Others are served meanwhile, while this one cannot be written out.
    assert httpx.post(slow.url + "/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200
    assert slow.context.num_open == 1
    while not read.endswith(b"\r\n0\r\n\r\n"):
        data = sock.recv(1 << 20)
        assert data
        read += data
    sock.close()
    _, _, content = read.partition(b"\r\n\r\n")
    lines = [line for line in _unchunked(content).split(b"\n\n") if line]
    assert lines[-1] == b"data: [DONE]"
    ids: list[list[int]] = [[] for _ in range(8)]
    for line in lines[:-1]:
        [choice] = json.loads(line[6:])["choices"]
        ids[choice["index"]] += choice["token_ids"]
    assert ids == [expected_tokens(PROMPT, 60)] * 8
    wait_until_idle(slow)


def _unchunked(body: bytes) -> bytes:
    result = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        result += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return result


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streamed_text_equals_the_other(server: ServerThread, path: str):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for seed in range(6):
            body = {"prompt": [70, 71, seed + 3], "max_tokens": 60 + seed, "n": 1 + seed % 2}
            if path.endswith("chat/completions"):
                body = {**body, "messages": [{"role": "user", "content": f"number {seed}"}], "prompt": None}
            whole = client.post(path, json=body).json()
            plain = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in whole["choices"]]
            found = chunks(client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}}))
            assert texts(found, body["n"]) == plain
            assert found[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_stopping_gives_open_requests_time():
    server = ServerThread(SlowExecutor, shutdown_timeout=20.0)
    outcome: list[str] = []

    def consume() -> None:
        body = {"prompt": PROMPT, "max_tokens": 25, "stream": True}
        outcome.append(texts(chunks(httpx.post(server.url + "/v1/completions", json=body, timeout=30)))[0])

    reader = threading.Thread(target=consume)
    reader.start()
    while not server.engine.num_unfinished_requests:
        time.sleep(0.01)
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < 10
    reader.join(10)
    assert outcome == [server.context.tokenizer.decode(expected_tokens(PROMPT, 25)).rstrip("\ufffd")]
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")


def test_stopping_aborts_what_is_left():
    server = ServerThread(SlowExecutor, shutdown_timeout=0.2)
    sock, read = open_stream(server)
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < 5
    while data := sock.recv(65536):
        read += data
    sock.close()
    assert b'"finish_reason":"abort"' in read
    assert read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_connection_that_stays_open_gets_503_while_the_server_stops(slow: ServerThread):
    with httpx.Client(base_url=slow.url, timeout=30) as client:
        slow.context.is_stopping = True
        try:
            response = client.post("/v1/completions", json={"prompt": PROMPT})
            assert (response.status_code, "retry-after" in response.headers) == (503, True)
        finally:
            slow.context.is_stopping = False


def test_keep_alive_comments():
    server = ServerThread(SlowExecutor, sse_keep_alive_interval=0.05)
    try:
        sock, read = open_stream(server, max_tokens=10)
        server.call(server.engine.pause_generation("keep", False))
        while b": keep-alive\n\n" not in read:
            read += sock.recv(4096)
        server.call(server.engine.resume_generation())
        while not read.endswith(b"\r\n0\r\n\r\n"):
            read += sock.recv(4096)
        sock.close()
        lines = [line for line in _unchunked(read.partition(b"\r\n\r\n")[2]).split(b"\n\n") if line]
        assert lines[-1] == b"data: [DONE]"
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1] if line.startswith(b"data: "))
        assert text == server.context.tokenizer.decode(expected_tokens(PROMPT, 10)).rstrip("\ufffd")
    finally:
        assert server.stop() == 0
