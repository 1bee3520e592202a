"""`python -m jaxllm.plan`: a small model's plan in full, and what it says to a caller's mistakes."""

import json
from pathlib import Path

import pytest

from jaxllm.plan.cli import main
from jaxllm.plan.report import plan_text

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


@pytest.mark.aot
def test_plan_of_a_small_model(model: str, capsys: pytest.CaptureFixture[str]):
    limits = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--rows", "1,8", "--prompts", "64", "--context", "100"]
    assert main(["--model", model, "--device", "h100", "--tp", "2", "--json", *limits]) == 0
    plan = json.loads(capsys.readouterr().out)
    memory, cache = plan["memory"], plan["kv_cache"]
    assert (plan["device"], plan["num_devices"], plan["dtype"]) == ("NVIDIA H100 80GB HBM3", 2, "bfloat16")
    # Layers of qkv 256x512, out 256x256, gate and up 256x1024, down 512x256, shared by two devices; both tables too; norms whole.
    matrices = 2 * (256 * 512 + 256 * 256 + 256 * 1024 + 512 * 256) + 2 * 4096 * 256
    assert memory["weight_bytes"] == 2 * (matrices // 2 + 5 * 256)
    # A block is 32 tokens of 2 layers, K and V, one head of 64 a device.
    assert memory["kv_cache_bytes"] == (cache["num_blocks"] + 1) * 32 * 2 * 2 * 64 * 2
    assert cache["num_tokens"] == 32 * cache["num_blocks"]
    temporaries = max(step["temporary_bytes"] for step in plan["steps"])
    taken = sum(memory[f"{part}_bytes"] for part in ("weight", "row", "kv_cache")) + temporaries
    assert 0.98 * memory["usable_bytes"] < taken <= memory["usable_bytes"]
    assert [step["bucket"] for step in plan["steps"]] == ["mixed 64", "decode 8"]
    for step in plan["steps"]:
        assert step["collectives"] == {"all-reduce": 5, "all-to-all": 1, "all-gather": 1}
        assert step["host_calls"] == []
        assert step["kernels"]
        assert all(0 < kernel["registers"] <= 255 for kernel in step["kernels"])
    assert [row["rows"] for row in plan["roofline"]["decode"]] == [1, 8]
    assert plan["roofline"]["ceiling"]["rows"] == 8

    text = plan_text(plan)
    assert f"{model} in bfloat16 on 2 x NVIDIA H100 80GB HBM3" in text
    assert f"{cache['num_blocks']:,} blocks of 32, {cache['num_tokens']:,} tokens" in text
    assert "communication: 1 all-to-all, 1 all-gather, 5 all-reduce" in text
    plan["roofline"]["ceiling"] = None
    assert "holds no request of so many tokens" in plan_text(plan)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "h20"], "--device must be one of h200, h100, a100, b200, got 'h20'"),
        (["--rows", "4,0"], "--rows must be at least 1, got [4, 0]"),
        (["--context", "0"], "--context must be at least 1, got 0"),
    ],
)
def test_mistakes(model: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--model", model, *flags]) == 2
    assert message in capsys.readouterr().err


def test_without_the_plugin(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kernels_pallas.aot.compile._PLUGINS", ("no_such_plugin",))
    assert main(["--model", model]) == 2
    assert "pip install 'jaxllm[aot]'" in capsys.readouterr().err
