"""Worker: the devices of one process, from bare to serving.

The order matters: init_device → load_model → determine_available_memory → init_kv_cache → compile_and_warm_up.
Instead of load_model: build_model, then load_weights beside determine_available_memory and compile_first.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import psutil

from jaxllm.config import EngineConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig, make_kv_cache_groups
from jaxllm.core.output import SchedulerOutput
from jaxllm.cuda import cuda_is_usable, plugin_would_fail
from jaxllm.layers.linear import choose_matmul
from jaxllm.models.decoder_params import Shares
from jaxllm.models.registry import model_class
from jaxllm.trace import Trace
from jaxllm.weights.dummy import dummy_params
from jaxllm.weights.load import load_params
from jaxllm.weights.source import resolve_model
from jaxllm.worker.buckets import Buckets, coarse_ladders
from jaxllm.worker.compile_cache import CompileCounter, enable_persistent_cache
from jaxllm.worker.device_memory import set_memory_aside, usable_bytes
from jaxllm.worker.device_trace import DeviceTrace
from jaxllm.worker.kv_cache import check_num_blocks, num_blocks_in, total_bytes
from jaxllm.worker.manifest import built_num_blocks, check_manifest
from jaxllm.worker.model_runner import ModelRunner, StepInFlight
from jaxllm.worker.pipeline_runner import PipelineRunner
from jaxllm.worker.place import WorkerPlace
from jaxllm.worker.processes import Pieces, from_host, join_processes, to_host
from jaxllm.worker.row_state import state_bytes
from jaxllm.worker.stage_runner import StageRunner
from jaxllm.worker.stages import make_stages
from jaxllm.worker.step import Weights
from kernels_pallas.device import threads_for_interpreter
from kernels_pallas.paged_attention import INTERPRETED_ON_CPU, Call, select_implementation
from sharding.mesh import make_mesh
from sharding.rules import sharding_of

logger = logging.getLogger(__name__)

# On a CPU the cache shares the memory with everything else on the machine, so it takes what the user names, else this.
CPU_KV_CACHE_BYTES = 2**30
# On a CPU a row of logits costs as much as a token of a small model, so mixed steps pay for the rows in use only.
CPU_ROWS_PER_GROUP = 32
# A CPU with few cores compiles slowly, and gets along with fewer sizes of mixed steps.
CPU_MIXED_PARTS = 2


class Worker:
    """Drives the local devices. What the executor calls, and nothing above it knows jax.

    Args:
        place: which of several workers it is; None for the only one, which drives every device that the configuration asks for.
    """

    def __init__(self, config: EngineConfig, place: WorkerPlace | None = None) -> None:
        self.config = config
        self.place = place
        self.weights: Weights = ()
        self._host_weights: list[Pieces] = []  # of a worker asleep at level 1
        self.runner: ModelRunner | None = None
        self.compile_counter: CompileCounter | None = None
        self._trace: DeviceTrace | None = None

    def init_device(self) -> None:
        """Start jax, choose the devices and lay the mesh over them.

        Raises:
            ValueError: if there are fewer devices than the configuration asks for.
        """
        if plugin_would_fail():
            jax.config.update("jax_platforms", "cpu")
        elif cuda_is_usable():
            set_memory_aside(self.config.cache.gpu_memory_utilization)
        enable_persistent_cache(self.config.compiled_dir or self.config.compilation_cache_dir)
        stages, tensor = self.config.parallel.pipeline_parallel_size, self.config.parallel.tensor_parallel_size
        size = self.config.parallel.num_devices
        # A kernel that is named here runs in an interpreter where there is no GPU.
        interpreted = self.config.attention_backend in INTERPRETED_ON_CPU and not cuda_is_usable()
        with threads_for_interpreter() if interpreted else nullcontext():
            devices = jax.local_devices() if self.place is None else join_processes(self.place)
        if len(devices) < size:
            what = f"tensor_parallel_size {tensor}" + (f" with pipeline_parallel_size {stages}" if stages > 1 else "")
            raise ValueError(f"{what} needs {size} devices, found {len(devices)}: {devices}")
        self.devices = devices[:size]
        self.mesh = make_mesh(self.devices, pipeline=stages, tensor=tensor)
        self.compile_counter = CompileCounter()

    def load_model(self) -> None:
        """Build the model abstractly and put its weights on the devices."""
        self.build_model()
        self.load_weights()

    def build_model(self) -> None:
        """Build the model abstractly: steps can be compiled, but not run."""
        model, parallel = self.config.model, self.config.parallel
        stripes = parallel.tensor_parallel_size
        padding = model_class(model.decoder.architecture).padding(model.decoder, stripes)
        if padding:
            logger.info("%d devices share the model evenly: filled up with zeros are %s", stripes, padding)
        specs = model_class(model.decoder.architecture).kv_cache_specs(
            model.decoder, self.config.cache.block_size, self.config.kv_cache_dtype, stripes
        )
        self.kv_cache_config = KVCacheConfig(num_blocks=2, groups=make_kv_cache_groups(specs))
        backend = self._attention_backend()
        self.config = dataclasses.replace(self.config, attention_backend=backend, matmul_backend=self._matmul_backend())
        if backend in INTERPRETED_ON_CPU and self.devices[0].platform == "cpu":
            # Interpreted kernels call back into this process: such a program means nothing to another.
            if self.config.compiled_dir is not None:
                raise ValueError(
                    f"compiled_dir is {self.config.compiled_dir!r}, but attention_backend {backend!r} is interpreted on a CPU: "
                    "such programs cannot be shipped"
                )
            self.config = dataclasses.replace(self.config, compilation_cache_dir=None)
        fp8_cache = self.config.kv_cache_dtype == "float8_e4m3fn"
        packed = self.config.matmul_backend == "llvm"
        self.stages = make_stages(model, self.kv_cache_config, self.mesh, backend, fp8_cache, packed)
        self.graph = self.stages[-1].graph  # of all layers, unless there is a pipeline
        self.own_stages = [stage for stage in self.stages if stage.is_here]
        self.specs = [spec for stage in self.own_stages for spec in stage.graph.specs]
        self.shardings = {
            spec.path: sharding_of(stage.mesh, spec.axes) for stage in self.own_stages for spec in stage.graph.specs
        }
        self.weights = self._abstract_weights()

    def load_weights(self) -> None:
        """Put the weights on the devices; may run beside `determine_available_memory` and `compile_first`."""
        self.weights = self._load_weights()
        if self.runner is not None:
            self.runner.set_weights(self.weights)

    def _attention_backend(self) -> str:
        """The implementation that every layer is to use, tried out on the device."""
        decoder, size = self.config.model.decoder, self.config.parallel.tensor_parallel_size
        shares = Shares.of(decoder, size)
        heads = (shares.num_heads // size, shares.num_kv_heads // size, decoder.head_dim)
        call = Call(*heads, self.config.cache.block_size, self.config.model.dtype, cache_dtype=self.config.kv_cache_dtype)
        windows = [window for window in decoder.sliding_windows if window is not None]
        window = min(windows) if windows else None
        return select_implementation(self.config.attention_backend, call, sliding_window=window)

    def _matmul_backend(self) -> str:
        """How the weights lie, and what multiplies with them."""
        model = self.config.model
        specs = model_class(model.decoder.architecture).param_specs(model.decoder, model.dtype)
        rows = [spec.shape[0] if spec.transpose else spec.shape[1] for spec in specs if len(spec.shape) == 2]
        return choose_matmul(self.config.matmul_backend, rows, model.dtype, self.config.parallel.tensor_parallel_size)

    def _abstract_weights(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Their shapes and places, in the order of the specs."""
        return tuple(
            jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype), sharding=self.shardings[spec.path])
            for stage in self.own_stages
            for spec, shape in zip(stage.graph.specs, stage.graph.shapes, strict=True)
        )

    def _load_weights(self) -> tuple[jax.Array, ...]:
        """In the order of the specs, as the steps take them."""
        params = self._load_params(self.shardings)
        weights = []
        for stage in self.own_stages:
            weights += stage.graph.arrange([params.pop(spec.path) for spec in stage.graph.specs])
        return tuple(weights)

    @property
    def _shows_progress(self) -> bool:
        return self.config.use_tqdm_on_load and (self.place is None or self.place.rank == 0)

    def _load_params(self, shardings: dict[str, jax.sharding.NamedSharding]) -> dict[str, jax.Array]:
        model = self.config.model
        if model.load_format == "dummy":
            return dummy_params(self.specs, seed=model.seed, shardings=shardings)
        source = resolve_model(model.path)
        if model.load_format not in ("auto", source.kind):
            raise ValueError(f"load_format is {model.load_format!r}, but {source.path} holds {source.kind}")
        ignore = model_class(model.decoder.architecture).ignored_tensors(model.decoder)
        return load_params(source, self.specs, shardings=shardings, ignore=ignore, progress=self._shows_progress)

    def determine_available_memory(self) -> KVCacheConfig:
        """Decide how many blocks there are, from what weights, rows and the largest compiled step leave.

        The number of blocks is part of the compiled programs, so the largest program is compiled with as many blocks as fit if
        it needed no temporaries but its logits; if its memory analysis says that they do not fit, the number is lowered and
        it is compiled again.

        Raises:
            ValueError: if the blocks that fit do not hold one request of max_model_len tokens, or shipped programs do not fit.
        """
        model, cache = self.config.model, self.config.cache
        scheduler, platform, runner_with = self.config.scheduler, self.devices[0].platform, self._make_runner
        if self.config.compiled_dir is not None:
            built = built_num_blocks(self.config.compiled_dir)
            self.runner = runner_with(built if cache.num_gpu_blocks_override is None else cache.num_gpu_blocks_override)
            check_manifest(Path(self.config.compiled_dir), self.runner.facts())
        elif cache.num_gpu_blocks_override is not None:
            num_blocks = cache.num_gpu_blocks_override
            check_num_blocks(num_blocks, self.kv_cache_config, model.max_model_len, f"num_gpu_blocks_override is {num_blocks}")
            self.runner = runner_with(num_blocks)
        elif cache.kv_cache_memory_bytes is not None:
            self.runner = runner_with(self._num_blocks(cache.kv_cache_memory_bytes))
        else:
            budget = self._memory_budget() - self._weight_bytes() - state_bytes(runner_with(2).abstract_state())
            logits = 4 * model.decoder.vocab_size * scheduler.max_num_seqs // self.mesh.shape["tensor"]
            cap = CPU_KV_CACHE_BYTES if platform == "cpu" else budget
            self.runner = runner_with(self._num_blocks(min(budget - logits, cap)))
            fits = self._num_blocks(budget - self._largest_step_bytes())
            if fits < self.runner.kv_cache_config.num_blocks:
                self.runner = runner_with(fits)
        self.kv_cache_config = self.runner.kv_cache_config
        self._log_memory()
        return self.kv_cache_config

    def _make_runner(self, num_blocks: int) -> ModelRunner:
        platform, scheduler = self.devices[0].platform, self.config.scheduler
        packed = self.config.matmul_backend == "llvm"
        limits = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        decode_sizes, mixed_sizes = coarse_ladders(*limits) if packed else (None, None)
        buckets = Buckets(
            *limits,
            2 if platform == "cpu" and self.config.model.dtype != "float32" and not packed else 1,
            self.config.cudagraph_capture_sizes or decode_sizes,
            self.config.compile_sizes or mixed_sizes,
            scheduler.num_decode_steps,
            CPU_MIXED_PARTS if platform == "cpu" else 4,
        )
        config = dataclasses.replace(self.kv_cache_config, num_blocks=num_blocks)
        rows_per_group = CPU_ROWS_PER_GROUP if platform == "cpu" else None
        rest = (self.weights, config, buckets, rows_per_group, self.compile_counter)
        if len(self.own_stages) < len(self.stages):
            return StageRunner(self.config, self.stages, self.stages.index(self.own_stages[0]), *rest)
        if len(self.stages) > 1:
            return PipelineRunner(self.config, self.stages, *rest)
        return ModelRunner(self.config, self.mesh, self.graph, *rest)

    def init_kv_cache(self, num_blocks: int | None = None) -> None:
        """Allocate the device blocks and the request rows.

        Args:
            num_blocks: how many, if another worker has less memory than this one.
        """
        if num_blocks is not None and num_blocks != self.kv_cache_config.num_blocks:
            self.runner = self._make_runner(num_blocks)
            self.kv_cache_config = self.runner.kv_cache_config
        self.runner.set_weights(self.weights)
        self.runner.allocate()

    @property
    def compiles_in_background(self) -> bool:
        """Whether steps run while buckets are still being compiled. Processes that run the same step must choose the same bucket,
        so it takes a single one; and the programs of a pipeline's stages belong together."""
        return self.config.background_compilation and jax.process_count() == 1 and len(self.stages) == 1

    def compile_first(self) -> None:
        """Compile what must be there before the first step: every bucket, or the largest of each kind if the others are compiled
        in the background. Needs no weights."""
        buckets = self.runner.buckets.largest if self.compiles_in_background else None
        self.runner.compile_all(self._shows_progress, buckets)

    def compile_and_warm_up(self) -> None:
        """Compile what is not compiled yet, and make the first run of everything, which is dear on a GPU."""
        self.compile_first()
        self.runner.warm_up()
        # From here on a compilation is a fault, but for those in the background.
        self.compile_counter.count = 0
        if self.config.profile_dir is not None:
            self._trace = DeviceTrace(Trace(self.config.profile_dir, "worker"))
        if self.compiles_in_background:
            self.runner.compile_rest_in_background(1 if self.devices[0].platform == "cpu" else 4)

    def finish_compilation(self) -> None:
        """Wait until every bucket is compiled: from then on the shapes of steps do not depend on time."""
        self.runner.finish_compilation()

    def give_up_compilation(self) -> None:
        """Begin no further compilation in the background. Does not wait."""
        if self.runner is not None:
            self.runner.give_up_compilation()

    def built_for(self) -> dict[str, str]:
        """All that the compiled programs depend on, by name."""
        return self.runner.facts()

    def start_model(self, scheduler_output: SchedulerOutput) -> StepInFlight:
        """Dispatch one step; its `result` waits for it."""
        if self._trace is None:
            return self.runner.start(scheduler_output)
        start = time.monotonic()
        step = self.runner.start(scheduler_output)
        result = None if step.output is None else step.output.sampled.token_ids
        self._trace.add(start, time.monotonic(), result, str(step.bucket))
        return step

    def num_compiles_after_warm_up(self) -> int:
        """Programs compiled since the engine was ready; 0 unless something is wrong."""
        return self.compile_counter.count

    def sleep(self, level: int) -> None:
        """Forget all requests and give the devices' memory back: KV cache, request rows and weights.

        Args:
            level: 1 keeps the weights in host memory, 2 does not keep them.
        """
        if self.runner.kv_caches:
            self.runner.drop_requests()
        if level > 1:
            self._host_weights = []
        for weight in self.weights:
            if level == 1:
                self._host_weights.append(to_host(weight))
            weight.delete()
        self.weights = ()
        self.runner.set_weights(())

    def wake_up(self, tags: Sequence[str]) -> None:
        """Undo `sleep`.

        Args:
            tags: of "weights" and "kv_cache", what is to be there again. Weights that were not kept are loaded.
        """
        num_compiles = self.compile_counter.count
        if "weights" in tags and not self.weights:
            if self._host_weights:
                host_weights, self._host_weights = self._host_weights, []
                self.weights = tuple(
                    from_host(pieces, abstract.shape, abstract.sharding)
                    for pieces, abstract in zip(host_weights, self._abstract_weights(), strict=True)
                )
            else:
                self.weights = self._load_weights()
            self.runner.set_weights(self.weights)
        if "kv_cache" in tags and not self.runner.kv_caches:
            self.runner.allocate()
        jax.block_until_ready((self.weights, self.runner.kv_caches))
        # Loading may compile, as it does at the start. That is no fault.
        self.compile_counter.count = num_compiles

    def device_bytes(self) -> int:
        """Bytes that weights, KV cache and request rows take, over all devices."""
        arrays = [*self.weights, *self.runner.device_arrays()]
        return sum(shard.data.nbytes for array in arrays if not array.is_deleted() for shard in array.addressable_shards)

    def check_health(self) -> None:
        """Raise if the devices do not answer."""
        for device in jax.local_devices():
            if device in self.devices:
                jax.block_until_ready(jax.device_put(0, device))

    def shutdown(self) -> None:
        """Give the devices' memory back, however far the start has come."""
        if self._trace is not None:
            self._trace.close()
        if self.compile_counter is not None:
            self.compile_counter.close()
        if self.runner is not None:
            self.runner.close()
        self.compile_counter, self.runner, self.weights = None, None, ()

    def _memory_budget(self) -> int:
        """Bytes of a device that weights, temporaries and KV cache may take together."""
        share = self.config.cache.gpu_memory_utilization
        stats = jax.local_devices()[0].memory_stats()
        if stats is not None and "bytes_limit" in stats:
            return usable_bytes(share, stats["bytes_limit"])
        return int(share * psutil.virtual_memory().total / len(self.devices))

    def _num_blocks(self, budget: int) -> int:
        # Every stage has the same number of blocks, so the one with the most layers decides.
        num_arrays = max(stage.num_arrays for stage in self.stages)
        max_model_len = self.config.model.max_model_len
        return num_blocks_in(budget, self.kv_cache_config, self.mesh.shape["tensor"], max_model_len, num_arrays)

    def _largest_step_bytes(self) -> int:
        return self.runner.step_bytes(next(iter(self.runner.buckets)))

    def _weight_bytes(self) -> int:
        """Bytes of weights on a device of the stage that has the most."""
        weights = iter(self.weights)
        return max(total_bytes(list(itertools.islice(weights, len(stage.graph.specs)))) for stage in self.own_stages)

    def _log_memory(self) -> None:
        config = self.kv_cache_config
        logger.info(
            "weights %.0f MiB, KV cache %.0f MiB a device: %d blocks, %d tokens",
            self._weight_bytes() / 2**20,
            config.num_blocks * config.block_bytes / len(self.devices) / 2**20,
            config.num_blocks - 1,
            (config.num_blocks - 1) * self.config.cache.block_size // len(config.groups),
        )
