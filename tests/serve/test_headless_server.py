"""A server whose engines are on two machines, by its flags: both are processes on 127.0.0.1."""

import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from test_lifecycle import Process, started
from toy_server import run_engines

from jaxllm.serve.cli import EXIT_FAILED, EXIT_USAGE, main

pytestmark = pytest.mark.timeout(120)


def engines(process: Process) -> list[str]:
    names = ["".join(child.cmdline()[-1:]) for child in psutil.Process(process.popen.pid).children()]
    return sorted(name for name in names if name.startswith("jaxllm-engine-core"))


def complete(url: str, rank: int) -> int:
    body = {"prompt": [70, rank], "max_tokens": 4}
    return httpx.post(url + "/v1/completions", json=body, headers={"x-data-parallel-rank": str(rank)}, timeout=30).status_code


def test_server_and_headless_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        flags = ("-dp", "3", "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(sock.getsockname()[1]))
    with started("-dpl", "1", *flags) as server, started("--headless", "-dpl", "2", "-dpr", "1", *flags) as machine:
        url = server.wait_until_ready()
        assert engines(server) == ["jaxllm-engine-core-0"]
        assert engines(machine) == ["jaxllm-engine-core-1", "jaxllm-engine-core-2"]
        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(complete, [url] * 6, [0, 1, 2] * 2)) == [200] * 6
        page = httpx.get(url + "/metrics").text
        counted = re.findall(r'^jaxllm:generation_tokens_total{.*engine="(\d)".*} (\S+)$', page, re.MULTILINE)
        assert {(engine, float(tokens)) for engine, tokens in counted} == {("0", 8.0), ("1", 8.0), ("2", 8.0)}

        # What does not fit is refused, and both sides say so.
        assert main(["--headless", "-dpl", "2", "-dpr", "1", *flags], run_engines=run_engines) == EXIT_USAGE
        why = "rank 1 is there already, on the machine at 127.0.0.1"
        assert f"jaxllm.serve: error: the front end refuses this machine: {why}" in capsys.readouterr().err
        server.popen.send_signal(signal.SIGTERM)
        assert (server.wait(), machine.wait()) == (0, 0)
        assert f"is refused: {why}" in "".join(server.err)


def test_server_that_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close()).start()
        port = listener.getsockname()[1]
        flags = ["--headless", "--data-parallel-rpc-port", str(port)]
        assert main(flags, run_engines=run_engines) == EXIT_FAILED
    assert f"jaxllm.serve: error: the front end at 127.0.0.1:{port} closed its connection" in capsys.readouterr().err
