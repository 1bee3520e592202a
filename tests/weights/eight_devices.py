"""Run by test_sharded on eight CPU devices: every kind of checkpoint onto a mesh, to each device its own slice."""

import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from weight_files import D, K, M, plain_param, tiny_specs, tiny_tensors, write_gguf, write_safetensors

from jaxllm.weights import load, orbax
from jaxllm.weights.dummy import dummy_params
from jaxllm.weights.source import resolve_model

folder = Path(sys.argv[1])
devices = jax.devices()
assert len(devices) == 8, devices


def shardings_of(mesh, specs):
    rules = {"heads": "tensor", "mlp": "tensor", "vocab": "tensor", None: None}
    return {spec.path: NamedSharding(mesh, PartitionSpec(*(rules[axis] for axis in spec.axes))) for spec in specs}


tensors = tiny_tensors()
hf = write_safetensors(folder / "hf", tensors, num_files=3)
write_gguf(folder / "m.gguf", tensors)
orbax.convert(str(hf), folder / "orbax")
sources = [resolve_model(str(folder / name)) for name in ("hf", "m.gguf", "orbax")]

# How many elements of each tensor are read from its file.
read: Counter[str] = Counter()
for module, name in (("jaxllm.weights.safetensors", "SafetensorsReader"), ("jaxllm.weights.gguf", "GgufReader")):
    reader = getattr(__import__(module, fromlist=[name]), name)

    def counting(self, name, index, out, read_slice=reader.read):
        read[name] += out.size
        read_slice(self, name, index, out)

    reader.read = counting

meshes = {size: jax.make_mesh((8 // size, size), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2) for size in (1, 2, 4, 8)}
checked = 0
for size, mesh in meshes.items():
    # The stripes of a model follow the size of the mesh's axis; one stripe on several devices must work too.
    for num_stripes in {1, size}:
        specs = tiny_specs("float32", num_stripes)
        shardings = shardings_of(mesh, specs)
        expected = {spec.path: plain_param(spec, tensors) for spec in specs}
        for source in sources:
            read.clear()
            params = load.load_params(source, specs, shardings=shardings)
            for path, array in params.items():
                assert array.sharding.is_equivalent_to(shardings[path], array.ndim), (path, array.sharding)
                for shard in array.addressable_shards:
                    assert shard.data.shape == array.sharding.shard_shape(array.shape)
                    np.testing.assert_array_equal(shard.data, expected[path][shard.index], err_msg=f"{source.kind} {path} {size}")
                    checked += 1
            if source.kind == "orbax":
                assert not read
                continue
            for spec in specs:
                for part in spec.parts:
                    # Once for every copy that the model itself asks for, however many devices hold the same slice.
                    assert read[part.name] == np.prod(part.shape) * part.repeat, (source.kind, size, part)
assert checked == 3 * 8 * 10 * 7, checked

# Orbax: with two KV heads on eight devices each is restored to the four that hold a copy of it, and to no other.
specs = {spec.path: spec for spec in tiny_specs("float32", 8)}
shardings = shardings_of(meshes[8], specs.values())
for path in ("qkv.kernel", "qkv.bias"):
    q, k, v = (orbax.part_sharding(specs[path], part, shardings[path]) for part in specs[path].parts)
    rest = (M,) if path == "qkv.kernel" else ()
    assert q.shard_shape((4 * D, *rest)) == (4 * D // 8, *rest)
    assert k == v
    assert k.shard_shape((K * D, *rest)) == (D, *rest)
    rows = [k.devices_indices_map((K * D, *rest))[device][0].indices(K * D)[0] for device in devices]
    assert rows == [0] * 4 + [D] * 4
# Rows of a checkpoint tensor are columns of the parameter.
assert orbax.part_sharding(specs["o.kernel"], specs["o.kernel"].parts[0], shardings["o.kernel"]).spec == PartitionSpec(
    None, "tensor"
)

# A parameter of random values is the same on any mesh.
specs = [spec for spec in tiny_specs() if spec.path in ("o.kernel", "norm")]
alone = dummy_params(specs, seed=1)
spread = dummy_params(specs, seed=1, shardings=shardings_of(meshes[4], specs))
for path, array in spread.items():
    assert len(array.sharding.device_set) == 8
    np.testing.assert_array_equal(np.asarray(array), np.asarray(alone[path]))
print("all is well")
