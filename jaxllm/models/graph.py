"""A model without its weights: built once and abstractly, given its weights inside every jitted step.

As an argument of a jitted function a module costs milliseconds a call; a flat tuple of arrays does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import DecoderConfig, DType
from jaxllm.layers.spec import ParamSpec
from jaxllm.models.decoder import Decoder
from jaxllm.models.decoder_params import TIED_TABLE
from jaxllm.models.registry import model_class
from kernels_pallas.llvm.matmul import pack, packed_shape


@dataclass(frozen=True)
class ModelGraph:
    """The structure of a model.

    Attributes:
        specs: its parameters; `bind` takes the weights in this order.
        vocab_size: V as `compute_logits` gives it, with what fills it up for the devices to share it evenly.
        shapes: of the weights as `bind` takes them: the specs', but for matrices that are packed.
    """

    specs: tuple[ParamSpec, ...]
    vocab_size: int
    shapes: tuple[tuple[int, ...], ...]
    _graphdef: Any
    _treedef: Any
    _order: tuple[int, ...]

    def arrange(self, weights: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Weights as the specs say -> as `bind` takes them. Those that are packed are deleted, one after the other."""
        return tuple(
            weight if weight.shape == shape else _packed(weight, transposed=not spec.transpose)
            for spec, weight, shape in zip(self.specs, weights, self.shapes, strict=True)
        )

    def bind(self, weights: Sequence[jax.Array]) -> Decoder:
        """The model with these weights, as `arrange` gives them; to be called inside a jitted function.

        Raises:
            ValueError: if number, shape or dtype of the weights is not that of `specs`.
        """
        if len(weights) != len(self.specs):
            raise ValueError(f"the model has {len(self.specs)} parameters, got {len(weights)} weights")
        for spec, shape, weight in zip(self.specs, self.shapes, weights, strict=True):
            if weight.shape != shape or weight.dtype != jnp.dtype(spec.dtype):
                raise ValueError(f"{spec.path} must be {spec.dtype} {shape}, got {weight.dtype} {weight.shape}")
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, [weights[index] for index in self._order]))


def build_model_graph(
    config: DecoderConfig,
    dtype: DType,
    *,
    kv_groups: Sequence[tuple[int, int]],
    num_stripes: int = 1,
    mesh: Mesh | None = None,
    attention_backend: str = "auto",
    layers: range | None = None,
    fp8_cache: bool = False,
    packed: bool = False,
) -> ModelGraph:
    """Build a model abstractly; no parameter is allocated. Arguments as those of `Decoder`.

    Raises:
        ValueError: if the architecture is not supported or an argument does not fit it.
    """
    cls = model_class(config.architecture)
    model = nnx.eval_shape(
        lambda: cls(
            config,
            jnp.dtype(dtype),
            kv_groups=kv_groups,
            num_stripes=num_stripes,
            mesh=mesh,
            attention_backend=attention_backend,
            layers=layers,
            fp8_cache=fp8_cache,
            packed=packed,
        )
    )
    specs = tuple(cls.param_specs(config, dtype, num_stripes, layers, fp8_cache=fp8_cache))
    index_of = {spec.path: index for index, spec in enumerate(specs)}
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    assert len(leaves) == len(specs), f"{len(leaves)} parameters built, {len(specs)} specified"
    order, shapes = [], [spec.shape for spec in specs]
    for path, leaf in leaves:
        name = ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
        index = index_of[_path_in_whole_model(name, layers)]
        expected = _packed_shape(specs[index]) if packed else specs[index].shape
        assert leaf.shape == expected, f"{specs[index].path}: {leaf.shape} built, {expected} specified"
        order.append(index)
        shapes[index] = leaf.shape
    return ModelGraph(specs, cls.padded_vocab_size(config, num_stripes), tuple(shapes), graphdef, treedef, tuple(order))


def _packed_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Of a parameter of a model whose matrices are packed. One that is not transposed, a table, is used as [V, M]."""
    if len(spec.shape) != 2:
        return spec.shape
    return packed_shape(*(spec.shape if spec.transpose else spec.shape[::-1]), spec.dtype)


def _packed(weight: jax.Array, *, transposed: bool) -> jax.Array:
    packed = jax.block_until_ready(_pack(weight, transposed=transposed))
    weight.delete()
    return packed


@partial(jax.jit, static_argnames="transposed")
def _pack(weight: jax.Array, *, transposed: bool) -> jax.Array:
    return pack(weight.T if transposed else weight)


def _path_in_whole_model(path: str, layers: range | None) -> str:
    """The path that a parameter of a stage has in its ParamSpec."""
    if layers is None or layers.start == 0:
        return path
    kind, _, rest = path.partition(".")
    if kind == "layers":
        layer, _, rest = rest.partition(".")
        return f"layers.{int(layer) + layers.start}.{rest}"
    return TIED_TABLE if kind == "embed" else path
