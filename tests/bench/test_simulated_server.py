"""The simulator against the real server, over HTTP, on this machine. Needs all of it: nothing else may run meanwhile."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

MODEL = "smollm2-135m-instruct"
# The number of blocks is part of the compiled programs, which the second engine then finds in the cache.
LIMITS = (
    "--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--max-model-len", "1024", "--num-gpu-blocks-override", "513",
)  # fmt: skip
TRAFFIC = (
    "--requests 30 --request-rate 0.6 --input-len 128 --output-len 48 --num-prefixes 4 --prefix-len 32 --model-shape smollm2-135m"
)
FIGURES = (
    "output_throughput", "mean_concurrent_requests", "mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms",
    "mean_itl_ms", "mean_e2el_ms", "median_e2el_ms", "p90_e2el_ms",
)  # fmt: skip


def bench(*flags: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "jaxllm.bench", *flags], check=True, timeout=400, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 300
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.2)


@pytest.mark.slow
def test_a_real_run_is_reproduced_within_15_percent(tmp_path: Path):
    steps, trace, simulated = (str(tmp_path / name) for name in ("steps.json", "trace.jsonl", "simulated.json"))
    bench("measure-steps", "--model", MODEL, *LIMITS, "--output-json", steps)
    percentiles = ("--metric-percentiles", "50,90,99")
    bench("simulate", *TRAFFIC.split(), "--write-trace", trace)
    port = str(free_port())
    with subprocess.Popen(
        [sys.executable, "-m", "jaxllm.serve", "--model", MODEL, *LIMITS, "--port", port, "--no-background-compilation"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as server:
        try:
            wait_for(f"http://127.0.0.1:{port}/health")
            serve = ("serve", "--port", port, "--num-warmups", "2", "--no-plot", "--disable-tqdm", "--result-dir", str(tmp_path))
            # Memory that nobody has used yet is slower the first time: all blocks of the cache are written once.
            bench(
                *serve, "--dataset-name", "random", "--random-input-len", "256", "--random-output-len", "8",
                "--num-prompts", "64", "--max-concurrency", "4", "--no-save-result",
            )  # fmt: skip
            bench(
                *serve, "--dataset-name", "timed_trace", "--dataset-path", trace, "--num-prompts", "30",
                "--result-filename", "real.json", *percentiles,
            )  # fmt: skip
        finally:
            server.terminate()
    bench("simulate", "--step-table", steps, "--trace", trace, *percentiles, "--output-json", simulated)
    made, real = (json.loads(Path(path).read_text()) for path in (simulated, tmp_path / "real.json"))
    ratios = {name: made[name] / real[name] for name in FIGURES}
    for name, ratio in ratios.items():
        print(f"{name:<28} real {real[name]:9.2f}  simulated {made[name]:9.2f}  ratio {ratio:.3f}")
    assert {name: ratio for name, ratio in ratios.items() if not 0.85 <= ratio <= 1.15} == {}
