"""How a model tells what its parameters are and which checkpoint tensors they are made of: names and shapes only."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor that goes into a parameter.

    Attributes:
        name: the Hugging Face name, as in a safetensors file.
        shape: in the checkpoint; a linear layer's weight is [out, in].
        repeat: how often each group of `repeat_size` rows is repeated in place, for KV heads that are fewer than devices.
        group_padding: rows of zeros that follow each group of `repeat_size` rows, its repetitions included.
        padding: rows of zeros that follow everything.
        axis: the dimension of the checkpoint tensor whose rows these are.
    """

    name: str
    shape: tuple[int, ...]
    repeat: int = 1
    repeat_size: int = 1
    group_padding: int = 0
    padding: int = 0
    axis: int = 0

    @property
    def group_size(self) -> int:
        """Rows that are repeated and padded together: all of them where nothing is."""
        return self.repeat_size if self.repeat > 1 or self.group_padding else self.shape[self.axis]

    @property
    def group_stride(self) -> int:
        """Rows that a group becomes."""
        return self.group_size * self.repeat + self.group_padding

    @property
    def expanded_shape(self) -> tuple[int, ...]:
        """With repetitions and padding, before any transposition."""
        size = self.shape[self.axis] // self.group_size * self.group_stride + self.padding
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])

    @property
    def is_padded(self) -> bool:
        return bool(self.group_padding or self.padding)


@dataclass(frozen=True)
class ScalePart(Part):
    """Scales of quantized numbers: positive. A checkpoint may have a single one for all rows, of any shape, or none, which is 1
    for all; padding rows are 1 too.

    Attributes:
        other_names: that checkpoints also have for it.
    """

    other_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a model.

    The parts, repeated and padded, are transposed if `transpose` (so that a linear kernel is [in, out]) and concatenated along
    the last axis. With
    `num_stripes` S the last axis is cut into S equal stripes, each holding the S-th share of every part: when S devices share
    the axis, each finds its own share of q, k and v (or of gate and up) side by side, and nothing moves between devices.

    Attributes:
        path: where the parameter is in the model, dot separated.
        dtype: name of the NumPy (or ml_dtypes) type.
        axes: the logical axis of each dimension, None for one that is never sharded; `sharding.rules` maps them to a mesh.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    parts: tuple[Part, ...]
    transpose: bool = False
    num_stripes: int = 1

    def __post_init__(self) -> None:
        size = sum(math.prod(part.expanded_shape) for part in self.parts)
        assert size == math.prod(self.shape), f"{self.path}: parts hold {size} elements, the parameter {self.shape}"
        assert len(self.axes) == len(self.shape)
        assert self.shape[-1] % self.num_stripes == 0
