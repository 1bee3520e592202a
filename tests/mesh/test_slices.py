"""Weights of a model whose heads do not divide, read from files to several devices: each gets its slice and nothing else."""

import json

import jax
import numpy as np
import pytest
from devices import need_devices
from safetensors.numpy import save_file
from tiny import TINY

from jaxllm.config import DecoderConfig
from jaxllm.models.decoder import Decoder
from jaxllm.weights import load
from jaxllm.weights.layout import Layout
from jaxllm.weights.source import resolve_model
from sharding.mesh import make_mesh
from sharding.rules import sharding_of

pytestmark = pytest.mark.multi_gpu


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
@pytest.mark.parametrize("num_devices", [2, 8])
def test_each_device_gets_its_slice(tmp_path, monkeypatch, kind, num_devices):
    need_devices(num_devices)
    config = DecoderConfig.from_hf({**TINY, "num_hidden_layers": 1, "vocab_size": 300})
    rng = np.random.default_rng(0)
    parts = {part.name: part for spec in Decoder.param_specs(config, "float32") for part in spec.parts}
    tensors = {name: rng.standard_normal(part.shape, np.float32) for name, part in parts.items()}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    save_file(tensors, folder / "model.safetensors")
    if kind == "orbax":
        from jaxllm.weights.orbax import convert

        folder = convert(str(folder), tmp_path / "orbax")

    read: list[tuple[str, int]] = []

    def read_slice(reader, spec, index, pool, read_slice=load.read_slice):
        values = read_slice(reader, spec, index, pool)
        read.append((spec.path, values.size))
        return values

    monkeypatch.setattr(load, "read_slice", read_slice)
    mesh = make_mesh(jax.local_devices()[:num_devices], tensor=num_devices)
    specs = {spec.path: spec for spec in Decoder.param_specs(config, "float32", num_devices)}
    shardings = {path: sharding_of(mesh, spec.axes) for path, spec in specs.items()}
    params = load.load_params(resolve_model(str(folder)), list(specs.values()), shardings=shardings)
    for path, array in params.items():
        spec = specs[path]
        expected = np.asarray(Layout.of(spec).assemble(tuple(tensors[part.name] for part in spec.parts)))
        assert len(array.addressable_shards) == num_devices
        for shard in array.addressable_shards:
            assert shard.data.size * (num_devices if any(spec.axes) else 1) == array.size, path
            np.testing.assert_array_equal(shard.data, expected[shard.index], err_msg=path)
    if kind == "safetensors":
        # Slices are what was ever read, and so what ever reached a device.
        assert all(size * (num_devices if any(specs[path].axes) else 1) == params[path].size for path, size in read)
        assert len(read) == sum(num_devices if any(spec.axes) else 1 for spec in specs.values())
