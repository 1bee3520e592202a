"""Fill a model's parameters from a checkpoint: strictly, streamed, to each device its own slice."""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxllm.layers.spec import ParamSpec, Part, ScalePart
from jaxllm.weights.reader import FLOAT_TYPES, TensorReader, aligned_empty, dtype_of, float16_overflow, open_reader
from jaxllm.weights.scales import CompletedReader
from jaxllm.weights.source import ModelSource

Item = TypeVar("Item")
# What one thread copies at a time: large enough to drown the overhead, small enough that decoding a block needs little memory.
_CHUNK_ELEMENTS = 1 << 18
_MAX_THREADS = 16


def load_params(
    source: ModelSource,
    specs: Sequence[ParamSpec],
    *,
    shardings: Mapping[str, Sharding] | None = None,
    ignore: Sequence[str] = (),
    progress: bool = False,
) -> dict[str, jax.Array]:
    """Load every parameter of `specs`, converted to its dtype.

    Beyond the mapping of the files, host memory holds one parameter at a time (on the CPU backend that is the parameter itself),
    and every device receives its own slice only. An Orbax checkpoint is restored straight to the devices.

    Args:
        shardings: of each path; None puts everything on the first device.
        ignore: regular expressions; tensors of the checkpoint whose whole name matches one may go unused.
        progress: show a progress bar.

    Returns:
        path → array, in the order of `specs`.

    Raises:
        ValueError: naming the tensor, if one is missing, unused, of another shape than its spec says or of a type that is no
            floating point number; if a value is not finite in float16; or if the checkpoint cannot be read.
    """
    shardings = complete_shardings(specs, shardings)
    with_progress = _progress_bar(len(specs)) if progress else iter
    opened = open_reader(source)
    reader = CompletedReader(opened, specs)
    check_tensors(reader, specs, ignore)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS), thread_name_prefix="weights") as pool:
        if source.kind != "orbax":
            return dict(with_progress(_read_params(reader, specs, shardings, pool)))
        from jaxllm.weights.orbax import OrbaxReader, restore_params

        assert isinstance(opened, OrbaxReader)
        # Scales are too small to be worth a restoration, and may have to be made.
        scales = [spec for spec in specs if _has_scales(spec)]
        restored = restore_params(opened, [spec for spec in specs if not _has_scales(spec)], shardings)
        params = dict(with_progress(itertools.chain(restored, _read_params(reader, scales, shardings, pool))))
        return {spec.path: params[spec.path] for spec in specs}


def check_tensors(reader: TensorReader, specs: Sequence[ParamSpec], ignore: Sequence[str] = ()) -> None:
    """See that the checkpoint holds exactly what `specs` need; raises as `load_params` does."""
    parts = {part.name: part for spec in specs for part in spec.parts}
    missing = [name for name in parts if name not in reader.shapes]
    if missing:
        raise ValueError(f"the checkpoint lacks {_some('tensor', missing)}")
    patterns = [re.compile(pattern) for pattern in ignore]
    unused = [name for name in reader.shapes if name not in parts and not any(p.fullmatch(name) for p in patterns)]
    if unused:
        raise ValueError(f"the model does not use {_some('tensor', unused)} of {reader.where(unused[0])}")
    for name, part in parts.items():
        if tuple(reader.shapes[name]) != part.shape:
            found = f"shape {reader.shapes[name]}, the model needs {part.shape}"
        elif reader.dtypes[name] not in FLOAT_TYPES:
            found = f"type {reader.dtypes[name]}, which is not supported"
        else:
            continue
        raise ValueError(f"tensor {name} of {reader.where(name)} has {found}")


def _has_scales(spec: ParamSpec) -> bool:
    return all(isinstance(part, ScalePart) for part in spec.parts)


def complete_shardings(specs: Sequence[ParamSpec], shardings: Mapping[str, Sharding] | None) -> Mapping[str, Sharding]:
    """A sharding for every path of `specs`; the first device where none are given.

    Raises:
        ValueError: naming a path that is given twice or has no sharding.
    """
    paths = [spec.path for spec in specs]
    if len(set(paths)) != len(paths):
        twice = sorted(path for path in set(paths) if paths.count(path) > 1)
        raise ValueError(f"given twice: {_some('parameter', twice)}")
    if shardings is None:
        return dict.fromkeys(paths, SingleDeviceSharding(jax.devices()[0]))
    without = [path for path in paths if path not in shardings]
    if without:
        raise ValueError(f"no sharding is given for {_some('parameter', without)}")
    return shardings


@dataclass(frozen=True)
class Piece:
    """A block of a checkpoint tensor and where it goes.

    Attributes:
        index: of the block in the tensor.
        out: of the block in the slice of the parameter, before the transposition if there is one.
    """

    part: Part
    index: tuple[slice, ...]
    out: tuple[slice, ...]


def pieces(spec: ParamSpec, index: tuple[slice, ...]) -> Iterator[Piece]:
    """The blocks of which `parameter[index]` is made, without overlaps; what none of them covers is padding."""
    bounds = [cut.indices(size)[:2] for cut, size in zip(index, spec.shape, strict=True)]
    width = spec.shape[-1] // spec.num_stripes
    low, high = bounds[-1]
    for stripe in range(low // width, -(-high // width)):
        start = stripe * width
        for part in spec.parts:
            shape = expanded_shape(spec, part)
            assert shape[:-1] == spec.shape[:-1], f"{spec.path}: {part.name} gives {shape}, the parameter is {spec.shape}"
            share, rest = divmod(shape[-1], spec.num_stripes)
            assert rest == 0, f"{spec.path}: {part.name} does not divide into {spec.num_stripes} stripes"
            first, last = max(start, low), min(start + share, high)
            if first < last:
                shift = stripe * share - start
                yield from _runs(spec, part, [*bounds[:-1], (first + shift, last + shift)], first - low)
            start += share


def expanded_shape(spec: ParamSpec, part: Part) -> tuple[int, ...]:
    """What a part brings to the parameter: repeated, padded, and transposed if the parameter is."""
    shape = part.expanded_shape
    if not spec.transpose:
        return shape
    assert len(shape) <= 2, f"{spec.path}: only matrices can be transposed"
    return shape[::-1]


def _runs(spec: ParamSpec, part: Part, bounds: list[tuple[int, int]], offset: int) -> Iterator[Piece]:
    """Blocks of `part` for `bounds` of its expanded shape, `offset` of the last axis already filled, one a repetition."""
    offsets = [0] * (len(bounds) - 1) + [offset]
    if spec.transpose:
        bounds, offsets = bounds[::-1], offsets[::-1]
    low, high = bounds[part.axis]
    size, stride = part.group_size, part.group_stride
    high = min(high, part.shape[part.axis] // size * stride)
    index = [slice(*bound) for bound in bounds]
    out = [slice(at, at + last - first) for at, (first, last) in zip(offsets, bounds, strict=True)]
    row = low
    while row < high:
        group, within = divmod(row, stride)
        if within >= size * part.repeat:
            row = (group + 1) * stride
            continue
        length = min(size - within % size, high - row)
        source, target = group * size + within % size, offsets[part.axis] + row - low
        index[part.axis], out[part.axis] = slice(source, source + length), slice(target, target + length)
        yield Piece(part, tuple(index), tuple(out))
        row += length


def read_slice(reader: TensorReader, spec: ParamSpec, index: tuple[slice, ...], pool: ThreadPoolExecutor) -> np.ndarray:
    """`parameter[index]` on the host, in the parameter's dtype.

    Raises:
        ValueError: if a value that the checkpoint holds in another type is not finite in float16.
    """
    shape = tuple(len(range(*cut.indices(size))) for cut, size in zip(index, spec.shape, strict=True))
    out = aligned_empty(shape, dtype_of(spec.dtype))
    if any(part.is_padded for part in spec.parts):
        out[...] = 1 if _has_scales(spec) else 0
    target = out.T if spec.transpose else out

    def read(piece: Piece) -> None:
        view, name = target[piece.out], piece.part.name
        reader.read(name, piece.index, view)
        narrowed = spec.dtype == "float16" and reader.dtypes[name] != "float16"
        if narrowed and not np.isfinite(view).all():
            raise float16_overflow(reader, name)

    for _ in pool.map(read, (chunk for piece in pieces(spec, index) for chunk in _chunks(piece))):
        pass
    return out


def _chunks(piece: Piece) -> Iterator[Piece]:
    rows, out_rows = piece.index[0], piece.out[0]
    elements_a_row = int(np.prod([cut.stop - cut.start for cut in piece.index[1:]], dtype=np.int64))
    step = max(_CHUNK_ELEMENTS // max(elements_a_row, 1), 1)
    for start in range(0, rows.stop - rows.start, step):
        stop = min(start + step, rows.stop - rows.start)
        yield Piece(
            piece.part,
            (slice(rows.start + start, rows.start + stop), *piece.index[1:]),
            (slice(out_rows.start + start, out_rows.start + stop), *piece.out[1:]),
        )


def _read_params(
    reader: TensorReader, specs: Sequence[ParamSpec], shardings: Mapping[str, Sharding], pool: ThreadPoolExecutor
) -> Iterator[tuple[str, jax.Array]]:
    for spec in specs:
        # Devices that hold the same slice share one host copy.
        slices: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

        def get(index: tuple[slice, ...], spec: ParamSpec = spec, slices: dict = slices) -> np.ndarray:
            key = tuple(cut.indices(size)[:2] for cut, size in zip(index, spec.shape, strict=True))
            if key not in slices:
                slices[key] = read_slice(reader, spec, index, pool)
            return slices[key]

        array = jax.make_array_from_callback(spec.shape, shardings[spec.path], get)
        # The next host copy is made when this one is no longer needed.
        array.block_until_ready()
        yield spec.path, array


def _progress_bar(total: int):
    from tqdm import tqdm

    def wrap(items: Iterable[Item]) -> Iterable[Item]:
        return tqdm(items, total=total, desc="Loading weights", unit="param")

    return wrap


def _some(kind: str, names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{kind}{'s' * (len(names) > 1)} {', '.join(names[:most])}{more}"
