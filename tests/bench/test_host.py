"""`host`: an engine on a null device."""

import json
from pathlib import Path

import pytest

from jaxllm.bench.cli import main
from jaxllm.bench.host import PARTS, host_table, null_executor
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.sampling_params import SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_parts_of_a_step(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host.json"
    flags = ["--model", model, "--skip-tokenizer-init", "--num-steps", "30", "--output-json", str(out)]
    assert main(["host", "--sizes", "1", "40", *flags]) == 0
    results = json.loads(out.read_text())
    assert list(results) == ["1", "40"]
    for result in results.values():
        assert list(result) == list(PARTS)
        parts = [result[part] for part in ("schedule", "pack", "read", "update", "output")]
        assert min(parts) > 0
        assert result["total"] > max(parts)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["requests", "schedule", "ms"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "40"]


def test_the_last_column_is_a_request() -> None:
    result = dict.fromkeys(PARTS, 0.5) | {"total": 2.0}
    assert host_table({100: result}).splitlines()[1].split()[-1] == "20.00"


def test_the_null_device_answers_as_a_device_does(model: str) -> None:
    args = EngineArgs(
        model, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64,
        num_gpu_blocks_override=20,
    )  # fmt: skip
    engine = LLMEngine(args.create_engine_config(), None, null_executor([5, 6]))
    for i in range(3):
        engine.add_request(str(i), {"prompt_token_ids": [1] * 10}, SamplingParams(max_tokens=4, ignore_eos=True))
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    assert sorted(done) == ["0", "1", "2"]
    assert all(len(ids) == 4 and set(ids) == {5, 6} for ids in done.values())


@pytest.mark.parametrize("flags", [["--sizes", "0"], ["--num-steps", "0"], ["--input-len", "0"]])
def test_wrong_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", *flags]) == 2
    assert f"{flags[0]} must be at least 1, got 0" in capsys.readouterr().err


def test_several_decodes_a_dispatch_are_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--model", model, "--num-decode-steps", "4"]) == 2
    assert "--num-decode-steps must be 1 here, got 4" in capsys.readouterr().err
