"""A server whose engines are on two machines, by its flags: both are processes on 127.0.0.1."""

import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from test_api_servers import children, until
from test_lifecycle import Process, started
from toy_server import run_engines

from jaxllm.engine.coordinator import free_ports
from jaxllm.serve.cli import EXIT_FAILED, EXIT_USAGE, main

pytestmark = pytest.mark.timeout(120)


def engines(process: Process) -> list[str]:
    return sorted(name for name in children(process) if name.startswith("engine-core"))


def complete(url: str, rank: int) -> int:
    """On a connection of its own, which any API server may accept."""
    body = {"prompt": [70, rank], "max_tokens": 4}
    headers = {"x-data-parallel-rank": str(rank), "connection": "close"}
    return httpx.post(url + "/v1/completions", json=body, headers=headers, timeout=30).status_code


def machine_flags(size: int) -> tuple[str, ...]:
    port = str(free_ports("127.0.0.1", 1)[0])
    return ("-dp", str(size), "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port)


def test_server_and_headless_machine(capsys: pytest.CaptureFixture[str]) -> None:
    flags = machine_flags(3)
    with started("-dpl", "1", *flags) as server, started("--headless", "-dpl", "2", "-dpr", "1", *flags) as machine:
        url = server.wait_until_ready()
        assert engines(server) == ["engine-core-0"]
        assert engines(machine) == ["engine-core-1", "engine-core-2"]
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


@pytest.mark.slow
def test_several_api_servers() -> None:
    flags = machine_flags(2)
    several = ("--api-server-count", "2", "--data-parallel-restart")
    with started("-dpl", "1", *several, *flags) as server, started("--headless", "-dpr", "1", *flags) as machine:
        url = server.wait_until_ready()
        [engine] = psutil.Process(machine.popen.pid).children()
        with ThreadPoolExecutor(8) as threads:

            def all_answer() -> bool:
                return set(threads.map(complete, [url] * 16, [0, 1] * 8)) == {200}

            assert all_answer()
            engine.kill()
            until(lambda: engines(machine) == ["engine-core-1"] and engine not in children_of(machine), "another engine")
            until(all_answer, "both servers to find it")
            # Another API server finds it, too.
            children(server)["api-server-0"].kill()
            until(lambda: len(children(server)) == 4, "another API server")
            until(all_answer, "it to serve")
        [engine] = children_of(machine)
        server.popen.kill()
        assert machine.wait() == EXIT_FAILED
        assert not engine.is_running()
        assert "closed its connection" in "".join(machine.err)


def children_of(process: Process) -> list[psutil.Process]:
    return psutil.Process(process.popen.pid).children()


def test_server_that_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close()).start()
        port = listener.getsockname()[1]
        flags = ["--headless", "--data-parallel-rpc-port", str(port)]
        assert main(flags, run_engines=run_engines) == EXIT_FAILED
    assert f"jaxllm.serve: error: the front end at 127.0.0.1:{port} closed its connection" in capsys.readouterr().err
