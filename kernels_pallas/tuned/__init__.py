"""Sizes of kernels that were found by measuring, as data: a JSON file a GPU model in this folder.

    {"device_kind": "NVIDIA H200", "rows": [{"op": "mosaic_decode", "call": {"num_heads": 32, ...}, "sizes": {"tile": 64, ...},
                                             "microseconds": 41.2, "untuned_microseconds": 44.0, "jax": "0.11.2"}]}

A row holds for calls of exactly these shapes on exactly this device. Where none fits, the rules in the kernels' `config.py`
decide.
`python -m kernels_pallas.tune OP` writes the rows.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

FOLDER = Path(__file__).parent
# Sizes that each operation may have in its rows, all of them fields of the kernels' configuration.
SIZES = {
    "mosaic_decode": ("tile", "decode_stages", "decode_slots", "min_tiles"),
    "mosaic_prefill": ("prefill_tile", "prefill_stages"),
}


@dataclass(frozen=True)
class Row:
    """What was found for one call.

    Attributes:
        call: static shapes by name, those of the kernels' `Call`.
        sizes: by name, of `SIZES[op]`.
        microseconds, untuned_microseconds: of a call with these sizes, and with those of the rules in code.
        jax: the version that compiled it.
    """

    op: str
    call: dict[str, Any]
    sizes: dict[str, int]
    microseconds: float
    untuned_microseconds: float
    jax: str

    def __post_init__(self) -> None:
        if self.op not in SIZES:
            raise ValueError(f"op must be one of {', '.join(SIZES)}, got {self.op!r}")
        for name, value in self.sizes.items():
            if name not in SIZES[self.op]:
                raise ValueError(f"sizes of {self.op} are {', '.join(SIZES[self.op])}, got {name!r}")
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")

    def is_for(self, op: str, call: NamedTuple) -> bool:
        """Whether the row is for that call; what the row does not name must have its default there."""
        return op == self.op and call._field_defaults | self.call == call._asdict()


def file_of(device_kind: str, folder: Path = FOLDER) -> Path:
    """Where the rows of a GPU model are, by the name that the driver has for it."""
    return folder / (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json")


def read_rows(device_kind: str, folder: Path = FOLDER) -> tuple[Row, ...]:
    """The rows of a GPU model; none if it has no file.

    Raises:
        ValueError: if the file is not as it must be.
    """
    path = file_of(device_kind, folder)
    if not path.exists():
        return ()
    try:
        content = json.loads(path.read_text())
        if content["device_kind"] != device_kind:
            raise ValueError(f"it is of {content['device_kind']!r}, not {device_kind!r}")
        return tuple(Row(**row) for row in content["rows"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def write_rows(device_kind: str, rows: Sequence[Row], folder: Path = FOLDER) -> Path:
    """Write the file of a GPU model anew, a row a line in the order of their shapes, and return its path."""
    lines = sorted(json.dumps(dataclasses.asdict(row)) for row in rows)
    text = ",\n".join(lines)
    path = file_of(device_kind, folder)
    path.write_text(f'{{"device_kind": {json.dumps(device_kind)}, "rows": [\n{text}\n]}}\n')
    return path


class Table:
    """The rows that launches of kernels take their sizes from, read once a GPU model.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self._rows: dict[str, list[Row]] = {}

    def rows(self, device_kind: str) -> list[Row]:
        """All rows of a GPU model."""
        if device_kind not in self._rows:
            self._rows[device_kind] = list(read_rows(device_kind, self.folder))
        return self._rows[device_kind]

    def sizes(self, op: str, call: NamedTuple, device_kind: str) -> dict[str, int]:
        """What was found for a call; nothing if it was not measured."""
        return next((row.sizes for row in self.rows(device_kind) if row.is_for(op, call)), {})

    def put(self, device_kind: str, call: NamedTuple, row: Row | None, op: str) -> None:
        """Let launches use this row for the call from now on; None for none."""
        rows = [old for old in self.rows(device_kind) if not old.is_for(op, call)]
        self._rows[device_kind] = rows + ([] if row is None else [row])


@functools.cache
def table() -> Table:
    """The one that comes with the kernels."""
    return Table()


def target_device_kind() -> str:
    """The GPU model that is being lowered for: that of the mesh in force if its devices are known, else the first one's here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind
