"""The server as a process: how it starts, stops and dies. Nothing that it started outlives it."""

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Process:
    """A server in a process of its own, over the toy engine."""

    def __init__(self, *argv: str) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, HERE.parent / "engine")))}
        self.popen = subprocess.Popen(
            [sys.executable, str(HERE / "toy_server.py"), *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,  # a signal for the tests is none for the server
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.out: list[str] = []
        self.err: list[str] = []
        self.readers = [threading.Thread(target=self._read_out), threading.Thread(target=self._read_err)]
        for reader in self.readers:
            reader.start()

    def _read_out(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.out.append(line)
            self.lines.put(line)

    def _read_err(self) -> None:
        assert self.popen.stderr is not None
        self.err += list(self.popen.stderr)

    def wait_until_ready(self) -> str:
        """The address."""
        while True:
            line = self.lines.get(timeout=60)
            if match := re.search(r"serving toy on (\S+)", line):
                return match[1]

    def engine(self) -> psutil.Process:
        [child] = psutil.Process(self.popen.pid).children()
        return child

    def wait(self, timeout: float = 30) -> int:
        code = self.popen.wait(timeout)
        for reader in self.readers:
            reader.join(10)
        for pipe in (self.popen.stdout, self.popen.stderr):
            assert pipe is not None
            pipe.close()
        return code


@contextlib.contextmanager
def started(*argv: str) -> Iterator[Process]:
    process = Process(*argv)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.wait()


def stream_of(url: str, max_tokens: int = 400) -> socket.socket:
    """A stream of which the first chunk has come."""
    where = urlsplit(url)
    sock = socket.create_connection((where.hostname, where.port), timeout=30)
    body = json.dumps({"prompt": [70, 71], "max_tokens": max_tokens, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    sock.sendall(head % len(body) + body)
    read = b""
    while b"data: " not in read:
        read += sock.recv(4096)
    return sock


def rest_of(sock: socket.socket) -> bytes:
    read = b""
    with contextlib.suppress(ConnectionResetError):
        while not read.endswith(b"\r\n0\r\n\r\n") and (data := sock.recv(65536)):
            read += data
    sock.close()
    return read


def test_start_and_stop():
    with started("--slow") as server:
        url = server.wait_until_ready()
        assert re.fullmatch(r"engine +\d+\.\d s\n", server.out[0])
        assert re.fullmatch(r"front end +\d+\.\d s\n", server.out[1])
        assert re.fullmatch(r"ready after +\d+\.\d s\n", server.out[2])
        engine = server.engine()
        sock = stream_of(url)
        server.popen.send_signal(signal.SIGTERM)
        read = rest_of(sock)
        assert server.wait() == 0
        assert b'"finish_reason":"abort"' in read
        assert b"data: [DONE]" in read
        assert not engine.is_running()
        assert "Traceback" not in "".join(server.err)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")


def test_interrupt_drains_too_and_a_second_one_does_not_wait():
    with started("--slow", "--shutdown-timeout", "60") as server:
        url = server.wait_until_ready()
        engine = server.engine()
        short, long = stream_of(url, max_tokens=20), stream_of(url, max_tokens=500)
        server.popen.send_signal(signal.SIGINT)
        read = rest_of(short)
        assert b'"finish_reason":"length"' in read
        assert server.popen.poll() is None
        start = time.monotonic()
        server.popen.send_signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT
        assert time.monotonic() - start < 5
        rest_of(long)
        assert not engine.is_running()


def test_the_engine_is_killed():
    with started("--slow") as server:
        url = server.wait_until_ready()
        sock = stream_of(url)
        with httpx.Client(base_url=url) as client:
            assert client.get("/health").status_code == 200
            server.engine().kill()
            read = rest_of(sock)
            # It still answers for a moment.
            assert client.get("/health").status_code == 503
            response = client.post("/v1/completions", json={"prompt": [70]})
            assert response.status_code in (500, 503)
        assert b'data: {"error": {"message": "The engine has died' in read
        assert b"data: [DONE]" in read
        assert server.wait() == 1
        log = "".join(server.err)
        assert "the engine has died: the engine core's process was killed by SIGKILL" in log


def test_the_server_is_killed():
    with started() as server:
        server.wait_until_ready()
        engine = server.engine()
        server.popen.kill()
        assert server.wait() == -signal.SIGKILL
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.wait(10)
        assert not engine.is_running()


def test_a_port_in_use_is_said_before_the_engine_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started("--port", str(port)) as server:
            assert server.wait() == 2
            assert server.out == []
            assert f"jaxllm.serve: error: cannot listen on 127.0.0.1:{port}: Address already in use" in "".join(server.err)


def test_stopped_while_it_starts():
    with started("--host", "127.0.0.1") as server:
        deadline = time.monotonic() + 60
        while not psutil.Process(server.popen.pid).children():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        engine = server.engine()
        server.popen.send_signal(signal.SIGTERM)
        code = server.wait()
        # 0 if it was ready by then.
        assert code in (0, 128 + signal.SIGINT)
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.wait(10)
        assert not engine.is_running()


def test_unix_socket(tmp_path: Path):
    path = tmp_path / "serve.sock"
    with started("--uds", str(path)) as server:
        assert server.wait_until_ready() == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
            assert client.get("/health").status_code == 200
            body = {"prompt": [70], "max_tokens": 2}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 2
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not path.exists()


def test_logs():
    with started("--enable-log-requests", "--enable-log-outputs", "--max-log-len", "20", "--trust-remote-code") as server:
        url = server.wait_until_ready()
        message = {"role": "user", "content": "SAY[a secret that is longer than twenty characters]YAS"}
        for stream in (False, True):
            body = {"messages": [message], "request_id": "mine", "stream": stream}
            assert httpx.post(url + "/v1/chat/completions", json=body).status_code == 200
        assert httpx.post(url + "/v1/completions", json={"prompt": "Hello", "temperature": -1}).status_code == 400
        httpx.get(url + "/health")
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        log = "".join(server.err)
        assert "WARNING jaxllm.serve.cli: --trust-remote-code has no effect: no code of a model is ever run" in log
        assert (
            len(re.findall(r"request chatcmpl-mine: \d+ prompt tokens, '<\|im_start\|>user\\nSAY', SamplingParams\(", log)) == 2
        )
        assert log.count("response chatcmpl-mine, choice 0: 'a secret that is lon', finish reason stop") == 2
        assert '"POST /v1/completions HTTP/1.1" 400' in log
        assert "/health" not in log
        assert "twenty characters" not in log


@pytest.mark.parametrize(("flag", "code"), [("--broken", 1), ("--impossible", 2)])
def test_an_engine_that_does_not_start(flag: str, code: int):
    with started(flag) as server:
        assert server.wait() == code
        error = [line for line in server.err if line.startswith("jaxllm.serve: error: ")]
        assert len(error) == 1
        assert "the device is on fire" in error[0]
        assert not any("serving" in line for line in server.out)
