"""What every checkpoint file can do for the loader: tell names, shapes and types, and copy out a slice."""

import math
from collections.abc import Mapping
from typing import Protocol

import ml_dtypes
import numpy as np

from jaxllm.weights.source import ModelSource

FLOAT_TYPES = ("float64", "float32", "float16", "bfloat16")
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Rows and columns of a block of a transposed copy: both sides of it fit in the first-level cache.
_BLOCK = 128


class TensorReader(Protocol):
    """The tensors of a checkpoint under their Hugging Face names.

    Attributes:
        shapes: of every tensor; a linear layer's weight is [out, in].
        dtypes: the NumPy (or ml_dtypes) name of the type of the values that `read` gives; the file's own name for a type
            that is no floating point number, which cannot be read.
        where: the file that holds a tensor, for messages.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def where(self, name: str) -> str: ...

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Copy `tensor[index]` into `out`, of that shape, any strides and any floating dtype; several threads may call it."""


def open_reader(source: ModelSource) -> TensorReader:
    """A reader of the tensors of `source`.

    Raises:
        ValueError: naming the file that cannot be read, or if the source has no weights.
    """
    if source.kind == "safetensors":
        from jaxllm.weights.safetensors import SafetensorsReader

        return SafetensorsReader(source.path)
    if source.kind == "gguf":
        from jaxllm.weights.gguf import GgufFile, GgufReader

        return GgufReader(GgufFile(source.path))
    if source.kind == "orbax":
        from jaxllm.weights.orbax import OrbaxReader

        return OrbaxReader(source.path)
    raise ValueError(f"model {source.model!r} was resolved without its weights")


def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype of a floating point type's name."""
    return _BFLOAT16 if name == "bfloat16" else np.dtype(name)


def float16_overflow(reader: TensorReader, name: str) -> ValueError:
    """The error for a tensor that does not fit the type that was asked for."""
    return ValueError(f"tensor {name} of {reader.where(name)} has values that float16 cannot hold; use bfloat16 or float32")


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that starts on a 64-byte boundary: the CPU backend takes it over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def copy_cast(src: np.ndarray, out: np.ndarray) -> None:
    """`out[...] = src`, of the same shape, rounding to nearest where `out` is narrower.

    Faster than NumPy alone where one of the two is transposed, and for bfloat16.
    """
    assert src.shape == out.shape, (src.shape, out.shape)
    if src.dtype == out.dtype == _BFLOAT16:
        src, out = src.view(np.uint16), out.view(np.uint16)
    same_order = src.ndim != 2 or (src.strides[0] < src.strides[1]) == (out.strides[0] < out.strides[1])
    # Who asks for float16 looks for what it could not hold.
    with np.errstate(over="ignore"):
        if same_order:
            np.copyto(out, src, casting="unsafe")
            return
        for row in range(0, src.shape[0], _BLOCK):
            for col in range(0, src.shape[1], _BLOCK):
                block = np.s_[row : row + _BLOCK, col : col + _BLOCK]
                # Converting in order and turning what is in the cache beats doing both at once.
                out[block] = src[block].astype(out.dtype)
