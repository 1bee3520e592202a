"""`throughput`, `latency` and `startup` with a tiny model of random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_configs import LAYER_1

from jaxllm.bench import startup
from jaxllm.bench.cli import main
from jaxllm.bench.offline import latency_result
from jaxllm.bench.startup import PHASES, engine_flags, start_once, startup_table


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> list[str]:
    """Flags of an engine that is quickly compiled."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(LAYER_1))
    assert pytestconfig.cache is not None
    return [
        *("--model", str(folder), "--load-format", "dummy", "--skip-tokenizer-init", "--no-use-tqdm-on-load"),
        *("--max-num-seqs", "1", "--max-num-batched-tokens", "2", "--block-size", "4", "--num-gpu-blocks-override", "64"),
        *("--compilation-cache-dir", str(pytestconfig.cache.mkdir("compiled"))),
    ]


def test_throughput(engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "5", "--input-len", "6", "--output-len", "4", "--n", "2", "--disable-tqdm"]
    assert main(["throughput", *flags, "--output-json", str(tmp_path / "t.json"), *engine]) == 0
    result = json.loads((tmp_path / "t.json").read_text())
    # End of sequence is ignored: every token that was asked for is made.
    assert (result["num_requests"], result["total_prompt_tokens"], result["total_output_tokens"]) == (5, 30, 40)
    assert result["total_num_tokens"] == 70
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(70 / result["elapsed_time"])
    out = capsys.readouterr().out
    assert f"Throughput: {result['requests_per_second']:.2f} requests/s" in out
    assert "Total num output tokens: 40" in out
    # Alone in its step, each of the 10 samples decodes in the bucket of one row; prompts fill theirs to the limit of 2 tokens.
    assert result["padding_share"] == 0.0
    assert "Padding: 0.0% of the tokens that the device computed" in out


def test_throughput_of_a_request_that_does_not_fit(engine: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["throughput", "--num-prompts", "1", "--input-len", "60", "--output-len", "5", *engine]) == 2
    assert "60 + 5 tokens does not fit in --max-model-len 64" in capsys.readouterr().err


def test_latency(engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--batch-size", "2", "--input-len", "5", "--output-len", "3", "--num-iters", "4", "--num-iters-warmup", "1"]
    assert main(["latency", *flags, "--output-json", str(tmp_path / "l.json"), *engine]) == 0
    result = json.loads((tmp_path / "l.json").read_text())
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert f"Avg latency: {result['avg_latency']:.4f} seconds" in capsys.readouterr().out


def test_percentiles_of_latencies() -> None:
    assert latency_result([1.0, 2.0, 3.0])["percentiles"] == pytest.approx(
        {"10": 1.2, "25": 1.5, "50": 2.0, "75": 2.5, "90": 2.8, "99": 2.98}
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["throughput", "--n", "0"], "--n must be at least 1"),
        (["latency", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["latency", "--num-iters-warmup", "-1"], "--num-iters-warmup must be at least 0"),
        (["startup", "--num-iters-cold", "0", "--num-iters-warm", "0"], "not be negative nor both 0"),
        (["startup", "--compilation-cache-dir", ""], "--compilation-cache-dir must name a folder"),
        (["startup", "--model", "/nowhere/x"], "/nowhere/x"),
    ],
)
def test_flags_that_are_wrong(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_phases_of_a_start(engine: list[str]) -> None:
    *flags, _, cache = engine
    run = start_once(flags, cache)
    assert list(run) == [*PHASES, "ready"]
    in_a_row = [phase for phase in PHASES if phase not in ("load_weights", "first_token", "all_programs")]
    assert run["ready"] == pytest.approx(sum(run[phase] for phase in in_a_row))
    assert min(run[phase] for phase in ("python", "imports", "load_weights", "compile_first", "first_token")) > 0
    assert -0.01 < run["other"] < run["ready"]


def test_an_engine_that_does_not_start() -> None:
    with pytest.raises(ValueError, match=r"the engine did not start \(exit code 2\):\n(.*\n)*.*unknown argument '--speed'"):
        start_once(["--speed", "3"], "")


@pytest.mark.parametrize(
    ("flags", "caches"),
    [
        (["--num-iters-cold", "2", "--num-iters-warm", "2"], ["cold-0", "cold-1", "cold-0", "cold-0"]),
        (["--num-iters-cold", "0", "--num-iters-warm", "1"], ["warm", "warm"]),  # filled first
        (["--num-iters-cold", "1", "--num-iters-warm", "0"], ["cold-0"]),
        (["--compilation-cache-dir", "mine", "--num-iters-warm", "1"], ["cold-0", "mine", "mine"]),
    ],
)
def test_which_caches_are_used(
    engine: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    caches: list[str],
) -> None:
    """Without processes: each start takes as many seconds as there were before it."""
    used: list[str] = []

    def start(flags: Any, cache: str) -> dict[str, float]:
        used.append(Path(cache).name)
        return dict.fromkeys([*PHASES, "ready"], float(len(used)))

    monkeypatch.setattr(startup, "start_once", start)
    own = engine[: engine.index("--compilation-cache-dir")]
    assert main(["startup", *own, *flags, "--output-json", str(tmp_path / "s.json")]) == 0
    assert used == caches
    result = json.loads((tmp_path / "s.json").read_text())
    for kind, runs in result["runs"].items():
        assert kind not in result or result[kind]["ready"] == np.median([run["ready"] for run in runs])
    assert capsys.readouterr().out.splitlines()[0].split() == ["seconds", *(kind for kind in ("cold", "warm") if kind in result)]


def test_the_engines_flags_are_handed_on() -> None:
    argv = [
        "--num-iters-warm",
        "3",
        "--model",
        "m",
        "--output_json=x",
        "--no-enable-prefix-caching",
        "--compilation-cache-dir",
        "c",
    ]
    assert engine_flags(argv) == ["--model", "m", "--no-enable-prefix-caching"]


def test_table_of_phases() -> None:
    result: dict[str, dict[str, Any]] = {"cold": dict.fromkeys([*PHASES, "ready"], 1.0) | {"compile_and_warm_up": 12.25}}
    lines = startup_table(result).splitlines()
    assert lines[0].split() == ["seconds", "cold"]
    assert lines[11].split()[:4] == ["compile_and_warm_up", "12.25", "first", "runs,"]
    assert lines[-1].startswith("ready")
