"""Several API servers before two engines: whichever process dies, nothing hangs and nothing is left."""

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from test_lifecycle import Process, rest_of, started, stream_of

from jaxllm.engine.metrics import Counter, Gauge, Histogram
from jaxllm.serve.shared_metrics import SharedMetrics, merge

pytestmark = pytest.mark.timeout(120)


def children(process: Process) -> dict[str, psutil.Process]:
    """By name: engine-core-0, coordinator, api-server-1, …"""
    found = {}
    for child in psutil.Process(process.popen.pid).children():
        try:
            name = "".join(child.cmdline()[-1:])  # empty once it has ended
        except psutil.Error:
            continue
        if name.startswith("jaxllm-"):
            found[name.removeprefix("jaxllm-")] = child
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited 30 s for {what}"
        time.sleep(0.05)


def total(url: str, name: str) -> float:
    page = httpx.get(url + "/metrics", headers={"connection": "close"}).text
    return sum(float(value) for value in re.findall(rf"^jaxllm:{name}{{.*}} (\S+)$", page, re.MULTILINE))


def complete(url: str) -> int:
    """On a connection of its own, which any server may accept."""
    body = {"prompt": [70, 71], "max_tokens": 4}
    return httpx.post(url + "/v1/completions", json=body, headers={"connection": "close"}, timeout=30).status_code


def server_of(process: Process, sock_port: int) -> str:
    """Which server has accepted a connection from this port of a client."""
    for name, child in children(process).items():
        if any(one.raddr and one.raddr.port == sock_port for one in child.net_connections("tcp")):
            return name
    raise AssertionError(f"nobody has accepted the connection from port {sock_port}")


def test_servers_and_engines() -> None:
    with started("--slow", "--api-server-count", "2", "--data-parallel-size", "2", "--data-parallel-restart") as process:
        url = process.wait_until_ready()
        names = {"engine-core-0", "engine-core-1", "coordinator", "api-server-0", "api-server-1"}
        everyone = children(process)
        assert everyone.keys() == names
        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(lambda _: complete(url), range(24))) == {200}
        # Whoever is asked, the page tells of both.
        until(lambda: total(url, "generation_tokens_total") == 96, "all tokens to be counted")
        assert total(url, "request_success_total") == 24

        # One server dies amid streams: those of the other go on, its own requests do not stay in the engines.
        socks = [stream_of(url, 200) for _ in range(8)]
        owners = [server_of(process, sock.getsockname()[1]) for sock in socks]
        assert total(url, "num_requests_running") == 8
        victim = owners[0]
        everyone[victim].kill()
        for sock, owner in zip(socks, owners, strict=True):
            assert (b"[DONE]" in rest_of(sock)) == (owner != victim)
        until(lambda: total(url, "num_requests_running") == 0, "the requests to end")
        until(lambda: children(process).keys() == names, "another server")
        with ThreadPoolExecutor(8) as threads:
            until(lambda: set(threads.map(lambda _: complete(url), range(16))) == {200}, "it to serve")

        # An engine dies, and comes back for both servers.
        first = children(process)["engine-core-1"]
        first.kill()
        until(lambda: children(process).get("engine-core-1", first) != first, "another engine")
        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(lambda _: complete(url), range(16))) == {200}

        everyone = children(process)
        os.kill(process.popen.pid, signal.SIGTERM)
        assert process.wait() == 0
        assert not any(child.is_running() for child in everyone.values())
        assert f"API server {victim[-1]} was killed by SIGKILL; it is started again" in "".join(process.err)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_front_end_of_two_engines_ends(signal_number: int) -> None:
    """Under load, and the folders of its sockets go too."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        with started("--slow", "--data-parallel-size", "2") as process:
            url = process.wait_until_ready()
            everyone = children(process)
            assert everyone.keys() == {"engine-core-0", "engine-core-1", "coordinator"}
            bad = httpx.post(url + "/v1/completions", json={"prompt": [70]}, headers={"X-data-parallel-rank": "2"})
            assert (bad.status_code, "data_parallel_rank must be in [0, 1], got 2" in bad.text) == (400, True)
            socks = [stream_of(url, 400) for _ in range(4)]
            os.kill(process.popen.pid, signal_number)
            for sock in socks:
                rest = rest_of(sock)
                assert (b'"finish_reason":"abort"' in rest) == (signal_number == signal.SIGTERM)
            assert process.wait() == (-signal.SIGKILL if signal_number == signal.SIGKILL else 0)
            until(lambda: not any(child.is_running() for child in everyone.values()), "all to end")
            until(lambda: not os.listdir(folder), "the folders to go")


@pytest.mark.slow
def test_first_process_is_killed() -> None:
    with started("--slow", "--api-server-count", "2", "--data-parallel-size", "2") as process:
        url = process.wait_until_ready()
        everyone = children(process)
        sock = stream_of(url, 400)
        process.popen.kill()
        assert b"[DONE]" not in rest_of(sock)
        until(lambda: not any(child.is_running() for child in everyone.values()), "all to end")


@pytest.mark.slow
def test_engines_die() -> None:
    with started("--slow", "--api-server-count", "2") as process:
        url = process.wait_until_ready()
        everyone = children(process)
        sock = stream_of(url, 400)
        everyone["engine-core-0"].kill()
        assert b"The engine of this request has died: engine core 0's process ended" in rest_of(sock)
        assert process.wait() == 1
        assert not any(child.is_running() for child in everyone.values())


@pytest.mark.slow
def test_start_that_fails() -> None:
    with started("--impossible", "--api-server-count", "2") as process:
        assert process.wait() == 2
    assert "jaxllm.serve: error:" in "".join(process.err)


def test_merge() -> None:
    def page(count: int, load: float, observed: list[float], route: str) -> list[Counter | Gauge | Histogram]:
        histogram = Histogram("jaxllm:h", "H.", [1.0, 2.0])
        histogram.observe(observed)
        return [
            Counter("jaxllm:c", "C.", count, {"engine": "0"}),
            Counter("jaxllm:r", "R.", 1, {"route": route}),
            Gauge("jaxllm:num_requests_running", "G.", load),
            Gauge("jaxllm:server_load", "L.", load),
            histogram,
        ]

    first = page(3, 5.0, [0.5, 3.0], "/a")
    merged = merge([first, page(4, 7.0, [1.5], "/b")])
    assert [(metric.name, metric.labels) for metric in merged] == [
        ("jaxllm:c", {"engine": "0"}),
        ("jaxllm:r", {"route": "/a"}),
        ("jaxllm:r", {"route": "/b"}),
        ("jaxllm:num_requests_running", {}),
        ("jaxllm:server_load", {}),
        ("jaxllm:h", {}),
    ]
    assert [metric.value for metric in merged[:5] if not isinstance(metric, Histogram)] == [7, 1, 1, 5.0, 12.0]
    assert isinstance(merged[5], Histogram)
    assert (merged[5].counts, merged[5].sum) == ([1, 1, 1], 5.0)
    assert first == page(3, 5.0, [0.5, 3.0], "/a")


def test_shared_pages(tmp_path: Path) -> None:
    servers = [SharedMetrics(str(tmp_path), index, 2) for index in range(2)]
    assert [metric.value for metric in servers[0].merged([Counter("c", "C.", 2)])] == [2]  # the other has not begun
    assert [metric.value for metric in servers[1].merged([Counter("c", "C.", 5)])] == [7]
    servers[0].publish([Counter("c", "C.", 3)])
    assert [metric.value for metric in servers[1].merged([Counter("c", "C.", 5)])] == [8]
