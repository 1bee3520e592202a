import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from weight_files import HF_CONFIG, plain_param, run_python, tiny_specs, tiny_tensors, write_gguf, write_safetensors

from jaxllm.layers.spec import ParamSpec, Part
from jaxllm.weights import orbax as orbax_module
from jaxllm.weights.load import load_params
from jaxllm.weights.orbax import OrbaxReader, convert, save_checkpoint
from jaxllm.weights.reader import dtype_of, open_reader
from jaxllm.weights.source import resolve_model


def assert_loads(folder, tensors, dtype="float32", num_stripes=1):
    params = load_params(resolve_model(str(folder)), tiny_specs(dtype, num_stripes))
    for spec in tiny_specs(dtype, num_stripes):
        expected = plain_param(spec, tensors).astype(dtype_of(dtype))
        assert params[spec.path].dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(params[spec.path]), expected, err_msg=spec.path)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_stripes", [1, 4])
def test_convert_safetensors(tmp_path, stored, num_stripes):
    tensors = tiny_tensors(stored)
    folder = write_safetensors(tmp_path / "hf", tensors)
    (folder / "generation_config.json").write_text('{"top_k": 3}')
    (folder / "tokenizer.json").write_text('{"x": 1}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("t")
    out = convert(str(folder), tmp_path / "out")
    assert out == tmp_path / "out"
    shutil.rmtree(folder)
    source = resolve_model(str(out))
    assert (source.kind, source.hf_config, source.generation_config) == ("orbax", HF_CONFIG, {"top_k": 3})
    assert (out / "tokenizer.json").read_text() == '{"x": 1}'
    assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "t"
    reader = open_reader(source)
    assert reader.dtypes == dict.fromkeys(tensors, stored)
    assert os.listdir(tmp_path) == ["out"]
    for dtype in ("float32", "bfloat16", "float16"):
        assert_loads(out, tensors, dtype, num_stripes)


def test_convert_quantized_gguf(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_tensors(), "Q8_0", **TOKENIZER)
    convert(str(path), tmp_path / "exact")
    convert(str(path), tmp_path / "half", "bfloat16")
    direct = load_params(resolve_model(str(path)), tiny_specs("bfloat16"))
    for name in ("exact", "half"):
        source = resolve_model(str(tmp_path / name))
        params = load_params(source, tiny_specs("bfloat16"))
        for path, values in direct.items():
            np.testing.assert_array_equal(np.asarray(params[path]), np.asarray(values))
    assert set(open_reader(resolve_model(str(tmp_path / "exact"))).dtypes.values()) == {"float32"}
    assert set(open_reader(source).dtypes.values()) == {"bfloat16"}
    assert source.hf_config["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "half" / "tokenizer_config.json").read_text())["eos_token"] == "b"


TOKENIZER = {
    "tokenizer__ggml__model": "gpt2",
    "tokenizer__ggml__pre": "gpt-2",
    "tokenizer__ggml__tokens": ["a", "b"],
    "tokenizer__ggml__eos_token_id": 1,
}


def test_convert_orbax(tmp_path):
    tensors = tiny_tensors()
    convert(str(write_safetensors(tmp_path / "hf", tensors)), tmp_path / "one")
    convert(str(tmp_path / "one"), tmp_path / "two", "float16")
    assert_loads(tmp_path / "two", {name: values.astype(np.float16) for name, values in tensors.items()})


def test_convert_refuses(tmp_path):
    tensors = tiny_tensors()
    folder = write_safetensors(tmp_path / "hf", tensors)
    with pytest.raises(ValueError, match=r"out '.*/hf' exists and is not an empty folder"):
        convert(str(folder), folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        convert(str(folder), tmp_path / "file")
    with pytest.raises(ValueError, match="dtype must be one of 'float32', 'bfloat16', 'float16', got 'int8'"):
        convert(str(folder), tmp_path / "out", "int8")
    tensors["model.norm.weight"][0] = 1e6
    with pytest.raises(ValueError, match=r"model\.norm\.weight of .* has values that float16 cannot hold"):
        convert(str(write_safetensors(tmp_path / "large", tensors)), tmp_path / "out", "float16")
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    with pytest.raises(ValueError, match=r"model\.norm\.weight of .* has type I8"):
        convert(str(write_safetensors(tmp_path / "large", tensors)), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["file", "hf", "large"]


def test_save_jax_arrays_in_several_groups(tmp_path, monkeypatch):
    # The largest tensor has 24 KiB: no group holds all, and the embedding is cut into chunks.
    monkeypatch.setattr(orbax_module, "_GROUP_BYTES", 30_000)
    monkeypatch.setattr(orbax_module, "_CHUNK_BYTES", 4096)
    tensors = tiny_tensors()
    (tmp_path / "out").mkdir()
    save_checkpoint({name: jnp.asarray(values) for name, values in tensors.items()}, tmp_path / "out", hf_config=HF_CONFIG)
    assert len(os.listdir(tmp_path / "out" / "weights")) > 3
    assert_loads(tmp_path / "out", tensors)
    assert resolve_model(str(tmp_path / "out")).generation_config == {}


def test_restore_in_several_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_module, "_BATCH_BYTES", 30_000)
    tensors = tiny_tensors()
    save_checkpoint(tensors, tmp_path / "out", hf_config=HF_CONFIG)
    assert_loads(tmp_path / "out", tensors, num_stripes=4)


@pytest.mark.parametrize("nested", [False, True])
def test_checkpoint_of_a_training_run(tmp_path, nested):
    """What Orbax itself writes, in one piece, is read too; nested keys are joined with dots."""
    tensors = tiny_tensors()
    tree: dict = {}
    for name, values in tensors.items():
        node, keys = tree, name.split(".") if nested else [name]
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = values
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "weights", tree)
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    assert_loads(tmp_path, tensors, num_stripes=4)


def test_bad_tensors(tmp_path):
    def save(tensors):
        save_checkpoint(tensors, tmp_path / "out", hf_config=HF_CONFIG)

    with pytest.raises(ValueError, match="there are no tensors to save"):
        save({})
    with pytest.raises(ValueError, match="tensor a must be an array of a floating point type, got int64"):
        save({"a": np.arange(3)})
    with pytest.raises(ValueError, match="tensor a must be an array of a floating point type, got <class 'list'>"):
        save({"a": [1.0]})
    with pytest.raises(ValueError, match="tensor a is given twice"):
        save([("a", np.ones(3)), ("a", np.ones(3))])
    assert os.listdir(tmp_path) == []


class TestDamaged:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(orbax_module, "_GROUP_BYTES", 30_000)
        return save_checkpoint(tiny_tensors(), tmp_path / "out", hf_config=HF_CONFIG)

    def test_metadata(self, folder):
        (folder / "weights" / "00001" / "_METADATA").write_text("{")
        with pytest.raises(ValueError, match="weights/00001: not a readable Orbax checkpoint"):
            OrbaxReader(folder)

    def test_data(self, tmp_path):
        # One tensor: where several are read at once, Orbax leaves warnings behind for the reads that it drops.
        values = np.ones((64, 64), np.float32)
        folder = save_checkpoint({"w": values}, tmp_path / "out", hf_config=HF_CONFIG)
        spec = ParamSpec("w", (64, 64), "float32", (None, None), (Part("w", (64, 64)),))
        source = resolve_model(str(folder))
        np.testing.assert_array_equal(np.asarray(load_params(source, [spec])["w"]), values)
        largest = max((folder / "weights").rglob("d/*"), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:100])
        with pytest.raises(ValueError, match="weights/00000: not a readable Orbax checkpoint"):
            load_params(source, [spec])

    def test_missing_group(self, folder):
        shutil.rmtree(folder / "weights" / "00001")
        with pytest.raises(ValueError, match="the checkpoint lacks tensor"):
            load_params(resolve_model(str(folder)), tiny_specs())

    def test_given_twice(self, folder):
        shutil.copytree(folder / "weights" / "00001", folder / "weights" / "00077")
        with pytest.raises(ValueError, match=r"is given twice: in .*00001 and in .*00077"):
            OrbaxReader(folder)


def test_killed(tmp_path):
    """A process that dies in the middle leaves nothing that passes for a model."""
    code = """
import os, signal, sys
import numpy as np
from jaxllm.weights import orbax
from weight_files import HF_CONFIG, tiny_tensors
orbax._GROUP_BYTES = 30_000
def tensors():
    for i, pair in enumerate(tiny_tensors().items()):
        if i == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair
orbax.save_checkpoint(tensors(), sys.argv[1], hf_config=HF_CONFIG)
"""
    done = run_python("-c", code, tmp_path / "out")
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.iterdir()
    assert list(left.glob("weights/*/_METADATA")), "it died before it wrote anything"
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(str(left))
    # It is not in the way of the next attempt.
    save_checkpoint(tiny_tensors(), tmp_path / "out", hf_config=HF_CONFIG)
    assert resolve_model(str(tmp_path / "out")).kind == "orbax"


def test_save_with_a_tokenizer_object(tmp_path):
    class Saver:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "tokenizer.json").write_text("saved")

    save_checkpoint(tiny_tensors(), tmp_path / "out", hf_config=HF_CONFIG, tokenizer=Saver())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "saved"
