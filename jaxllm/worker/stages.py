"""Stages: the model cut along its layers, each part with a mesh of its own. Without a pipeline there is one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
from jax.sharding import Mesh

from jaxllm.config import ModelConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.models.graph import ModelGraph, build_model_graph
from sharding.mesh import stage_meshes


@dataclass(frozen=True)
class Stage:
    """A part of the model.

    Attributes:
        layers: of the whole model.
        num_arrays: of the KV cache, that its layers use.
    """

    layers: range
    mesh: Mesh
    graph: ModelGraph
    num_arrays: int

    @property
    def is_here(self) -> bool:
        """Whether this process has any of its devices."""
        return any(device.process_index == jax.process_index() for device in self.mesh.devices.flat)


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Consecutive layers for each stage. Where they do not divide, the first stages get one more: the last has the output head.

    Raises:
        ValueError: if there are more stages than layers.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be split over {num_stages} stages")
    size, rest = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, rest) for stage in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def make_stages(
    model: ModelConfig, kv_cache_config: KVCacheConfig, mesh: Mesh, attention_backend: str, fp8_cache: bool, packed: bool
) -> list[Stage]:
    """The stages of a model on a mesh: as many as its axis pipeline is long."""
    meshes = stage_meshes(mesh)
    places = kv_cache_config.array_of_layer()
    stages = []
    for layers, stage_mesh in zip(split_layers(model.decoder.num_layers, len(meshes)), meshes, strict=True):
        kv_groups, num_arrays = _own_arrays(places[layers.start : layers.stop])
        graph = build_model_graph(
            model.decoder,
            model.dtype,
            kv_groups=kv_groups,
            num_stripes=stage_mesh.shape["tensor"],
            mesh=stage_mesh if stage_mesh.size > 1 else None,
            attention_backend=attention_backend,
            layers=layers,
            fp8_cache=fp8_cache,
            packed=packed,
        )
        stages.append(Stage(layers, stage_mesh, graph, num_arrays))
    return stages


def _own_arrays(places: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """(group, array) of each layer of a stage with its arrays counted from 0, and how many they are."""
    arrays = sorted({array for _, array in places})
    return [(group, arrays.index(array)) for group, array in places], len(arrays)
