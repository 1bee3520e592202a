"""`python -m jaxllm.bench sweep`: the grid, the best point, the knee, and the servers it starts."""

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer, serving

from jaxllm.bench.cli import EXIT_TERMINATED, main
from jaxllm.bench.client import OpenAIClient
from jaxllm.bench.metrics import Objective
from jaxllm.bench.servers import free_port, running_server
from jaxllm.bench.sweep import Grid, add_sweep_args, best_point, find_knee, label_of, server_command, within

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "fake_openai.py"
MODEL = ["--model", "smollm2-135m-instruct"]
SMALL = ["--num-prompts", "6", "--input-len", "8", "--output-len", "4", "--disable-tqdm"]
PNG = b"\x89PNG\r\n\x1a\n"


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_sweep_args(parser)
    return parser.parse_args(flags)


def points(*values: tuple[float, float]) -> list[dict[str, Any]]:
    """(mean ITL, output throughput) of each."""
    return [
        {"mean_itl_ms": itl, "output_throughput": tokens, "completed": 1, "failed": 0, "within_slo": True}
        for itl, tokens in values
    ]


def test_the_knee_is_highest_above_the_diagonal() -> None:
    # Scaled: (0, 0), (0.1, 0.6), (0.4, 0.9), (1, 1): 0, 0.5, 0.5 - the first of two - and 0. A bit more at 0.1 decides.
    found = points((5, 100), (6, 161), (9, 190), (15, 200))
    assert find_knee(found) is found[1]
    # The order of the points does not matter, nor which of two has the lower ITL by chance.
    found = points((15, 200), (5.1, 100), (9, 170), (5.0, 190))
    assert find_knee(found) is found[3]


@pytest.mark.parametrize(
    "values",
    [
        [(5, 100), (6, 200)],  # too few
        [(5, 100), (10, 200), (15, 300)],  # no bend
        [(5, 100), (14, 150), (15, 300)],  # bends the other way
        [(5, 100), (5, 200), (5, 300)],  # not yet saturated
        [(5, 100), (6, 100), (7, 100)],
    ],
)
def test_no_knee(values: list[tuple[float, float]]) -> None:
    assert find_knee(points(*values)) is None


def test_the_best_point_is_within_the_objectives() -> None:
    found = points((5, 100), (6, 300), (9, 200))
    found[1]["within_slo"] = False
    assert best_point(found) is found[2]
    assert best_point([found[1]]) is None


def test_objectives_and_failures() -> None:
    point = {"completed": 5, "failed": 0, "p99_ttft_ms": 80.0, "mean_itl_ms": 10.0}
    assert within(point, [])
    assert within(point, [Objective.parse("ttft:80"), Objective.parse("mean_itl:10")])
    assert not within(point, [Objective.parse("ttft:80"), Objective.parse("mean_itl:9")])
    assert not within(point | {"failed": 1}, [])
    assert not within(point | {"completed": 0}, [])


def test_grids() -> None:
    grid = Grid(parse("--request-rate", "1,2.5,inf", "--max-concurrency", "4"))
    assert grid.engines() == [{"max_num_seqs": None, "max_num_batched_tokens": None}]
    assert grid.loads() == [{"request_rate": rate, "max_concurrency": 4} for rate in (1.0, 2.5, float("inf"))]
    assert (grid.varying, grid.starts_servers) == (["request_rate"], False)
    grid = Grid(parse("--max-num-seqs", "8,16", "--max-num-batched-tokens", "1k,2K"))
    assert [tuple(engine.values()) for engine in grid.engines()] == [(8, 1000), (8, 2048), (16, 1000), (16, 2048)]
    assert (grid.varying, grid.starts_servers) == (["max_num_seqs", "max_num_batched_tokens"], True)
    assert Grid(parse()).varying == ["request_rate"]
    assert Grid(parse("--serve-cmd", "x")).starts_servers


def test_labels() -> None:
    point = {"request_rate": 2.5, "max_concurrency": None, "max_num_seqs": 8}
    assert label_of(point, ["request_rate", "max_concurrency", "max_num_seqs"]) == "2.5, -, 8"


def test_commands() -> None:
    engine = {"max_num_seqs": 8, "max_num_batched_tokens": None}
    args = parse("--model", "m", "--serve-args", "--dtype float32")
    expected = ["-m", "jaxllm.serve", "--host", "127.0.0.1", "--port", "9", "--model", "m", "--max-num-seqs", "8"]
    assert server_command(args, engine, 9) == [sys.executable, *expected, "--dtype", "float32"]
    args = parse("--serve-cmd", "vllm serve 'my model' --port={port} --max-num-seqs {max_num_seqs}")
    assert server_command(args, engine, 9) == ["vllm", "serve", "my model", "--port=9", "--max-num-seqs", "8"]
    with pytest.raises(ValueError, match="the grid has no --max-num-batched-tokens"):
        server_command(parse("--serve-cmd", "x {max_num_batched_tokens}"), engine, 9)
    with pytest.raises(ValueError, match="--serve-args is for jaxllm"):
        server_command(parse("--serve-cmd", "x", "--serve-args", "y"), engine, 9)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer(ttft=0.002, itl=0.004, saturation=2)) as server:
        yield server


def test_a_sweep_of_a_running_server(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-concurrency", "1,2,6", "--slo", "mean_itl:60000", "p50_e2el:60000", "--result-dir", str(tmp_path)]
    assert main(["sweep", "--base-url", server.url, *MODEL, *SMALL, *flags, "--result-filename", "s.json"]) == 0
    result = json.loads((tmp_path / "s.json").read_text())
    assert [point["max_concurrency"] for point in result["points"]] == [1, 2, 6]
    assert [point["max_concurrent_requests"] for point in result["points"]] == [1, 2, 6]
    assert all(point["within_slo"] and "p50_e2el_ms" in point and "itls" not in point for point in result["points"])
    assert (result["axes"], result["slo"]) == (["max_concurrency"], flags[3:5])
    fastest = max(range(3), key=lambda i: result["points"][i]["output_throughput"])
    assert result["best"] == fastest
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)
    # No prompt twice, and no cache from one point to the next.
    assert len({body["prompt"] for _, _, body in server.seen}) == 18
    assert server.num_resets == 3
    out = capsys.readouterr().out
    assert any(line.startswith("max concurrency  ") and "out tok/s" in line for line in out.splitlines())
    assert "Best within mean_itl:60000 p50_e2el:60000: max_concurrency = " in out
    assert "\nKnee: " in out


def test_objectives_that_no_point_keeps(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--slo", "ttft:0", "--result-dir", str(tmp_path), "--no-plot"]
    assert main(["sweep", "--base-url", server.url, *MODEL, *SMALL, *flags]) == 1
    assert "Best within ttft:0: none" in capsys.readouterr().out
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_sweep_that_starts_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} --port {{port}} --max-num-seqs {{max_num_seqs}} --itl 0.02"
    flags = ["--serve-cmd", command, "--max-num-seqs", "1,3", "--result-dir", str(tmp_path), "--result-filename", "s.json"]
    assert main(["sweep", *MODEL, *SMALL, *flags, "--no-plot"]) == 0
    result = json.loads((tmp_path / "s.json").read_text())
    assert [point["max_num_seqs"] for point in result["points"]] == [1, 3]
    assert result["best"] == 1
    started = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("Starting")]
    for words in started:
        assert not answers(int(words[words.index("--port") + 1]))


def answers(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("code", "timeout", "message"),
    [
        ("import sys; print('no memory'); sys.exit(3)", 60, "ended with exit code 3:\nno memory"),
        ("import time; print('loading', flush=True); time.sleep(60)", 2, "does not answer after 2 s:\nloading"),
    ],
)
def test_servers_that_do_not_come_up(code: str, timeout: float, message: str) -> None:
    async def run() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        async with OpenAIClient(url) as client, running_server([sys.executable, "-c", code], client, timeout):
            raise AssertionError("it did not start")

    with pytest.raises(ValueError, match=message):
        asyncio.run(run())


def test_a_command_that_is_not_there() -> None:
    async def run() -> None:
        async with OpenAIClient("http://127.0.0.1:1") as client, running_server(["/nowhere/x"], client, timeout=1):
            raise AssertionError("it did not start")

    with pytest.raises(ValueError, match="cannot start /nowhere/x: No such file or directory"):
        asyncio.run(run())


def test_sigterm_ends_the_servers_too(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} --port {{port}} --itl 5"
    flags = ["--serve-cmd", command, "--result-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxllm.bench", "sweep", *MODEL, *SMALL, *flags],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    with process:
        words = process.stdout.readline().split()
        port = int(words[words.index("--port") + 1])
        give_up = time.monotonic() + 30
        while not answers(port):
            assert time.monotonic() < give_up
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == EXIT_TERMINATED
    assert not answers(port)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slo", "speed:1"], "an objective is such as p99_ttft:500"),
        (["--request-rate", "1,0"], "--request-rate must be above 0, got '1,0'"),
        (["--request-rate", "fast"], "--request-rate must be numbers"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--max-num-seqs", "8,x"], "--max-num-seqs: invalid integer 'x'"),
        (["--max-num-seqs", "8", "--base-url", "http://h"], "takes no --base-url"),
        (["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"], "one rate a point"),
        (["--plot", "x"], "must name a .png"),
    ],
)
def test_flags_that_are_wrong(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["sweep", *flags]) == 2
    assert message in capsys.readouterr().err
