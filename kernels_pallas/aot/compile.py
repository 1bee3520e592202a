"""Deviceless compilation."""

import functools
import importlib.util
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from kernels_pallas.aot.hlo import Hlo
from kernels_pallas.aot.kernels import KernelResources, mosaic_resources, ptx_resources
from kernels_pallas.aot.targets import Target
from kernels_pallas.aot.thunks import Thunks
from kernels_pallas.aot.triton_kernels import triton_resources

_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# Where a Mosaic kernel's listing goes is a setting of the process, so one program is compiled at a time if they are wanted.
_dump_lock = threading.Lock()


def unavailable_reason() -> str | None:
    """Why nothing can be compiled for a GPU here; None if it can."""
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        return "jax's CUDA plugin is not installed: pip install 'jaxllm[aot]'"
    return None


@functools.cache
def devices(target: Target, num_devices: int = 1) -> tuple[jax.Device, ...]:
    """Devices that programs can be compiled for, not run on; the same objects each time.

    Raises:
        RuntimeError: if the CUDA plugin is not installed.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise RuntimeError(reason)
    topology = topologies.get_topology_desc(platform="cuda", target_config=target.description(), topology=f"1x1x{num_devices}")
    return tuple(topology.devices)


@contextmanager
def lowering_on(mesh: Mesh) -> Iterator[None]:
    """Functions lowered inside take the implementations that they have on the devices of `mesh`."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


@dataclass(frozen=True)
class Program:
    """A compiled program and what there is to read about it.

    Attributes:
        seconds: that compilation took.
        kernels: of each kernel, if asked for.
    """

    compiled: jax.stages.Compiled
    hlo: Hlo
    thunks: Thunks
    seconds: float
    kernels: tuple[KernelResources, ...] = field(default=())

    @property
    def memory(self) -> "jax.stages.CompiledMemoryStats":
        """Bytes on one device: argument_size_in_bytes, alias_size_in_bytes, temp_size_in_bytes, …"""
        return self.compiled.memory_analysis()


def compile_for_device(
    lowered: jax.stages.Lowered, *, options: dict[str, str | bool] | None = None, kernels: bool = False
) -> Program:
    """Compile a function that was lowered for `devices`.

    Args:
        options: XLA's debug options, by their names.
        kernels: also read registers, spills and shared memory of each kernel; takes longer.

    Raises:
        RuntimeError: if the program does not compile.
    """
    with without_persistent_cache(), tempfile.TemporaryDirectory(prefix="jaxllm-aot-") as folder:
        dump = {"xla_dump_to": folder, **({"xla_dump_emitter_re": "ptx"} if kernels else {})}
        start = time.monotonic()
        if kernels:
            with _dump_lock, _mosaic_dump(Path(folder)):
                compiled = lowered.compile(compiler_options={**(options or {}), **dump})
        else:
            compiled = lowered.compile(compiler_options={**(options or {}), **dump})
        seconds = time.monotonic() - start
        # The listing after all passes, where a pass has changed anything, is the last by name.
        listings = sorted(Path(folder).glob("*.thunk_sequence*.txt"))
        if not listings:
            raise RuntimeError("XLA wrote no listing of the thunks")
        text = compiled.as_text()
        resources: tuple[KernelResources, ...] = ()
        if kernels:
            resources = (*mosaic_resources(Path(folder)), *triton_resources(text), *ptx_resources(Path(folder)))
        return Program(compiled, Hlo(text), Thunks(listings[-1].read_text()), seconds, resources)


class _Uncached:
    """How many threads compile without the persistent cache, and the folder that it had before the first of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.folder: str | None = None


_uncached = _Uncached()


@contextmanager
def without_persistent_cache() -> Iterator[None]:
    """jax would keep the program, and fail to load it the next time, since there is no device."""
    with _uncached.lock:
        if _uncached.depth == 0:
            _uncached.folder = jax.config.jax_compilation_cache_dir
            _set_cache_folder(None)
        _uncached.depth += 1
    try:
        yield
    finally:
        with _uncached.lock:
            _uncached.depth -= 1
            if _uncached.depth == 0:
                _set_cache_folder(_uncached.folder)


def _set_cache_folder(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    reset_cache()


@contextmanager
def _mosaic_dump(folder: Path) -> Iterator[None]:
    names = {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
