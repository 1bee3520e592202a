"""How values cross to another process: msgpack in the first frame, large arrays as frames of their own.

Values keep their Python types: None, bool, int (64 bits), float, str, bytes, list, tuple, set, dict, NumPy arrays, and such
dataclasses as a packer and an unpacker know. NumPy scalars arrive as Python's. Nothing is pickled: what arrives runs no code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import msgspec
import numpy as np

from jaxllm.core.output import LogprobsLists
from jaxllm.executor.shm_queue import Buffer, Frames
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

# A smaller array is copied into the first frame: a frame of its own costs about as much as copying this.
LEAST_FRAME_BYTES = 4096

_TUPLE, _SET, _DICT, _ARRAY, _DATACLASS = range(1, 6)

_DEFAULT_PARAMS = SamplingParams()
_PARAMS_FIELDS = tuple(field.name for field in fields(SamplingParams))

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


class Packer:
    """Turns values into what msgpack knows; arrays that deserve it go to `frames`, whose first is kept for the rest."""

    dataclasses: ClassVar[Mapping[str, type]] = {}

    def __init__(self) -> None:
        self.frames: list[Buffer] = [b""]

    def finish(self, packed: Any) -> list[Buffer]:
        self.frames[0] = encode(packed)
        return self.frames

    def array(self, array: np.ndarray) -> Buffer | int:
        """Its bytes, or the number of the frame that has them."""
        if array.nbytes < LEAST_FRAME_BYTES:
            return array.tobytes()
        self.frames.append(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        return len(self.frames) - 1

    def logprobs(self, logprobs: LogprobsLists) -> tuple[Any, ...]:
        token_ids, values, ranks = logprobs
        return (
            token_ids.shape[1],
            self.array(token_ids.astype(np.int32, copy=False)),
            self.array(values.astype(np.float32, copy=False)),
            self.array(ranks.astype(np.int32, copy=False)),
        )

    def value(self, value: Any) -> Any:
        """Any value of a call; TypeError if it cannot be sent."""
        if value is None or type(value) in (bool, str, bytes):
            return value
        if isinstance(value, np.generic):
            return self.value(value.item())
        if isinstance(value, int):
            if not -(2**63) <= value < 2**64:
                raise TypeError(f"an integer must fit in 64 bits to be sent to another process, got {value}")
            return int(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, tuple):
            return self._tagged(_TUPLE, [self.value(item) for item in value])
        if isinstance(value, set | frozenset):
            return self._tagged(_SET, [self.value(item) for item in value])
        if isinstance(value, dict):
            if all(type(key) is str for key in value):
                return {key: self.value(item) for key, item in value.items()}
            return self._tagged(_DICT, [(self.value(key), self.value(item)) for key, item in value.items()])
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return self._tagged(_ARRAY, (value.dtype.str, value.shape, self.array(value)))
        name = type(value).__name__
        if self.dataclasses.get(name) is type(value):
            return self._tagged(_DATACLASS, (name, [self.value(getattr(value, field.name)) for field in fields(value)]))
        raise TypeError(f"a {name} cannot be sent to another process, got {value!r}")

    def params(self, params: SamplingParams) -> dict[str, Any]:
        """Sampling parameters: only those that are not the default."""
        packed = {}
        for name in _PARAMS_FIELDS:
            value = getattr(params, name)
            if value != getattr(_DEFAULT_PARAMS, name):
                packed[name] = self.value(value)
        return packed

    @staticmethod
    def _tagged(tag: int, packed: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(tag, encode(packed))


class Unpacker:
    """The way back."""

    dataclasses: ClassVar[Mapping[str, type]] = {}

    def __init__(self, frames: Frames) -> None:
        self.frames = frames

    def array(self, data: Buffer | int, dtype: Any) -> np.ndarray:
        """1-d, over the memory that was received."""
        return np.frombuffer(self.frames[data] if isinstance(data, int) else data, dtype)

    def logprobs(self, packed: Sequence[Any]) -> LogprobsLists:
        width, token_ids, values, ranks = packed
        ranks = self.array(ranks, np.int32)
        shape = (len(ranks), width)
        return LogprobsLists(self.array(token_ids, np.int32).reshape(shape), self.array(values, np.float32).reshape(shape), ranks)

    def params(self, packed: Mapping[str, Any]) -> SamplingParams:
        """They are not checked again."""
        params = SamplingParams()
        for name, value in packed.items():
            setattr(params, name, self.value(value))
        params.output_kind = RequestOutputKind(params.output_kind)
        return params

    def value(self, packed: Any) -> Any:
        if isinstance(packed, list):
            return [self.value(item) for item in packed]
        if isinstance(packed, dict):
            return {key: self.value(item) for key, item in packed.items()}
        if isinstance(packed, msgspec.msgpack.Ext):
            return self._tagged(packed.code, decode(packed.data))
        return packed

    def _tagged(self, tag: int, packed: Any) -> Any:
        if tag == _TUPLE:
            return tuple(self.value(item) for item in packed)
        if tag == _SET:
            return {self.value(item) for item in packed}
        if tag == _DICT:
            return {self.value(key): self.value(item) for key, item in packed}
        if tag == _ARRAY:
            dtype, shape, data = packed
            return self.array(data, dtype).reshape(shape)
        if tag == _DATACLASS:
            name, values = packed
            cls = self.dataclasses[name]
            return cls(*map(self.value, values))
        raise ValueError(f"unknown tag {tag} in a message")
