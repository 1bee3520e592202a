"""Safetensors files: one, or several with an index."""

import json
from pathlib import Path

import numpy as np

from jaxllm.weights.reader import copy_cast, dtype_of
from jaxllm.weights.source import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsReader:
    """The tensors of a folder with safetensors files, memory-mapped (`reader.TensorReader`).

    Raises:
        ValueError: naming the file, if it is missing, truncated or corrupt, if the index does not agree with the files, or if a
            tensor is given twice.
    """

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        self._arrays: dict[str, np.ndarray] = {}
        files, index = _find_files(folder)
        for path in files:
            self._open(path)
        if index is not None:
            self._check_index(folder / INDEX_NAME, index)

    def where(self, name: str) -> str:
        return str(self._files[name])

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        copy_cast(self._arrays[name][index], out)

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            # The library checks the header: sizes, offsets, that the tensors cover the file. It copies what it reads, and
            # does so before it can be cast or transposed, so the values are taken from a mapping of our own.
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a readable safetensors file, it may be incomplete ({error})") from error
        data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes())
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in self._files:
                raise ValueError(f"tensor {name} is given twice: in {self._files[name]} and in {path}")
            self._files[name] = path
            self.shapes[name] = tuple(entry["shape"])
            self.dtypes[name] = _FLOATS.get(entry["dtype"], entry["dtype"])
            if entry["dtype"] in _FLOATS:
                first, last = entry["data_offsets"]
                values = data[start + first : start + last].view(dtype_of(self.dtypes[name]))
                self._arrays[name] = values.reshape(self.shapes[name])

    def _check_index(self, index_path: Path, index: dict[str, str]) -> None:
        for name, file in index.items():
            if name not in self._files:
                raise ValueError(f"{index_path}: tensor {name} is not in {file}")
            if self._files[name].name != file:
                raise ValueError(f"{index_path}: tensor {name} is not in {file} but in {self._files[name].name}")
        for name, path in self._files.items():
            if name not in index:
                raise ValueError(f"{index_path}: tensor {name} of {path.name} is not in the index")


def _find_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    index_path = folder / INDEX_NAME
    single = folder / SINGLE_NAME
    if not index_path.is_file():
        return ([single] if single.is_file() else sorted(folder.glob("*.safetensors"))), None
    index = read_json(index_path).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{index_path}: it has no 'weight_map' of tensor names to file names")
    names = sorted(set(index.values()))
    if single.is_file() and SINGLE_NAME not in names:
        raise ValueError(f"{folder} holds {SINGLE_NAME} and an index that does not name it: remove one of the two")
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{index_path}: it names the file {name!r}, which is not in the folder")
    return [folder / name for name in names], index
