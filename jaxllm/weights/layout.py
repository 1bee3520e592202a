"""How checkpoint tensors on the devices become a parameter."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm.layers.spec import ParamSpec, Part


@dataclass(frozen=True)
class Layout:
    """What parameters of the same kind have in common, whatever their tensors are called. Hashable.

    Attributes:
        parts: without their names.
    """

    parts: tuple[Part, ...]
    transpose: bool
    num_stripes: int

    @classmethod
    def of(cls, spec: ParamSpec) -> "Layout":
        return cls(tuple(dataclasses.replace(part, name="") for part in spec.parts), spec.transpose, spec.num_stripes)

    def assemble(self, tensors: tuple[jax.Array, ...]) -> jax.Array:
        """The parameter, from the tensors of its parts in their order. Inside jit or outside."""
        arrays = []
        for tensor, part in zip(tensors, self.parts, strict=True):
            array = _expand(tensor, part)
            if self.transpose:
                array = array.T
            arrays.append(array.reshape(*array.shape[:-1], self.num_stripes, -1))
        joined = jnp.concatenate(arrays, axis=-1)
        return joined.reshape(*joined.shape[:-2], -1)


def _expand(array: jax.Array, part: Part) -> jax.Array:
    """Repeat and pad the rows of a part."""
    if part.repeat == 1 and not part.is_padded:
        return array
    before, after = part.shape[: part.axis], part.shape[part.axis + 1 :]
    groups = array.reshape(*before, -1, 1, part.group_size, *after)
    groups = jnp.broadcast_to(groups, (*before, groups.shape[part.axis], part.repeat, part.group_size, *after))
    groups = groups.reshape(*before, groups.shape[part.axis], -1, *after)
    rows = _pad(groups, part.axis + 1, part.group_padding).reshape(*before, -1, *after)
    return _pad(rows, part.axis, part.padding)


def _pad(array: jax.Array, axis: int, count: int) -> jax.Array:
    return jnp.pad(array, [(0, count if dim == axis else 0) for dim in range(array.ndim)])
