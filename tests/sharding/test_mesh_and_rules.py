"""Meshes and the table of logical axes, on the devices there are; four simulated ones in tests/models/test_tensor_parallel.py."""

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxllm.config import DecoderConfig, RopeConfig
from jaxllm.models.decoder import Decoder
from sharding.mesh import make_mesh
from sharding.rules import KV_CACHE_AXES, RULES, sharding_of, spec_of


def test_a_mesh_has_all_four_axes():
    mesh = make_mesh(jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "pipeline": 1, "tensor": 1, "expert": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"tensor": 2}, "needs 2 devices, got 1"), ({"data": 0}, "'data' must have a size of at least 1, got 0")],
)
def test_sizes_must_fit_the_devices(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(jax.devices()[:1], **sizes)


def test_logical_axes_go_where_the_table_says():
    assert spec_of((None, "heads")) == PartitionSpec(None, "tensor")
    assert spec_of(KV_CACHE_AXES) == PartitionSpec(None, None, "tensor", None, None)
    assert spec_of(("expert", None, "rows")) == PartitionSpec("expert", None, "data")
    mesh = make_mesh(jax.devices()[:1])
    assert sharding_of(mesh, ("vocab", None)) == NamedSharding(mesh, PartitionSpec("tensor", None))


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="'head' is unknown; known: expert, heads"):
        spec_of(("head",))


def test_the_axes_of_all_parameters_are_in_the_table():
    config = DecoderConfig("LlamaForCausalLM", 10, 8, 12, 1, 4, 2, 6, 32, 1e-5, RopeConfig(), qkv_bias=True, mlp_bias=True)
    axes = {axis for spec in Decoder.param_specs(config, "float32") for axis in spec.axes if axis}
    assert axes == {"heads", "mlp", "vocab"}
    assert axes < set(RULES)
