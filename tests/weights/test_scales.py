"""Scales of a checkpoint: one a row, one for all, none; under any of their names; repeated and padded."""

import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from weight_files import HF_CONFIG

from jaxllm.config import DecoderConfig
from jaxllm.layers.spec import ParamSpec, Part, ScalePart
from jaxllm.models.decoder import Decoder
from jaxllm.weights.dummy import dummy_params
from jaxllm.weights.load import load_params
from jaxllm.weights.orbax import save_checkpoint
from jaxllm.weights.source import resolve_model

WEIGHT = ParamSpec("w", (2,), "float32", (None,), (Part("w", (2,)),))


def spec_of(num_rows=3, num_stripes=1, **padding):
    parts = tuple(ScalePart(name, (num_rows,), other_names=(f"other.{name}",), **padding) for name in ("k", "v"))
    size = sum(part.expanded_shape[0] for part in parts)
    return ParamSpec("scale", (size,), "float32", ("heads",), parts, num_stripes=num_stripes)


def load(tmp_path, kind, tensors, spec):
    tensors = {"w": np.float32([1, 2]), **tensors}
    if kind == "orbax":
        folder = save_checkpoint(tensors, tmp_path / "model", hf_config=HF_CONFIG)
    else:
        folder = tmp_path / "model"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    params = load_params(resolve_model(str(folder)), [spec, WEIGHT])
    assert list(params) == ["scale", "w"]
    np.testing.assert_array_equal(params["w"], [1, 2])
    return np.asarray(params["scale"]).tolist()


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"k": np.array(0.5, np.float32), "v": np.float32([[2]])}, [0.5, 0.5, 0.5, 2, 2, 2]),
        ({"other.k": np.float16([1, 2, 3])}, [1, 2, 3, 1, 1, 1]),
        ({"v": np.float32([1, 2, 3]).reshape(3, 1, 1)}, [1, 1, 1, 1, 2, 3]),
    ],
)
def test_values(tmp_path, kind, tensors, expected):
    assert load(tmp_path, kind, tensors, spec_of()) == expected


def test_repeated_and_padded_for_devices(tmp_path):
    """Two stripes [k | v]: of three heads, each there once, and one that fills up."""
    tensors = {"k": np.float32([2, 3, 4]), "v": np.array(5, np.float32)}
    assert load(tmp_path, "safetensors", tensors, spec_of(num_stripes=2, padding=1)) == [2, 3, 5, 5, 4, 1, 5, 1]
    assert dummy_params([spec_of(padding=1)])["scale"].tolist() == [1] * 8


def test_two_copies_of_a_head(tmp_path):
    tensors = {"k": np.float32([2, 3])}
    assert load(tmp_path, "safetensors", tensors, spec_of(2, num_stripes=4, repeat=2)) == [2, 1, 2, 1, 3, 1, 3, 1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array(0, np.float32), "tensor k of .* must be positive and finite, got 0.0"),
        (np.float32([1, np.inf, 1]), "must be positive and finite"),
        (np.float32([1, 2]), r"tensor k of .* has shape \(2,\), the model needs \(3,\) or one number"),
        (np.array(3, np.int32), "tensor k of .* has type I32, which is not supported"),
    ],
)
def test_wrong_ones_are_refused(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "safetensors", {"k": value}, spec_of())


def test_two_names_for_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the model does not use tensor other\.k"):
        load(tmp_path, "safetensors", {"k": np.array(1, np.float32), "other.k": np.array(2, np.float32)}, spec_of())


def test_a_model_without_fp8_ignores_them():
    config = DecoderConfig.from_hf(HF_CONFIG)
    with_scales, without = (Decoder.param_specs(config, "bfloat16", fp8_cache=fp8) for fp8 in (True, False))
    [scales] = [spec for spec in with_scales if spec not in without]
    assert (scales.path, scales.dtype, scales.shape) == ("layers.0.attention.kv_scale", "float32", (4,))
    patterns = Decoder.ignored_tensors(config)
    for part in scales.parts:
        for name in (part.name, *part.other_names):
            assert any(re.fullmatch(pattern, name) for pattern in patterns), name
