"""What a folder of shipped programs was built for, so that one which does not fit is refused by name, not by a failing load."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "manifest.json"
_LONGEST = 300


def write_manifest(directory: Path, facts: Mapping[str, str], num_blocks: int) -> Path:
    """Write what the programs of `directory` depend on. Written last: a folder without it was not finished."""
    path = directory / NAME
    path.write_text(json.dumps({"num_blocks": num_blocks, "facts": dict(facts)}, indent=1))
    return path


def built_num_blocks(directory: str) -> int:
    """The number of blocks of the KV cache, which is part of the programs.

    Raises:
        ValueError: if the folder holds no shipped programs.
    """
    return _read(Path(directory))["num_blocks"]


def check_manifest(directory: Path, facts: Mapping[str, str]) -> None:
    """See that the programs were built for these facts.

    Raises:
        ValueError: naming all that differ, with both values.
    """
    built = _read(directory)["facts"]
    wrong = [
        f"{name}: built for {_short(built.get(name, 'nothing'))}, here it is {_short(facts.get(name, 'nothing'))}"
        for name in {**built, **facts}
        if built.get(name) != facts.get(name)
    ]
    if wrong:
        raise ValueError(f"compiled_dir {str(directory)!r} does not fit; build it anew. " + "; ".join(wrong))


def _read(directory: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / NAME).read_text())
        if isinstance(manifest["num_blocks"], int) and isinstance(manifest["facts"], dict):
            return manifest
        raise KeyError(NAME)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"compiled_dir {str(directory)!r} was not made by `python -m jaxllm.build`: {error!r}") from error


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else value[:_LONGEST] + "…"
