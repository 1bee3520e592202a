"""Scales of quantized numbers: a checkpoint has one a row, one for all, or none, under one of several names."""

from collections.abc import Sequence

import numpy as np

from jaxllm.layers.spec import ParamSpec, ScalePart
from jaxllm.weights.reader import FLOAT_TYPES, TensorReader


class CompletedReader:
    """The tensors of a checkpoint, with every scale of some parameters in full, under its first name (`reader.TensorReader`).

    Raises:
        ValueError: naming the tensor, if a scale is neither a number nor one a row, or not positive and finite.
    """

    def __init__(self, reader: TensorReader, specs: Sequence[ParamSpec]) -> None:
        self._reader = reader
        self.shapes, self.dtypes = dict(reader.shapes), dict(reader.dtypes)
        self._scales: dict[str, np.ndarray] = {}
        self._sources: dict[str, str] = {}
        for spec in specs:
            for part in spec.parts:
                if isinstance(part, ScalePart):
                    self._add(part)

    def where(self, name: str) -> str:
        return self._reader.where(self._sources.get(name, name))

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        if name in self._scales:
            out[...] = self._scales[name][index]
        else:
            self._reader.read(name, index, out)

    def _add(self, part: ScalePart) -> None:
        found = [name for name in (part.name, *part.other_names) if name in self._reader.shapes]
        scales = np.ones(part.shape, np.float32)
        if found:
            values = self._read(found[0])
            if values.size not in (1, scales.size):
                raise ValueError(f"{self._named(found[0])} has shape {values.shape}, the model needs {part.shape} or one number")
            if not (np.isfinite(values).all() and (values > 0).all()):
                raise ValueError(f"{self._named(found[0])} must be positive and finite, got {values.tolist()}")
            scales[...] = values.reshape(-1) if values.size == scales.size else values.item()
            del self.shapes[found[0]], self.dtypes[found[0]]
            self._sources[part.name] = found[0]
        self.shapes[part.name], self.dtypes[part.name] = part.shape, "float32"
        self._scales[part.name] = scales

    def _read(self, name: str) -> np.ndarray:
        shape = self._reader.shapes[name]
        if self._reader.dtypes[name] not in FLOAT_TYPES:
            raise ValueError(f"{self._named(name)} has type {self._reader.dtypes[name]}, which is not supported")
        values = np.empty(shape, np.float32)
        self._reader.read(name, tuple(slice(0, size) for size in shape), values)
        return values

    def _named(self, name: str) -> str:
        return f"tensor {name} of {self._reader.where(name)}"
