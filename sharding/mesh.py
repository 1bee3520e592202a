"""Meshes of devices."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

MESH_AXES = ("data", "pipeline", "tensor", "expert")


def make_mesh(devices: Sequence[jax.Device], *, data: int = 1, pipeline: int = 1, tensor: int = 1, expert: int = 1) -> Mesh:
    """A mesh with the axes data, pipeline, tensor and expert over `devices`, in the order given; tensor neighbours are near.

    Raises:
        ValueError: if a size is below 1, or their product is not the number of devices.
    """
    sizes = dict(zip(MESH_AXES, (data, pipeline, tensor, expert), strict=True))
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"mesh axis {name!r} must have a size of at least 1, got {size!r}")
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(f"a mesh of {sizes} needs {math.prod(sizes.values())} devices, got {len(devices)}")
    array = np.asarray(devices, dtype=object).reshape(tuple(sizes.values()))
    return Mesh(array, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def stage_meshes(mesh: Mesh) -> list[Mesh]:
    """The meshes of the stages of a pipeline, with the same axes: `mesh` cut along its axis pipeline."""
    axis = mesh.axis_names.index("pipeline")
    parts = np.split(mesh.devices, mesh.shape["pipeline"], axis)
    return [Mesh(part, mesh.axis_names, axis_types=mesh.axis_types) for part in parts]
