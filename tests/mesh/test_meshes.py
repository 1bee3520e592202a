"""Meshes of several devices."""

import jax
import pytest
from devices import need_devices

from sharding.mesh import make_mesh, stage_meshes

pytestmark = pytest.mark.multi_gpu


def test_a_pipeline_is_cut_into_stages():
    need_devices(4)
    devices = jax.local_devices()[:4]
    mesh = make_mesh(devices, pipeline=2, tensor=2)
    stages = stage_meshes(mesh)
    assert [list(stage.devices.flat) for stage in stages] == [devices[:2], devices[2:]]
    for stage in stages:
        assert dict(stage.shape) == {"data": 1, "pipeline": 1, "tensor": 2, "expert": 1}
        assert stage.axis_types == mesh.axis_types


def test_tensor_neighbours_are_near():
    need_devices(8)
    devices = jax.local_devices()[:8]
    mesh = make_mesh(devices, data=2, pipeline=2, tensor=2)
    assert mesh.devices[0, 1, :, 0].tolist() == devices[2:4]
