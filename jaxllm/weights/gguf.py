"""GGUF files: metadata, and tensors under their Hugging Face names.

The header is parsed here and its arrays are decoded only when asked for: the gguf package makes an array object of every
token, which takes seconds for a real vocabulary. Block formats are decoded by the gguf package.
Format: the ggml project's docs/gguf.md.
"""

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.weights.reader import copy_cast

SUPPORTED_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Type number in the file → struct code, for numbers.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q").unpack_from
_U32 = struct.Struct("<I").unpack_from

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Not a weight: gguf_config makes the rope parameters of it.
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        shape: row-major, as in a Hugging Face checkpoint.
        type_id: number of the ggml type.
        start: of its data in the file, bytes.
    """

    shape: tuple[int, ...]
    type_id: int
    start: int


class GgufFile:
    """The header of a GGUF file; `metadata` decodes a value when it is looked up.

    Raises:
        ValueError: naming the file, if it is no GGUF file, is truncated, or is one part of a split model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        if self.data[:4].tobytes() != _MAGIC:
            raise ValueError(f"{path}: not a GGUF file")
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ValueError(f"{path}: the GGUF header is truncated or corrupt ({error})") from error
        if self.metadata.get("split.count", 0) > 1:
            raise ValueError(f"{path}: a part of a model split over {self.metadata['split.count']} files; merge them into one")

    def _parse(self) -> None:
        data = self.data.data
        (version,) = _U32(data, 4)
        if version not in _VERSIONS:
            raise ValueError(f"{self.path}: GGUF version {version} is not supported, only {_VERSIONS} (little endian)")
        (num_tensors,), (num_values,) = _U64(data, 8), _U64(data, 16)
        pos = 24
        values: dict[str, Callable[[], Any]] = {}
        for _ in range(num_values):
            key, pos = _read_string(data, pos)
            values[key], pos = _read_value(data, pos + 4, *_U32(data, pos))
        self.metadata = _Metadata(values)
        infos: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name, pos = _read_string(data, pos)
            (num_dims,) = _U32(data, pos)
            *dims, type_id, start = struct.unpack_from(f"<{num_dims}QIQ", data, pos + 4)
            pos += 4 + 8 * num_dims + 12
            if name in infos:
                raise ValueError(f"{self.path}: tensor {name} is given twice")
            infos[name] = TensorInfo(tuple(reversed(dims)), type_id, start)
        alignment = self.metadata.get("general.alignment", 32)
        base = -(-pos // alignment) * alignment
        self.tensors = {name: TensorInfo(t.shape, t.type_id, base + t.start) for name, t in infos.items()}

    @property
    def architecture(self) -> str:
        """`general.architecture`, one of `SUPPORTED_ARCHITECTURES`.

        Raises:
            ValueError: if it is another.
        """
        name = self.metadata.get("general.architecture")
        if name not in SUPPORTED_ARCHITECTURES:
            raise ValueError(
                f"{self.path}: GGUF architecture {name!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        return name

    def float_tensor(self, name: str) -> np.ndarray:
        """A small tensor that must be stored as float32."""
        info = self.tensors[name]
        if info.type_id != 0:
            raise ValueError(f"{self.path}: tensor {name} must be F32")
        values = self.data[info.start : info.start + 4 * int(np.prod(info.shape))]
        if values.size != 4 * int(np.prod(info.shape)):
            raise ValueError(f"{self.path}: truncated in tensor {name}")
        return values.view(np.float32).reshape(info.shape)


class GgufReader:
    """The tensors of a GGUF file under their Hugging Face names and in that layout (`reader.TensorReader`).

    Quantized blocks are decoded to float32 as they are read, only those that hold the slice asked for. For the architecture
    "llama" the file keeps the two rotary halves of a head interleaved; here they are one after the other again.

    Raises:
        ValueError: naming the tensor, if it has no place in the architecture, its type is not supported or its data is cut off.
    """

    def __init__(self, file: GgufFile) -> None:
        import gguf

        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._path = file.path
        self._rows: dict[str, np.ndarray] = {}
        self._types: dict[str, Any] = {}
        self._order: dict[str, np.ndarray] = {}
        llama = file.architecture == "llama"
        num_heads = file.metadata.get(f"{file.architecture}.attention.head_count")
        num_kv_heads = file.metadata.get(f"{file.architecture}.attention.head_count_kv", num_heads)
        for gguf_name, info in file.tensors.items():
            if gguf_name == ROPE_FREQS:
                continue
            name = hf_name(gguf_name)
            if name is None:
                raise ValueError(f"{file.path}: tensor {gguf_name} has no place in architecture {file.architecture!r}")
            kind = _tensor_type(file.path, gguf_name, info)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            row_len = info.shape[-1] if info.shape else 1
            if row_len % block:
                raise ValueError(f"{file.path}: tensor {gguf_name} has rows of {row_len}, no multiple of {kind.name}'s {block}")
            num_rows = int(np.prod(info.shape[:-1]))
            row_bytes = row_len // block * block_bytes
            raw = file.data[info.start : info.start + num_rows * row_bytes]
            if raw.size != num_rows * row_bytes:
                raise ValueError(f"{file.path}: the file is truncated, it ends within tensor {gguf_name}")
            self._rows[name] = raw.reshape(num_rows, row_bytes)
            self._types[name] = kind
            self.shapes[name] = info.shape
            self.dtypes[name] = {"BF16": "bfloat16", "F16": "float16"}.get(kind.name, "float32")
            if llama and ".attn_q." in gguf_name:
                self._order[name] = _rotary_order(info.shape[0], num_heads)
            elif llama and ".attn_k." in gguf_name:
                self._order[name] = _rotary_order(info.shape[0], num_kv_heads)

    def where(self, name: str) -> str:
        return str(self._path)

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        import gguf

        shape, order = self.shapes[name], self._order.get(name)
        if len(shape) == 1:
            values = gguf.dequantize(self._rows[name][0], self._types[name])
            copy_cast((values if order is None else values[order])[index], out)
            return
        assert len(shape) == 2, (name, shape)
        rows, cols = index[0], index[1].indices(shape[1])
        raw = self._rows[name][rows if order is None else order[rows]]
        block, block_bytes = gguf.GGML_QUANT_SIZES[self._types[name]]
        first, last = cols[0] // block, -(-cols[1] // block)
        raw = raw[:, first * block_bytes : last * block_bytes]
        # The package changes the type by a view, for which a row must be contiguous.
        values = gguf.dequantize(np.ascontiguousarray(raw), self._types[name])
        copy_cast(values[:, cols[0] - first * block : cols[1] - first * block], out)


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a tensor of the Llama family, None for one that such a model has not."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _TOP_NAMES.get(name)


def _tensor_type(path: Path, name: str, info: TensorInfo) -> Any:
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(info.type_id)
    except ValueError:
        raise ValueError(f"{path}: tensor {name} has the unknown ggml type {info.type_id}") from None
    if kind.name not in SUPPORTED_TYPES:
        raise ValueError(f"{path}: tensor {name} is {kind.name}, which is not supported; supported: {', '.join(SUPPORTED_TYPES)}")
    return kind


def _rotary_order(num_rows: int, num_heads: int) -> np.ndarray:
    """For each row of the Hugging Face tensor the row of the file: row j*D/2 + i of a head lies at 2*i + j."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


class _Metadata(Mapping[str, Any]):
    """Key → value, decoded at each look-up."""

    def __init__(self, values: dict[str, Callable[[], Any]]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _read_string(data: memoryview, pos: int) -> tuple[str, int]:
    end = pos + 8 + _U64(data, pos)[0]
    if end > len(data):
        raise struct.error(f"a string ends at byte {end} of {len(data)}")
    return str(data[pos + 8 : end], "utf-8"), end


def _read_value(data: memoryview, pos: int, type_id: int) -> tuple[Callable[[], Any], int]:
    """A function that decodes the value at `pos`, and where the next one starts."""
    if type_id in _SCALARS:
        (value,) = struct.unpack_from("<" + _SCALARS[type_id], data, pos)
        return (lambda: value), pos + struct.calcsize(_SCALARS[type_id])
    if type_id == _STRING:
        text, end = _read_string(data, pos)
        return (lambda: text), end
    if type_id != _ARRAY:
        raise struct.error(f"value type {type_id} is unknown")
    (item,), (count,) = _U32(data, pos), _U64(data, pos + 4)
    pos += 12
    if item in _SCALARS:
        layout = struct.Struct(f"<{count}{_SCALARS[item]}")
        if pos + layout.size > len(data):
            raise struct.error(f"an array ends at byte {pos + layout.size} of {len(data)}")
        return (lambda: list(layout.unpack_from(data, pos))), pos + layout.size
    if item != _STRING:
        raise struct.error(f"arrays of type {item} are not supported")
    end = pos
    for _ in range(count):
        end += 8 + _U64(data, end)[0]
    if end > len(data):
        raise struct.error(f"an array ends at byte {end} of {len(data)}")
    return (lambda: _decode_strings(data, pos, count)), end


def _decode_strings(data: memoryview, pos: int, count: int) -> list[str]:
    strings = []
    for _ in range(count):
        text, pos = _read_string(data, pos)
        strings.append(text)
    return strings
