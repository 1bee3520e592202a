"""Wrong input is refused by name before anything is queued, and the engine lives on."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm import LLM, SamplingParams

GOOD = {"prompt_token_ids": [1, 2, 3]}
GREEDY = SamplingParams(temperature=0, max_tokens=2, detokenize=False)


@pytest.fixture(scope="module")
def llm(make_tiny) -> LLM:
    return make_tiny(max_model_len=64)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, r"temperature must be in \[0, 2\], got -1"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs is not supported"),
    ],
)
def test_sampling_params(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_unknown_sampling_field():
    with pytest.raises(TypeError, match="heat"):
        SamplingParams(heat=1)
    with pytest.raises(ValueError, match="unknown sampling parameter 'heat'"):
        SamplingParams.from_optional(heat=1)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ({"prompt_token_ids": list(range(64))}, GREEDY, "64"),
        ({"prompt_token_ids": list(range(100))}, GREEDY, "100"),
        ({"prompt_token_ids": [1, 320]}, GREEDY, "320"),
        ({"prompt_token_ids": [1, -1]}, GREEDY, "-1"),
        ({"prompt_token_ids": []}, GREEDY, "empty"),
        ("text", GREEDY, "tokenizer"),
        (GOOD, SamplingParams(logprobs=21, detokenize=False), "logprobs must be at most 20"),
        (GOOD, SamplingParams(logit_bias={320: 1.0}, detokenize=False), "logit_bias holds token id 320"),
        (GOOD, SamplingParams(stop_token_ids=[999], detokenize=False), "stop_token_ids holds token id 999"),
        (GOOD, SamplingParams(min_tokens=62, max_tokens=None, detokenize=False), "min_tokens"),
    ],
)
def test_nothing_is_queued(llm: LLM, prompt, params, message):
    # The wrong prompt comes last: those before it must not be queued either.
    with pytest.raises(ValueError, match=message):
        llm.generate([GOOD, GOOD, prompt], [GREEDY, GREEDY, params], use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    assert not llm.engine.engine_core.engine_core.scheduler.has_unfinished_requests()
    assert len(llm.generate([GOOD], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 2


def test_folder_that_is_no_model(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        LLM(str(tmp_path))


def test_truncated_safetensors(tmp_path: Path, tiny_model: str, compiled: str):
    shutil.copy(Path(tiny_model) / "config.json", tmp_path)
    save_file({"model.norm.weight": np.ones(64, np.float32)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        LLM(str(tmp_path), skip_tokenizer_init=True, compilation_cache_dir=compiled, use_tqdm_on_load=False)


def test_missing_tensor(tmp_path: Path, tiny_model: str, compiled: str):
    shutil.copy(Path(tiny_model) / "config.json", tmp_path)
    save_file({"model.norm.weight": np.ones(64, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight"):
        LLM(str(tmp_path), skip_tokenizer_init=True, compilation_cache_dir=compiled, use_tqdm_on_load=False)


def test_gguf_of_an_unknown_architecture(tmp_path: Path):
    path = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="mamba"):
        LLM(str(path))


def test_unsupported_architecture(tmp_path: Path, tiny_model: str):
    config = json.loads((Path(tiny_model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'GPT2LMHeadModel' is not supported"):
        LLM(str(tmp_path))
