"""`python -m jaxllm.bench.gpu` on small shapes, on the CPU."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxllm.bench import gpu
from jaxllm.bench.attention_case import AttentionCase
from kernels_pallas.paged_attention import paged_attention


def results(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_attention_parts(tmp_path: Path):
    assert gpu.main(["--smoke", "--out", str(tmp_path), "--parts", "decode", "prefill"]) == 0
    found = results(tmp_path)
    assert set(found) == {"device", "decode", "prefill"}
    assert {result["status"] for result in found.values()} == {"done"}
    [row] = found["decode"]["rows"]
    # 100 and 75 tokens of 2 heads of 128 values, keys and values, 2 bytes each.
    assert row["kv_mb"] == pytest.approx(175 * 2 * 128 * 2 * 2 / 1e6)
    assert row["reference_gb_per_s"] == pytest.approx(row["kv_mb"] / row["reference_us"] * 1e3)
    [row] = found["prefill"]["rows"]
    assert row["reference_tflops"] > 0


def test_what_time_does_not_allow_is_left_out(tmp_path: Path):
    assert gpu.main(["--smoke", "--out", str(tmp_path), "--budget", "0"]) == 0
    found = results(tmp_path)
    assert set(found) == set(gpu.PARTS)
    assert {result["status"] for result in found.values()} == {"out of time"}
    assert all(result["rows"] == [] for result in found.values())


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def fail(run, rows):
        rows.append({"so": "far"})
        raise ValueError("no such kernel")

    monkeypatch.setitem(gpu.PARTS, "correct", fail)
    monkeypatch.setitem(gpu.PARTS, "step", lambda run, rows: rows.append({"ms": 1.0}))
    assert gpu.main(["--smoke", "--out", str(tmp_path), "--parts", "correct", "step"]) == 1
    found = results(tmp_path)
    assert found["correct"]["status"] == "ValueError: no such kernel"
    assert found["correct"]["rows"] == [{"so": "far"}]
    assert found["step"] | {"seconds": 0} == {"part": "step", "status": "done", "seconds": 0, "rows": [{"ms": 1.0}]}


def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "jax found no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("window", [None, 3])
def test_float64_attention_by_hand(window: int | None):
    """One query over 4 tokens, its logits made 0: the average of the values that it sees."""
    case = AttentionCase.random([4], [1], 1, 1, 8, 2)
    case = AttentionCase(**{**case.__dict__, "q": case.q * 0})
    blocks = np.asarray(case.kv_cache, np.float64)[np.asarray(case.block_tables)[0], 1, 0]
    seen = blocks.reshape(4, 8)[0 if window is None else 4 - window :]
    np.testing.assert_allclose(case.in_float64(window)[0, 0], seen.mean(axis=0))
    np.testing.assert_allclose(
        np.asarray(case.attend(paged_attention, "reference", window), np.float64)[0, 0], seen.mean(0), atol=0.01
    )


@pytest.mark.slow
def test_everything(tmp_path: Path):
    assert gpu.main(["--smoke", "--out", str(tmp_path)]) == 0
    assert {name: result["status"] for name, result in results(tmp_path).items()} == dict.fromkeys(gpu.PARTS, "done")
