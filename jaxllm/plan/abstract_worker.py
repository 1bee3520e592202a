"""A worker without devices and weights: the engine's own start, as far as it goes on shapes alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax

from jaxllm.config import EngineConfig
from jaxllm.worker.buckets import Bucket
from jaxllm.worker.compile_cache import CompileCounter
from jaxllm.worker.model_runner import ModelRunner
from jaxllm.worker.program_cache import ProgramCache, step_options
from jaxllm.worker.worker import Worker
from kernels_pallas.aot import Program, Target, compile_for_device, devices, lowering_on, without_persistent_cache
from sharding.mesh import make_mesh


class _ProgramReader:
    """Takes the place of the runner's program cache: compiles deviceless, and keeps what there is to read."""

    def __init__(self, mesh: jax.sharding.Mesh, kernels: bool) -> None:
        self._mesh, self._kernels = mesh, kernels
        self.programs: dict[Bucket, Program] = {}

    def get(self, name: str, key: Bucket, lower) -> jax.stages.Compiled:
        with lowering_on(self._mesh):
            lowered = lower("step")
        self.programs[key] = compile_for_device(lowered, options=step_options("gpu"), kernels=self._kernels)
        return self.programs[key].compiled


class _DevicelessCache(ProgramCache):
    """Keeps programs that are compiled here for devices that are not, and cannot be loaded here."""

    def __init__(self, mesh: jax.sharding.Mesh, like: ProgramCache) -> None:
        vars(self).update(vars(like))
        self._mesh = mesh

    def get(self, name: str, key: Bucket, lower: Callable[[str], jax.stages.Lowered]) -> jax.stages.Compiled:
        def lower_for_devices(program: str) -> jax.stages.Lowered:
            with lowering_on(self._mesh):
                return lower(program)

        with without_persistent_cache():
            return super().get(name, key, lower_for_devices)

    def _load(self, path: Path) -> None:
        return None


class AbstractWorker(Worker):
    """Goes through `init_device`, `load_model` and `determine_available_memory` as a Worker does; cannot run a step.

    Args:
        config: with `compilation_cache_dir`, compiled steps are kept there, and nothing can be read from them.
        target: the GPU model; there are as many devices of it as the configuration asks for.
        kernels: also read registers, spills and shared memory of each kernel.
    """

    def __init__(self, config: EngineConfig, target: Target, kernels: bool = False) -> None:
        super().__init__(replace(config, compiled_dir=None))
        self.target = target
        self._with_kernels = kernels

    def init_device(self) -> None:
        """Lay the mesh over devices that exist as a description only.

        Raises:
            RuntimeError: if nothing can be compiled for a GPU here.
        """
        size = self.config.parallel.tensor_parallel_size
        self.devices = list(devices(self.target, size))
        self.mesh = make_mesh(self.devices, tensor=size)
        self.compile_counter = CompileCounter()

    def program(self, bucket: Bucket) -> Program:
        """The compiled step of a bucket."""
        assert self.runner is not None
        self.runner.compile(bucket)
        return self.runner.program_cache.programs[bucket]

    def _attention_backend(self) -> str:
        with lowering_on(self.mesh):
            return super()._attention_backend()

    def _matmul_backend(self) -> str:
        with lowering_on(self.mesh):
            return super()._matmul_backend()

    def _load_weights(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self._abstract_weights()

    def _make_runner(self, num_blocks: int) -> ModelRunner:
        runner = super()._make_runner(num_blocks)
        if self.config.compilation_cache_dir is None:
            runner.program_cache = _ProgramReader(self.mesh, self._with_kernels)
        else:
            runner.program_cache = _DevicelessCache(self.mesh, runner.program_cache)
        return runner

    def _memory_budget(self) -> int:
        return int(self.config.cache.gpu_memory_utilization * self.target.memory_bytes)
