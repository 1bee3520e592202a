"""`python -m jaxllm.build`: programs that are shipped, loaded and refused."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny_configs import LAYER_1

from jaxllm import LLM, EngineArgs, SamplingParams
from jaxllm.build import build, main
from jaxllm.worker.model_runner import ModelRunner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LAYER_1))
    return str(folder)


def arguments(model: str, **more: Any) -> dict[str, Any]:
    return {
        "model": model, "load_format": "dummy", "skip_tokenizer_init": True, "use_tqdm_on_load": False, "max_num_seqs": 2,
        "max_num_batched_tokens": 4, "block_size": 4, "num_gpu_blocks_override": 64, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def built(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(EngineArgs(**arguments(model)), str(tmp_path_factory.mktemp("built"))).parent


def answer(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0].token_ids


def test_a_folder_is_all_that_an_engine_needs(model: str, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**arguments(model, compilation_cache_dir="")) as llm:
        expected = answer(llm)
    jax.clear_caches()  # as in another process

    def lower(self: ModelRunner, bucket: Any, name: str) -> None:
        raise AssertionError(f"{bucket} is compiled")

    monkeypatch.setattr(ModelRunner, "_lower", lower)
    files = {path.name for path in built.iterdir()}
    # The number of blocks is the one that it was built with.
    with LLM(**arguments(model, num_gpu_blocks_override=None, compiled_dir=str(built))) as llm:
        llm.collective_rpc("finish_compilation")
        assert answer(llm) == expected
        assert llm.collective_rpc("num_compiles_after_warm_up") == [0]
    assert {path.name for path in built.iterdir()} == files, "something was compiled that the folder lacks"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 3}, "max_num_seqs: built for 2, here it is 3"),
        ({"dtype": "bfloat16"}, "dtype: built for 'float32', here it is 'bfloat16'"),
        ({"num_gpu_blocks_override": 65}, "KV cache: built for .*num_blocks=64.*, here it is .*num_blocks=65"),
        ({"max_num_batched_tokens": 8}, r"buckets: built for .*'mixed 4'.*, here it is .*'mixed 8'"),
        ({"hf_overrides": {"intermediate_size": 64}}, "model: built for .*=48.*, here it is .*=64"),
    ],
)
def test_what_does_not_fit_is_named(model: str, built: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(**arguments(model, compiled_dir=str(built), **{}) | change)


@pytest.mark.parametrize(
    "name", ["jax", "jaxlib", "backend", "devices", "mesh", "process", "compiler options", "version of jaxllm"]
)
def test_another_machine_or_version_is_refused(model: str, built: Path, tmp_path: Path, name: str) -> None:
    manifest = json.loads((built / "manifest.json").read_text())
    assert name in manifest["facts"]
    manifest["facts"][name] = "'another'"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=f"does not fit; build it anew. {name}: built for 'another', here it is"):
        LLM(**arguments(model, compiled_dir=str(tmp_path)))


def test_a_program_that_is_missing_or_broken(model: str, built: Path, tmp_path: Path) -> None:
    for path in built.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (program,) = tmp_path.glob("mixed-4-*")
    program.write_bytes(b"broken")
    for _ in range(2):
        with pytest.raises(ValueError, match="holds no usable program for mixed 4"):
            LLM(**arguments(model, compiled_dir=str(tmp_path)))
        program.unlink(missing_ok=True)


def test_what_cannot_be_shipped(model: str, built: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attention_backend 'mosaic' is interpreted on a CPU"):
        build(EngineArgs(**arguments(model, attention_backend="mosaic")), str(tmp_path))
    with pytest.raises(ValueError, match="built for one process, got distributed_executor_backend 'mp' with 2 workers"):
        build(EngineArgs(**arguments(model, tensor_parallel_size=2, distributed_executor_backend="mp")), str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_wrong_folders(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"was not made by `python -m jaxllm\.build`"):
        LLM(**arguments(model, compiled_dir=str(tmp_path)))
    with pytest.raises(ValueError, match="exclude each other"):
        LLM(**arguments(model, compiled_dir=str(tmp_path), compilation_cache_dir=str(tmp_path)))
    (tmp_path / "file").write_text("")
    assert main(["--model", model, "--load-format", "dummy", "--out", str(tmp_path)]) == 2
    assert "--out must be an empty folder or a new one" in capsys.readouterr().err
