"""`python -m jaxllm.bench serve`: flags, table, files and exit codes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer, serving

from jaxllm.bench import plots
from jaxllm.bench.cli import main
from jaxllm.bench.measure import DETAILS
from jaxllm.bench.servers import free_port

MODEL = ["--model", "smollm2-135m-instruct"]
SMALL = ["--num-prompts", "4", "--input-len", "8", "--output-len", "3", "--disable-tqdm"]
ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer(models=[{"id": "smollm2-135m-instruct", "root": "/nowhere"}])) as server:
        yield server


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return tmp_path


def bench(server: FakeServer, *flags: str) -> int:
    return main(["serve", "--base-url", server.url, *SMALL, *flags])


def test_table_result_and_plot(server: FakeServer, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, *MODEL, "--request-rate", "100", "--goodput", "ttft:60000", "--metadata", "gpu=none") == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "============ Serving Benchmark Result ============"
    rows = dict(row.rsplit(None, 1) for row in table if ":" in row)
    assert rows["Successful requests:"] == "4"
    assert rows["Failed requests:"] == "0"
    assert rows["Total input tokens:"] == "32"
    assert rows["Total generated tokens:"] == "12"
    assert rows["Request rate configured (RPS):"] == "100.00"
    for label in ("Mean TTFT (ms):", "P99 TPOT (ms):", "Median ITL (ms):", "P99 E2EL (ms):", "Request goodput (req/s):"):
        assert float(rows[label]) >= 0

    (path,) = here.glob("openai-100.0qps-smollm2-135m-instruct-*.json")
    result = json.loads(path.read_text())
    assert (rows["Result:"], rows["Plot:"]) == (path.name, path.with_suffix(".png").name)
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
    assert result["completed"] == 4
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (32, 12)
    assert result["request_throughput"] == pytest.approx(4 / result["duration"])
    assert result["request_goodput"] == result["request_throughput"]
    assert (result["request_rate"], result["burstiness"], result["max_concurrency"]) == (100.0, 1.0, None)
    assert (result["model_id"], result["tokenizer_id"], result["backend"], result["gpu"]) == (
        MODEL[1],
        MODEL[1],
        "openai",
        "none",
    )
    assert {"mean_ttft_ms", "std_tpot_ms", "median_itl_ms", "p99_e2el_ms", "date", "num_prompts", "label"} <= set(result)
    assert not set(DETAILS) & set(result)


def test_the_servers_first_model_is_taken(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder is not on this machine, so the tokenizer is found by the model's name."""
    server.models = [{"id": "smollm2-135m-instruct", "root": "/nowhere"}, {"id": "other"}]
    assert bench(server, "--no-save-result") == 0
    assert {body["model"] for _, _, body in server.seen} == {"smollm2-135m-instruct"}
    assert {body["ignore_eos"] for _, _, body in server.seen} == {True}
    assert "Result:" not in capsys.readouterr().out


def test_details_and_flags_of_requests(server: FakeServer, here: Path) -> None:
    flags = ["--backend", "openai-chat", "--save-detailed", "--result-filename", "r.json", "--result-dir", "out", "--no-plot"]
    flags += ["--temperature", "0.5", "--top-k", "7", "--extra-body", '{"user": "me"}', "--header", "x-team=blue"]
    flags += ["--served-model-name", "alias", "--num-warmups", "2", "--max-concurrency", "1", "--request-id-prefix", "run-"]
    flags += ["--request-rate", "1000", "--metric-percentiles", "50,90", "--percentile-metrics", "ttft", "--no-ignore-eos"]
    assert bench(server, *MODEL, *flags) == 0
    result = json.loads((here / "out" / "r.json").read_text())
    assert sorted(path.name for path in here.rglob("*")) == ["out", "r.json"]
    assert set(DETAILS) <= set(result)
    assert (result["input_lens"], result["output_lens"], result["errors"]) == ([8] * 4, [3] * 4, [""] * 4)
    assert result["generated_texts"] == [" alpha beta gamma"] * 4
    assert all(len(itls) == 2 for itls in result["itls"])
    assert {"p50_ttft_ms", "p90_ttft_ms", "p90_client_queue_time_ms", "p90_e2el_including_client_queue_ms"} <= set(result)
    assert "mean_itl_ms" not in result
    paths, headers, bodies = zip(*server.seen, strict=True)
    assert set(paths) == {"/v1/chat/completions"}
    assert [h["X-Request-ID"] for h in headers] == ["run-warmup-0", "run-warmup-1", "run-0", "run-1", "run-2", "run-3"]
    assert {h["x-team"] for h in headers} == {"blue"}
    for body in bodies:
        assert (body["model"], body["temperature"], body["top_k"], body["user"]) == ("alias", 0.5, 7, "me")
        assert "ignore_eos" not in body
    assert server.most_running == 1


def test_results_are_appended(server: FakeServer, here: Path) -> None:
    for _ in range(2):
        assert bench(server, *MODEL, "--append-result", "--result-filename", "all.jsonl", "--no-plot") == 0
    lines = (here / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [4, 4]


def test_failures_are_counted_and_told(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.broken_after = 1
    assert bench(server, *MODEL) == 1
    out = capsys.readouterr().out
    assert "4 failed: the fake engine died" in out
    assert "Successful requests:                     0" in out


def test_the_servers_own_counters(server: FakeServer, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = iter(
        [
            'vllm:prefix_cache_queries_total{engine="0"} 100\nvllm:prefix_cache_hits_total 10\n',
            'vllm:prefix_cache_queries_total{engine="0"} 140\nvllm:prefix_cache_hits_total 20\n',
        ]
    )
    server.metrics = lambda: next(texts)
    assert bench(server, *MODEL, "--result-filename", "r.json", "--no-plot") == 0
    assert json.loads((here / "r.json").read_text())["prefix_cache_hit_rate"] == 25.0
    assert "Prefix cache hit rate (%):               25.00" in capsys.readouterr().out


def test_probes_and_ramp(server: FakeServer, here: Path) -> None:
    server.ttft = 0.05
    ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "20", "--ramp-up-end-rps", "60"]
    assert bench(server, *MODEL, *ramp, "--probe-request-rate", "50", "--no-plot") == 0
    (path,) = here.glob("openai-ramp-up-linear-20qps-60qps-smollm2-135m-instruct-*.json")
    result = json.loads(path.read_text())
    assert (result["ramp_up_strategy"], result["ramp_up_start_rps"], result["ramp_up_end_rps"]) == ("linear", 20.0, 60.0)
    assert result["probe_completed"] >= 1
    assert result["probe_max_e2el_ms"] >= 50
    assert result["completed"] == 4


def test_a_timed_trace(server: FakeServer, here: Path) -> None:
    lines = [{"timestamp": t, "input_length": 5, "output_length": 2, "hash_ids": [1]} for t in (0, 150)]
    (here / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ["--dataset-name", "timed_trace", "--dataset-path", "trace.jsonl", "--timed-trace-sec-multiplier", "0.001"]
    command = ["serve", "--base-url", server.url, *MODEL, *flags, "--disable-tqdm", "--save-detailed", "--result-filename", "r"]
    begin = time.perf_counter()
    assert main([*command, "--no-plot"]) == 0
    first, second = json.loads((here / "r").read_text())["start_times"]
    assert begin <= first < second
    assert second - begin >= 0.15
    assert [len(body["prompt"]) for _, _, body in server.seen] == [5, 5]
    assert all(isinstance(token, int) for _, _, body in server.seen for token in body["prompt"])


def test_without_a_tokenizer(server: FakeServer, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.jsonl").write_text('{"prompt": "just three words"}\n')
    server.usage = False
    flags = ["--dataset-name", "custom", "--dataset-path", "mine.jsonl", "--skip-tokenizer-init", "--no-plot"]
    assert bench(server, *flags) == 0
    assert {body["prompt"] for _, _, body in server.seen} == {"just three words"}
    assert "Total generated tokens:                  12" in capsys.readouterr().out
    assert bench(server, "--skip-tokenizer-init") == 2
    assert "random needs a tokenizer" in capsys.readouterr().err


def test_custom_prompts_go_through_the_chat_template(server: FakeServer, here: Path) -> None:
    (here / "mine.jsonl").write_text('{"prompt": "Who?"}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", "mine.jsonl", "--no-save-result"]
    for more in ([], ["--custom-skip-chat-template"], ["--backend", "openai-chat"]):
        assert bench(server, *MODEL, *flags, *more) == 0
    prompts = [body.get("prompt") or body["messages"][0]["content"] for _, _, body in server.seen]
    assert "<|im_start|>user\nWho?<|im_end|>" in prompts[0]
    assert set(prompts[4:]) == {"Who?"}


def test_without_matplotlib(
    server: FakeServer, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    assert bench(server, *MODEL) == 0
    assert "Plot: none, since matplotlib is not installed (pip install 'jaxllm[bench]')" in capsys.readouterr().out
    assert bench(server, *MODEL, "--plot", "p.png") == 2
    assert "--plot p.png needs matplotlib" in capsys.readouterr().err
    assert len(server.seen) == 4  # nothing was measured in vain


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--request-rate", "0"], "--request-rate must be above 0, got 0.0"),
        (["--burstiness", "-1", "--request-rate", "1"], "--burstiness must be above 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1, got 0"),
        (["--num-warmups", "-1"], "--num-warmups must be at least 0"),
        (["--probe-request-rate", "inf"], "--probe-request-rate"),
        (["--goodput", "speed:1"], "unknown metric 'speed'"),
        (["--header", "novalue"], "--header takes KEY=VALUE, got 'novalue'"),
        (["--metadata", "=1"], "--metadata takes KEY=VALUE"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy"),
        (
            ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2", "--request-rate", "3"],
            "--ramp-up-strategy excludes --request-rate",
        ),
        (["--self-timed"], "--self-timed needs --dataset-name timed_trace"),
        (["--dataset-name", "timed_trace", "--backend", "openai-chat"], "need --backend openai, got openai-chat"),
        (["--append-result"], "--append-result needs --result-filename"),
        (["--plot", "picture"], "must name a .png"),
        (["--tokenizer", "/nowhere"], "no tokenizer found"),
        (["--result-filename", "missing/r.json", "--result-dir", "/proc"], "cannot make the directory /proc/missing"),
    ],
)
def test_flags_that_are_wrong(server: FakeServer, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert bench(server, *MODEL, *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1 or "WARNING" in error


def test_an_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--num-promts", "3"])
    assert "unknown argument '--num-promts'; did you mean '--num-prompts'?" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["serve", "--port", str(port), *MODEL, "--ready-check-timeout-sec", "0.1"]) == 2
    assert f"no server answers at http://127.0.0.1:{port} (Connection refused)" in capsys.readouterr().err


def test_a_server_without_models(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.models = []
    assert bench(server) == 2
    assert "lists no model; name one with --model" in capsys.readouterr().err


def test_the_load_client_never_imports_jax(server: FakeServer) -> None:
    code = (
        "import sys; from jaxllm.bench.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert 'jax' not in sys.modules and 'flax' not in sys.modules"
    )
    flags: list[Any] = ["serve", "--base-url", server.url, *SMALL, "--no-save-result"]
    subprocess.run([sys.executable, "-c", code, *flags], check=True, timeout=60, stdout=subprocess.DEVNULL, cwd=ROOT)


def test_the_overview() -> None:
    command = [sys.executable, "-m", "jaxllm.bench", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0
    for command in ("serve", "sweep", "throughput", "latency", "startup"):
        assert f"\n    {command}" in done.stdout
