import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from weight_files import SHAPES, plain_param, run_python, tiny_specs, tiny_tensors, write_gguf, write_safetensors

from jaxllm.layers.spec import ParamSpec, Part
from jaxllm.weights.layout import Layout
from jaxllm.weights.load import load_params, pieces, read_slice
from jaxllm.weights.reader import copy_cast, dtype_of, open_reader
from jaxllm.weights.source import resolve_model


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_stripes", [1, 4])
def test_values(tmp_path, stored, wanted, num_stripes):
    tensors = tiny_tensors(stored)
    source = resolve_model(str(write_safetensors(tmp_path, tensors, num_files=2)))
    specs = tiny_specs(wanted, num_stripes)
    params = load_params(source, specs)
    assert list(params) == [spec.path for spec in specs]
    for spec in specs:
        expected = plain_param(spec, tensors).astype(dtype_of(wanted))
        assert params[spec.path].dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(params[spec.path]), expected, err_msg=spec.path)


def test_fused_by_hand(tmp_path):
    # q is [4, 1] (two heads of two), k is [2, 1] (one head); two devices: k's head is repeated, each stripe holds a head of both.
    tensors = {"q": np.array([[1], [2], [3], [4]], np.float32), "k": np.array([[5], [6]], np.float32)}
    source = resolve_model(str(write_safetensors(tmp_path, tensors)))
    parts = (Part("q", (4, 1)), Part("k", (2, 1), repeat=2, repeat_size=2))
    spec = ParamSpec("qk", (1, 8), "float32", (None, "heads"), parts, transpose=True, num_stripes=2)
    assert np.asarray(load_params(source, [spec])["qk"]).tolist() == [[1, 2, 5, 6, 3, 4, 5, 6]]


@st.composite
def geometries(draw):
    """A spec of any shape, its tensors, and a slice of it."""
    num_stripes = draw(st.integers(1, 3))
    transpose = draw(st.booleans())
    ndim = draw(st.integers(1, 2)) if not transpose else 2
    other = draw(st.integers(1, 5))
    parts = []
    for i in range(draw(st.integers(1, 3))):
        repeat, size, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        group_padding = draw(st.sampled_from([0, 0, 1, 3]))
        rows = groups * (size * repeat + group_padding)
        padding = -rows % num_stripes + draw(st.integers(0, 2)) * num_stripes
        # Parts are joined along the last axis of the parameter, so they agree in the first.
        axis = int(ndim == 2 and not transpose)
        shape = (groups * size,) if ndim == 1 else (other, groups * size) if axis else (groups * size, other)
        parts.append(Part(f"t{i}", shape, repeat, size if repeat > 1 or group_padding else 1, group_padding, padding, axis))
    last = sum(part.expanded_shape[part.axis] for part in parts)
    shape = (last,) if ndim == 1 else (other, last)
    if len(parts) == 1 and num_stripes == 1 and ndim == 2 and draw(st.booleans()):
        # Alone, a part may have its repetitions and padding in the other axis too: that of its neighbours must not agree.
        (part,) = parts
        parts = [dataclasses.replace(part, shape=part.shape[::-1], axis=1 - part.axis)]
        shape = shape[::-1]
    spec = ParamSpec("p", shape, "float32", (None,) * ndim, tuple(parts), transpose, num_stripes)
    index = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        index.append(slice(start, draw(st.integers(start + 1, size))))
    return spec, tuple(index)


class Arrays:
    """Arrays as a reader."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.shapes = {name: values.shape for name, values in tensors.items()}
        self.dtypes = dict.fromkeys(tensors, "float32")

    def where(self, name):
        return "memory"

    def read(self, name, index, out):
        copy_cast(self.tensors[name][index], out)


@given(geometries())
@settings(max_examples=200, deadline=None)
def test_any_slice(geometry):
    spec, index = geometry
    tensors, first = {}, 1  # 0 is padding
    for part in spec.parts:
        size = int(np.prod(part.shape))
        tensors[part.name] = np.arange(first, first + size, dtype=np.float32).reshape(part.shape)
        first += size
    with ThreadPoolExecutor(1) as pool:
        found = read_slice(Arrays(tensors), spec, index, pool)
    expected = plain_param(spec, tensors)
    np.testing.assert_array_equal(found, expected[index])
    filled = np.zeros(found.T.shape if spec.transpose else found.shape, int)
    for piece in pieces(spec, index):
        filled[piece.out] += 1
    np.testing.assert_array_equal(filled, (expected[index].T if spec.transpose else expected[index]) != 0)


@given(geometries())
@settings(max_examples=4, deadline=None)
def test_on_the_devices(geometry):
    spec, _ = geometry
    tensors = {part.name: np.random.default_rng(0).random(part.shape, np.float32) for part in spec.parts}
    found = Layout.of(spec).assemble(tuple(tensors[part.name] for part in spec.parts))
    np.testing.assert_array_equal(found, plain_param(spec, tensors))


def test_repeated_rows_of_a_matrix_that_is_not_transposed(tmp_path):
    tensors = {"a": np.array([[1, 2], [3, 4]], np.float32)}
    source = resolve_model(str(write_safetensors(tmp_path, tensors)))
    spec = ParamSpec("a", (4, 2), "float32", (None, None), (Part("a", (2, 2), repeat=2, repeat_size=1),))
    assert np.asarray(load_params(source, [spec])["a"]).tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "orbax"])
class TestStrict:
    def source(self, tmp_path, kind, tensors):
        if kind == "gguf":
            return resolve_model(str(write_gguf(tmp_path / "m.gguf", tensors)))
        folder = write_safetensors(tmp_path / "hf", tensors)
        if kind == "orbax":
            from jaxllm.weights.orbax import convert

            folder = convert(str(folder), tmp_path / "orbax")
        return resolve_model(str(folder))

    def test_missing(self, tmp_path, kind):
        tensors = tiny_tensors()
        del tensors["model.layers.0.mlp.up_proj.weight"]
        with pytest.raises(ValueError, match=r"lacks tensor model\.layers\.0\.mlp\.up_proj\.weight"):
            load_params(self.source(tmp_path, kind, tensors), tiny_specs())

    def test_unused_and_ignored(self, tmp_path, kind):
        source = self.source(tmp_path, kind, tiny_tensors())
        specs = [spec for spec in tiny_specs() if spec.path != "lm_head.kernel"]
        with pytest.raises(ValueError, match=r"does not use tensor lm_head\.weight"):
            load_params(source, specs)
        # The whole name must match.
        with pytest.raises(ValueError, match="does not use"):
            load_params(source, specs, ignore=["lm_head"])
        assert len(load_params(source, specs, ignore=[r"lm_head\..*"])) == len(specs)

    def test_wrong_shape(self, tmp_path, kind):
        tensors = tiny_tensors()
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:32]
        with pytest.raises(ValueError, match=r"model\.norm\.weight of .* has shape \(32,\), the model needs \(64,\)"):
            load_params(self.source(tmp_path, kind, tensors), tiny_specs())

    def test_overflow(self, tmp_path, kind):
        tensors = tiny_tensors()
        tensors["model.norm.weight"][3] = 70000.0
        source = self.source(tmp_path, kind, tensors)
        with pytest.raises(ValueError, match=r"model\.norm\.weight of .* float16 cannot hold"):
            load_params(source, tiny_specs("float16"))
        assert np.asarray(load_params(source, tiny_specs())["norm"])[3] == 70000.0

    def test_one_tensor_for_two_parameters(self, tmp_path, kind):
        source = self.source(tmp_path, kind, tiny_tensors())
        embed = Part("model.embed_tokens.weight", SHAPES["model.embed_tokens.weight"])
        tied = ParamSpec("lm_head.kernel", embed.shape[::-1], "bfloat16", (None, None), (embed,), transpose=True)
        specs = [*tiny_specs()[:-1], tied]
        params = load_params(source, specs, ignore=["lm_head.weight"])
        np.testing.assert_array_equal(
            np.asarray(params["lm_head.kernel"]), np.asarray(params["embed.weight"]).T.astype(dtype_of("bfloat16"))
        )


def test_integer_tensors_are_refused(tmp_path):
    tensors = tiny_tensors() | {"model.norm.weight": np.ones(64, np.int8)}
    source = resolve_model(str(write_safetensors(tmp_path, tensors)))
    with pytest.raises(ValueError, match=r"model\.norm\.weight of .* has type I8, which is not supported"):
        load_params(source, tiny_specs())


def test_shardings_must_be_complete(tmp_path):
    source = resolve_model(str(write_safetensors(tmp_path, tiny_tensors())))
    some = {"norm": SingleDeviceSharding(jax.devices()[0])}
    with pytest.raises(ValueError, match=r"no sharding is given for parameters embed\.weight, norm_in"):
        load_params(source, tiny_specs(), shardings=some)
    with pytest.raises(ValueError, match="given twice: parameter norm"):
        load_params(source, [*tiny_specs(), tiny_specs()[-2]])


def test_source_without_weights(tmp_path):
    source = resolve_model(str(write_safetensors(tmp_path, tiny_tensors())), weights=False)
    with pytest.raises(ValueError, match="resolved without its weights"):
        open_reader(source)


def test_progress_bar(tmp_path, capsys):
    source = resolve_model(str(write_safetensors(tmp_path, tiny_tensors())))
    load_params(source, tiny_specs(), progress=True)
    assert "10/10" in capsys.readouterr().err
    load_params(source, tiny_specs())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("out_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("in_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_copy_cast(in_type, out_type, transposed):
    # Larger than a block in both directions, no multiple of it, and a slice of something larger.
    src = np.random.default_rng(0).standard_normal((300, 260)).astype(dtype_of(in_type))[3:290]
    buffer = np.zeros((270, 300), dtype_of(out_type))
    out = buffer[5:265, 7:294].T if transposed else np.zeros((287, 260), dtype_of(out_type))
    copy_cast(src, out)
    np.testing.assert_array_equal(out, src.astype(np.float32).astype(dtype_of(out_type)))
    if transposed:
        assert not buffer[:5].any()
        assert not buffer[:, 294:].any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_peak_memory(tmp_path, kind):
    done = run_python(Path(__file__).with_name("peak_memory.py"), kind, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
