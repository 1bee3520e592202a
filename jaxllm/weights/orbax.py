"""Orbax checkpoints: a folder that alone is a model, written from any other kind or from a training run.

    config.json  generation_config.json  tokenizer.json  …      as in a Hugging Face folder
    weights/00000/  weights/00001/  …                           Orbax PyTree checkpoints: Hugging Face name → array

`weights/` may also be one checkpoint itself, its keys nested or not: keys are joined with dots.
"""

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxllm.checks import check_choice
from jaxllm.config import DType
from jaxllm.layers.spec import ParamSpec, Part
from jaxllm.weights.layout import Layout
from jaxllm.weights.reader import FLOAT_TYPES, aligned_empty, copy_cast, dtype_of, float16_overflow, open_reader
from jaxllm.weights.source import ORBAX_FOLDER, ModelSource, orbax_checkpoints, resolve_model

# Tensors are written in checkpoints of at most so many bytes (or one tensor), which bounds the host memory that it takes.
_GROUP_BYTES = 1 << 30
# The unit of reading: a device that needs a slice reads the chunks that it touches.
_CHUNK_BYTES = 16 << 20
# Parameters are restored in batches of about so many bytes: a call to Orbax costs 10 ms whatever it reads.
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class _Entry:
    checkpoint: Path
    keys: tuple[str, ...]


class OrbaxReader:
    """The tensors of an Orbax model folder (`reader.TensorReader`).

    Raises:
        ValueError: naming the checkpoint, if it cannot be read or a tensor is given twice.
    """

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._entries: dict[str, _Entry] = {}
        with ocp.PyTreeCheckpointer() as checkpointer:
            for checkpoint in orbax_checkpoints(folder):
                with _named(checkpoint):
                    metadata = checkpointer.metadata(checkpoint.absolute()).item_metadata
                    if metadata is None:
                        raise ValueError("its metadata cannot be read")
                for keys, leaf in _flatten(metadata.tree, ()):
                    name = ".".join(keys)
                    if name in self._entries:
                        raise ValueError(f"tensor {name} is given twice: in {self.where(name)} and in {checkpoint}")
                    self._entries[name] = _Entry(checkpoint.absolute(), keys)
                    self.shapes[name] = tuple(leaf.shape or ())
                    self.dtypes[name] = np.dtype(leaf.dtype).name if leaf.dtype is not None else type(leaf).__name__

    def where(self, name: str) -> str:
        return str(self._entries[name].checkpoint)

    def read(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        values = self.restore({name: ocp.RestoreArgs(restore_type=np.ndarray)})[name]
        copy_cast(values[index], out)

    def restore(self, args: Mapping[str, ocp.RestoreArgs]) -> dict[str, Any]:
        """Restore tensors, each as its arguments say."""
        by_checkpoint: dict[Path, list[str]] = {}
        for name in args:
            by_checkpoint.setdefault(self._entries[name].checkpoint, []).append(name)
        restored = {}
        with ocp.PyTreeCheckpointer() as checkpointer:
            for checkpoint, names in by_checkpoint.items():
                keys = {name: self._entries[name].keys for name in names}
                with _named(checkpoint):
                    tree = checkpointer.restore(
                        checkpoint,
                        args=ocp.args.PyTreeRestore(
                            item=_nest({keys[name]: 0 for name in names}),
                            restore_args=_nest({keys[name]: args[name] for name in names}),
                            partial_restore=True,
                        ),
                    )
                for name in names:
                    restored[name] = functools.reduce(lambda node, key: node[key], keys[name], tree)
        return restored


def restore_params(
    reader: OrbaxReader, specs: Sequence[ParamSpec], shardings: Mapping[str, Sharding]
) -> Iterator[tuple[str, jax.Array]]:
    """Restore each parameter's tensors to the devices, sharded as the parameter will be, and put them together there.

    Raises:
        ValueError: if a value that the checkpoint holds in another type is not finite in float16.
    """
    assemblers: dict[Any, Any] = {}
    for batch in _batches(specs):
        # Specs may share a tensor (tied embeddings), each with a sharding of its own.
        for group in [[spec] for spec in batch] if _share_tensors(batch) else [batch]:
            args = {
                part.name: ocp.ArrayRestoreArgs(
                    sharding=part_sharding(item, part, shardings[item.path]), dtype=dtype_of(item.dtype)
                )
                for item in group
                for part in item.parts
            }
            tensors = reader.restore(args)
            for item in group:
                parts = tuple(tensors[part.name] for part in item.parts)
                for part in item.parts:
                    tensors.pop(part.name, None)
                for part, array in zip(item.parts, parts, strict=True):
                    narrowed = item.dtype == "float16" and reader.dtypes[part.name] != "float16"
                    if narrowed and not jnp.isfinite(array).all():
                        raise float16_overflow(reader, part.name)
                layout = Layout.of(item)
                key = (layout, shardings[item.path])
                if key not in assemblers:
                    assemblers[key] = jax.jit(layout.assemble, out_shardings=shardings[item.path])
                array = assemblers[key](parts)
                assert array.shape == item.shape, f"{item.path}: the parts give {array.shape}, the parameter is {item.shape}"
                yield item.path, array


def part_sharding(spec: ParamSpec, part: Part, sharding: Sharding) -> Sharding:
    """The sharding of a checkpoint tensor under which each device holds what it needs of it for its slice of the parameter.

    Where a tensor does not divide so (an axis is concatenated with fewer stripes than devices, say), it is spread evenly if it
    can be and replicated if not, and the devices exchange slices when they put the parameter together.

    Raises:
        ValueError: if `sharding` is neither a NamedSharding nor a SingleDeviceSharding.
    """
    if isinstance(sharding, SingleDeviceSharding):
        return sharding
    if not isinstance(sharding, NamedSharding):
        raise ValueError(f"{spec.path}: an Orbax checkpoint needs a NamedSharding, got {sharding!r}")
    axes = [*sharding.spec, *[None] * (len(spec.shape) - len(sharding.spec))]
    if spec.transpose:
        axes.reverse()
    mesh = sharding.mesh
    for dim, axis in enumerate(axes):
        num_shards = _num_shards(mesh, axis)
        num_groups = part.shape[dim] // part.repeat_size
        copies = num_shards // num_groups if part.repeat > 1 and dim == 0 else 1
        if copies > 1 and isinstance(axis, str) and num_groups * copies == num_shards:
            # Fewer KV heads than devices: each is restored to the devices that will hold a copy of it.
            mesh, axes[dim] = _split_axis(mesh, axis, num_groups), f"{axis}_group"
        elif part.shape[dim] % num_shards:
            axes[dim] = None
    return NamedSharding(mesh, PartitionSpec(*axes))


def save_checkpoint(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    out: str | os.PathLike[str],
    *,
    hf_config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> Path:
    """Write a model folder that `resolve_model` finds and `load_params` loads.

    The folder appears under its name only when it is complete.

    Args:
        tensors: Hugging Face name → array (NumPy or JAX) of a floating point type; pairs are taken one by one.
        out: the folder; it must not exist or be empty.
        hf_config: the contents of config.json.
        tokenizer: a ModelSource whose tokenizer to take along, or anything with transformers' `save_pretrained`.

    Raises:
        ValueError: naming what is wrong with `out` or with a tensor.
    """
    out = Path(out).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out {str(out)!r} exists and is not an empty folder")
    if jax.process_count() > 1:
        raise ValueError("save_checkpoint writes from one process only")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.incomplete-", dir=out.parent))
    try:
        _write_tensors(tensors.items() if isinstance(tensors, Mapping) else tensors, draft / ORBAX_FOLDER)
        write_tokenizer(tokenizer, draft)
        if generation_config:
            _write_json(draft / "generation_config.json", generation_config)
        # Last: a folder without it is no model.
        _write_json(draft / "config.json", hf_config)
        draft.chmod(0o755)
        os.replace(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return out


def convert(
    model: str,
    out: str | os.PathLike[str],
    dtype: DType | None = None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
) -> Path:
    """Write any model as an Orbax model folder.

    Args:
        model, revision, download_dir: as in `resolve_model`.
        out: the folder; it must not exist or be empty.
        dtype: of the tensors; None keeps each tensor's own, float32 for quantized ones, which is exact.

    Raises:
        ValueError: naming what is missing or not supported.
    """
    if dtype is not None:
        check_choice("dtype", dtype, DType)
    source = resolve_model(model, revision=revision, download_dir=download_dir)
    reader = open_reader(source)
    for name in reader.shapes:
        if reader.dtypes[name] not in FLOAT_TYPES:
            raise ValueError(f"tensor {name} of {reader.where(name)} has type {reader.dtypes[name]}, which is not supported")

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, shape in reader.shapes.items():
            values = aligned_empty(shape, dtype_of(dtype or reader.dtypes[name]))
            reader.read(name, tuple(slice(0, size) for size in shape), values)
            if dtype == "float16" and not np.isfinite(values).all():
                raise float16_overflow(reader, name)
            yield name, values

    config = dict(source.hf_config)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    return save_checkpoint(tensors(), out, hf_config=config, generation_config=source.generation_config, tokenizer=source)


def _num_shards(mesh: Mesh, axis: Any) -> int:
    names = () if axis is None else (axis,) if isinstance(axis, str) else axis
    return int(np.prod([mesh.shape[name] for name in names], dtype=np.int64))


def _split_axis(mesh: Mesh, axis: str, num_groups: int) -> Mesh:
    """The same devices with `axis` cut in two: `{axis}_group` of `num_groups`, then `{axis}_copy`."""
    at = mesh.axis_names.index(axis)
    shape = mesh.devices.shape
    names = (*mesh.axis_names[:at], f"{axis}_group", f"{axis}_copy", *mesh.axis_names[at + 1 :])
    types = (*mesh.axis_types[: at + 1], *mesh.axis_types[at:])
    return Mesh(mesh.devices.reshape(*shape[:at], num_groups, -1, *shape[at + 1 :]), names, axis_types=types)


def _batches(specs: Sequence[ParamSpec]) -> Iterator[list[ParamSpec]]:
    batch: list[ParamSpec] = []
    size = 0
    for spec in specs:
        num_bytes = int(np.prod(spec.shape)) * dtype_of(spec.dtype).itemsize
        if batch and size + num_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(spec)
        size += num_bytes
    if batch:
        yield batch


def _share_tensors(specs: Sequence[ParamSpec]) -> bool:
    names = [part.name for spec in specs for part in spec.parts]
    return len(set(names)) != len(names)


def _flatten(tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(value, (*keys, str(key)))
    elif isinstance(tree, list | tuple):
        raise ValueError(f"{'.'.join(keys) or 'the checkpoint'} is a {type(tree).__name__}, expected names")
    else:
        yield keys, tree


def _nest(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for keys, value in flat.items():
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = value
    return tree


@contextlib.contextmanager
def _named(checkpoint: Path) -> Iterator[None]:
    """Errors of Orbax and its storage, which may be bare exceptions, become one that names the checkpoint."""
    try:
        yield
    except (RuntimeError, MemoryError):
        # A lack of memory, here or on a device, says nothing about the checkpoint.
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{checkpoint}: not a readable Orbax checkpoint ({reason})") from error


def _write_tensors(tensors: Iterable[tuple[str, Any]], folder: Path) -> None:
    folder.mkdir()
    group: dict[str, Any] = {}
    names: set[str] = set()
    size = count = 0

    def flush() -> None:
        nonlocal group, size, count
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
            save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in group}
            checkpointer.save(folder / f"{count:05d}", args=ocp.args.PyTreeSave(group, save_args=save_args))
        group, size, count = {}, 0, count + 1

    for name, values in tensors:
        if name in names:
            raise ValueError(f"tensor {name} is given twice")
        if not isinstance(values, np.ndarray | jax.Array) or np.dtype(values.dtype).name not in FLOAT_TYPES:
            raise ValueError(
                f"tensor {name} must be an array of a floating point type, got {getattr(values, 'dtype', type(values))}"
            )
        if group and size + values.nbytes > _GROUP_BYTES:
            flush()
        group[name] = values
        names.add(name)
        size += values.nbytes
    if not names:
        raise ValueError("there are no tensors to save")
    flush()


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files into a folder; `tokenizer` is as in `save_checkpoint`, None for none."""
    if isinstance(tokenizer, ModelSource) and tokenizer.kind == "gguf":
        from jaxllm.weights.gguf import GgufFile
        from jaxllm.weights.gguf_tokenizer import build_tokenizer

        backend, config = build_tokenizer(GgufFile(tokenizer.path))
        backend.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    elif isinstance(tokenizer, ModelSource):
        for path in tokenizer.tokenizer_files():
            target = folder / path.relative_to(tokenizer.path)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    elif tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
