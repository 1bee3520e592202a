"""Keys, limits, CORS, and the routes that generate nothing."""

import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from toy_server import ServerThread

BODY = {"prompt": [70, 71], "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx.Client]:
    server = ServerThread(
        api_key=("secret", "other-ü"), max_body_size=4096, allowed_origins=("https://a.example",), disable_fastapi_docs=True
    )
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client
    assert server.stop() == 0


def test_api_key(guarded: httpx.Client):
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Basic secret"},
                    {"authorization": "Bearer secret2"}, {"authorization": "Bearer"}):  # fmt: skip
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/nothing"), ("POST", "/scale")):
            response = guarded.request(method, path, headers=headers)
            assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
    for key in (b"secret", "other-ü".encode()):
        headers = {b"authorization": b"Bearer " + key}
        assert guarded.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        assert guarded.get("/v1/models", headers=headers).status_code == 200
    for path in ("/health", "/ping", "/version", "/metrics", "/load"):
        assert guarded.get(path).status_code == 200
    assert guarded.post("/tokenize", json={"prompt": "a"}).status_code == 200


def test_cors(guarded: httpx.Client):
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    response = guarded.options("/v1/completions", headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert guarded.options("/v1/completions", headers={**asked, "origin": "https://b.example"}).status_code == 400
    headers = {"authorization": "Bearer secret", "origin": "https://a.example"}
    response = guarded.post("/v1/completions", json=BODY, headers=headers)
    assert response.headers["access-control-allow-origin"] == "https://a.example"


def test_size_of_bodies(guarded: httpx.Client):
    headers = {"authorization": "Bearer secret", "content-type": "application/json"}
    fits = b'{"prompt": [70], "max_tokens": 1}'.ljust(4096)
    assert guarded.post("/v1/completions", content=fits, headers=headers).status_code == 200

    def in_pieces() -> Iterator[bytes]:  # without Content-Length
        yield fits
        yield b" "

    for content in (fits + b" ", in_pieces()):
        response = guarded.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 413
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("Content Too Large", 413) or error["type"] == "Request Entity Too Large"
        assert "4096" in error["message"]


def test_no_docs_and_no_dev_mode_unless_asked(guarded: httpx.Client, client: httpx.Client):
    for path in ("/docs", "/openapi.json", "/redoc", "/server_info"):
        assert guarded.get(path).status_code == 404
        assert client.get(path).status_code == 200
    for path in ("/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/abort_requests"):
        assert guarded.post(path).status_code == 404


def test_a_body_that_comes_byte_by_byte(server: ServerThread):
    where = urlsplit(server.url)
    body = b'{"prompt": [70, 71], "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head + b"content-length: %d\r\n\r\n" % len(body) + body:
            sock.sendall(bytes([byte]))
            time.sleep(0.0005)
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b'"text_completion"' in answer


def test_a_client_that_goes_amid_its_body(server: ServerThread, client: httpx.Client):
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), timeout=10) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
    deadline = time.monotonic() + 10
    while client.get("/load").json()["server_load"]:
        assert time.monotonic() < deadline


def test_models(client: httpx.Client):
    [card] = client.get("/v1/models").json()["data"]
    assert card.items() >= {"id": "toy", "object": "model", "root": "toy", "parent": None, "max_model_len": 512}.items()
    assert client.get("/v1/models/toy").json() == card


def test_health_and_version(client: httpx.Client, server: ServerThread):
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = client.request(method, path)
        assert (response.status_code, response.text) == (200, "")
    assert client.get("/version").json() == {"version": server.context.version}
    assert client.get("/load").json() == {"server_load": 0}


def test_tokenize(client: httpx.Client, server: ServerThread):
    tokenizer = server.context.tokenizer
    ids = tokenizer("Hello wörld")["input_ids"]
    answer = client.post("/tokenize", json={"prompt": "Hello wörld"}).json()
    assert answer == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    answer = client.post("/tokenize", json={"prompt": "Hello wörld", "return_token_strs": True, "model": "toy"}).json()
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello wörld"}
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert client.post("/tokenize", json={"prompt": "word " * 2000}).json()["count"] > 512
    messages = [{"role": "user", "content": "Hi"}]
    for fields, text in (
        ({}, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>user\nHi<|im_end|>\n"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<|im_start|>user\nHi"),
    ):
        tokens = client.post("/tokenize", json={"messages": messages, **fields}).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
        ("/tokenize", {"messages": messages, "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ):
        response = client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_control_of_the_engine(client: httpx.Client):
    prompt = {"prompt": list(range(70, 90)), "max_tokens": 1}

    def cached() -> int:
        return client.post("/v1/completions", json=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() == 16
    assert client.post("/reset_prefix_cache").status_code == 200
    assert (cached(), cached()) == (0, 16)

    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert client.post("/sleep?level=1").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/wake_up?tags=weights").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/wake_up").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert cached() == 0

    assert client.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    assert client.get("/is_paused").json() == {"is_paused": True}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=prompt, timeout=0.2)
    assert client.post("/resume").json() == {"status": "resumed"}
    assert client.get("/is_paused").json() == {"is_paused": False}
    assert cached() == 16

    info = client.get("/server_info").json()
    assert info["config"]["model"]["model"] == "toy"
    assert info["args"]["api_key"] == 0


def test_the_web_page(client: httpx.Client):
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert client.get("/index.html").text == page.text
    for name in re.findall(r'(?:src|href)="([^":]+)"', page.text):
        assert client.get(f"/{name}").status_code == 200, name
    assert "://" not in page.text.replace("http://www.w3.org", "")
    assert client.get("/nothing.js").status_code == 404
    assert client.post("/").status_code == 405


def test_behind_a_proxy_that_takes_a_prefix_away():
    server = ServerThread(root_path="/api", api_key=("secret",))
    try:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
            assert client.get("/health").status_code == 200
            assert client.get("/").status_code == 200
            assert client.get("/openapi.json").json()["servers"] == [{"url": "/api"}]
    finally:
        assert server.stop() == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl found to make a certificate with")
def test_https(tmp_path: Path):
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run([*command, *names], check=True, capture_output=True)
    server = ServerThread(ssl_keyfile=key, ssl_certfile=cert)
    try:
        assert server.url.startswith("https://")
        response = httpx.post(server.url + "/v1/completions", json=BODY, verify=ssl.create_default_context(cafile=cert))
        assert response.json()["usage"]["completion_tokens"] == 2
    finally:
        assert server.stop() == 0
