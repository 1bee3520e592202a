"""ModelRunner: a SchedulerOutput becomes padded arrays, one dispatch, and a ModelRunnerOutput."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput, SchedulerOutput, WorkerStepStats
from jaxllm.models.graph import ModelGraph
from jaxllm.sample.logprobs import LogprobsArrays, concatenate, sampled_logprobs
from jaxllm.sample.state import default_seed, pack_row
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker import row_state
from jaxllm.worker.batch import BatchLayout
from jaxllm.worker.buckets import Bucket, Buckets
from jaxllm.worker.compile_cache import BackgroundCompiler, CompileCounter, compile_all
from jaxllm.worker.input_batch import InputBatch
from jaxllm.worker.kv_cache import abstract_kv_caches, allocate_kv_caches, array_dtype, max_blocks_per_request
from jaxllm.worker.processes import replicate
from jaxllm.worker.program_cache import ProgramCache, step_options
from jaxllm.worker.prompt_logprobs import PromptChunk, PromptLogprobs
from jaxllm.worker.row_state import NewRow
from jaxllm.worker.step import KVCaches, StepOptions, StepOutput, Weights, make_step
from sharding.rules import KV_CACHE_AXES, sharding_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepInFlight:
    """A dispatched step whose results are not on the host yet. It holds all that reading them needs, for when they are read the
    runner may have forgotten some of the requests, and dispatched further steps.

    Attributes:
        bucket: None for a step without tokens.
        sampled: bool [rows], which rows sample a token.
        asking: batch row and parameters of each request that gets log probabilities of its sampled token.
        prompt_chunks: parts of prompts that get log probabilities.
        dispatch_time: seconds that dispatching it took.
        output: None also where it is another process's.
        num_compiles: programs compiled since the engine was ready.
        before_result: called first when the step is read.
    """

    bucket: Bucket | None
    num_tokens: int
    req_ids: list[str]
    sampled: np.ndarray
    asking: list[tuple[int, SamplingParams]]
    prompt_chunks: list[PromptChunk]
    output: StepOutput | None
    dispatch_time: float
    num_compiles: int
    prompt_logprobs: PromptLogprobs
    before_result: Callable[[], None] | None = None

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and bring its results to the host."""
        if self.before_result is not None:
            self.before_result()
        if self.bucket is None or self.output is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        start = time.monotonic()
        output = ModelRunnerOutput(
            req_ids=self.req_ids,
            req_id_to_index={req_id: row for row, req_id in enumerate(self.req_ids)},
            sampled_token_ids=self._token_ids(self.output),
        )
        if self.asking:
            output.logprobs, output.logprobs_start = self._logprobs(self.output, output.sampled_token_ids)
        if self.prompt_chunks:
            assert self.output.hidden is not None
            output.prompt_logprobs = self.prompt_logprobs.collect(self.prompt_chunks, self.output.hidden)
        num_tokens, num_steps = self.num_tokens, 1
        if self.output.num_sampled is not None:
            numbers = [len(token_ids) for token_ids in output.sampled_token_ids]
            num_tokens, num_steps = sum(numbers), max(numbers)
        num_padding_tokens = self.bucket.num_tokens * num_steps - num_tokens
        wait_time = time.monotonic() - start
        output.stats = WorkerStepStats(self.dispatch_time, wait_time, num_padding_tokens, self.num_compiles, num_tokens)
        return output

    def _token_ids(self, output: StepOutput) -> list[list[int]]:
        """What each row sampled."""
        num_rows = len(self.req_ids)
        token_ids = np.asarray(output.sampled.token_ids)
        if output.num_sampled is None:
            return [[token] if used else [] for token, used in zip(token_ids[:num_rows].tolist(), self.sampled, strict=True)]
        numbers = np.asarray(output.num_sampled)[:num_rows].tolist()
        return [tokens[:number] for tokens, number in zip(token_ids.T[:num_rows].tolist(), numbers, strict=True)]

    def _logprobs(self, output: StepOutput, token_ids: list[list[int]]) -> tuple[LogprobsLists, dict[str, int]]:
        """Of the tokens of all rows that ask for them, and where those of each request start."""
        arrays: LogprobsArrays[np.ndarray] = jax.tree.map(np.asarray, output.sampled.logprobs)
        steps = [arrays]
        if output.num_sampled is not None:
            steps = [jax.tree.map(lambda leaf, step=step: leaf[step], arrays) for step in range(len(arrays.ranks))]
        parts: list[LogprobsLists] = []
        starts = {}
        for row, params in self.asking:
            starts[self.req_ids[row]] = len(parts)
            for step in steps[: len(token_ids[row])]:
                part = sampled_logprobs(step, row, params)
                assert part is not None
                parts.append(part)
        return concatenate(parts), starts


class ModelRunner:
    """Runs steps on the devices of one mesh.

    Args:
        weights: in the order of `graph.specs`; shapes suffice until `warm_up`.
        kv_cache_config: its number of blocks is part of the compiled programs.
    """

    def __init__(
        self,
        config: EngineConfig,
        mesh: jax.sharding.Mesh,
        graph: ModelGraph,
        weights: Weights,
        kv_cache_config: KVCacheConfig,
        buckets: Buckets,
        rows_per_group: int | None,
        compile_counter: CompileCounter,
    ) -> None:
        self.compile_counter = compile_counter
        self.on_gpu = mesh.devices.flat[0].platform == "gpu"
        self.config, self.graph, self.weights, self.buckets = config, graph, weights, buckets
        self.kv_cache_config = kv_cache_config
        self.cache_dtype = array_dtype(config.kv_cache_dtype, mesh.devices.flat[0].platform)
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.vocab_size = graph.vocab_size
        self.max_blocks = max_blocks_per_request(config.model.max_model_len, config.cache.block_size)
        self.num_groups = len(kv_cache_config.groups)
        self.num_arrays = kv_cache_config.num_arrays
        self.replicated = sharding_of(mesh, ())
        self.kv_sharding = sharding_of(mesh, KV_CACHE_AXES)
        max_logprobs = config.model.max_logprobs if config.model.max_logprobs != -1 else config.model.decoder.vocab_size
        sampling_mesh = mesh if mesh.size > 1 else None
        self.options = StepOptions(max_logprobs, config.model.logprobs_mode, rows_per_group, sampling_mesh)
        self.programs: dict[Bucket, jax.stages.Compiled] = {}
        self.ready: set[Bucket] = set()  # buckets that steps may use
        self._background: BackgroundCompiler | None = None
        self.kv_caches: KVCaches = ()
        self.state: row_state.RowState | None = None
        self.program_cache = self._make_program_cache(mesh, {})
        self.prompt_logprobs = PromptLogprobs(graph, config.model, self.replicated, lambda: jax.block_until_ready(self.kv_caches))
        self._forget_requests()

    def _forget_requests(self) -> None:
        self.batch = InputBatch(self.max_num_seqs, self.num_groups, self.max_blocks)
        self.prompt_logprobs.clear()

    def _make_program_cache(self, mesh: jax.sharding.Mesh, parts: Mapping[str, Any]) -> ProgramCache:
        """
        Args:
            parts: what its programs depend on beyond what all of this engine do.
        """
        config = self.config
        facts = {
            "model": config.model.decoder,
            "dtype": config.model.dtype,
            "KV cache dtype": self.cache_dtype,
            "attention_backend": config.attention_backend,
            "matmul_backend": config.matmul_backend,
            "KV cache": self.kv_cache_config,
            "sampling": self.options,
            "max_num_seqs": self.max_num_seqs,
            "blocks a request (from max_model_len)": self.max_blocks,
            "block_size": config.cache.block_size,
            "mesh": (mesh.axis_names, mesh.devices.shape),
            "process": (jax.process_index(), jax.process_count()),
            **parts,
        }
        devices = list(mesh.devices.flat)
        directory, shipped = config.compiled_dir or config.compilation_cache_dir, config.compiled_dir is not None
        return ProgramCache(directory, devices, facts, step_options(devices[0].platform), shipped)

    def facts(self) -> dict[str, str]:
        """All that the compiled programs depend on, by name."""
        return {**self.program_cache.facts, "buckets": repr([str(bucket) for bucket in self.buckets])}

    def layout(self, bucket: Bucket) -> BatchLayout:
        """Where the fields of this bucket's packed batch lie."""
        return BatchLayout(bucket, self.config.cache.block_size, self.max_num_seqs, self.num_groups, self.max_blocks)

    def abstract_state(self) -> row_state.RowState:
        """The device rows without their memory."""

        def init() -> row_state.RowState:
            return row_state.init_row_state(self.max_num_seqs, self.num_groups, self.max_blocks, self.vocab_size, None)

        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.replicated), jax.eval_shape(init)
        )

    def compile(self, bucket: Bucket) -> jax.stages.Compiled:
        """The program of one bucket, compiled once."""
        if bucket not in self.programs:
            self.programs[bucket] = self.program_cache.get(str(bucket), bucket, lambda name: self._lower(bucket, name))
        return self.programs[bucket]

    def _lower(self, bucket: Bucket, name: str) -> jax.stages.Lowered:
        layout = self.layout(bucket)
        function = make_step(self.graph, layout, self.options)
        function.__name__ = name
        # Named, so that the state which comes out is placed just like the one that went in, also from a program kept on disk:
        # whatever else takes the state would be compiled again.
        out_shardings = (self.kv_sharding, self.replicated, self.replicated)
        step = jax.jit(function, donate_argnums=(1, 2), out_shardings=out_shardings)
        weights = [jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding) for w in self.weights]
        caches = abstract_kv_caches(self.kv_cache_config, self.cache_dtype, self.kv_sharding, self.num_arrays)
        batch = jax.ShapeDtypeStruct((layout.size,), np.int32, sharding=self.replicated)
        return step.lower(tuple(weights), caches, self.abstract_state(), batch)

    def step_bytes(self, bucket: Bucket) -> int:
        """Bytes of a device that temporaries and results of a bucket's step take, as the compiler counts them."""
        return program_bytes(self.compile(bucket))

    def compile_all(self, progress: bool, only: Sequence[Bucket] | None = None) -> None:
        """Compile every bucket, or only these, the largest first."""
        buckets = [bucket for bucket in self.buckets if only is None or bucket in only]
        jobs = [(str(bucket), lambda bucket=bucket: self.compile(bucket)) for bucket in buckets]
        compile_all(jobs, progress)

    def compile_rest_in_background(self, workers: int) -> None:
        """Compile the buckets that are not ready while steps run; until then these use the next larger one that is."""

        def job(bucket: Bucket) -> None:
            with self.compile_counter.uncounted():
                self.compile(bucket)

        # Those that save most first: small decode steps, which would take the time of the largest.
        decode = sorted((*self.buckets.decode, *self.buckets.multi_step), key=lambda bucket: bucket.num_rows)
        rest = [bucket for bucket in (*decode, *self.buckets.mixed) if bucket not in self.ready]
        self._background = BackgroundCompiler([(str(bucket), partial(job, bucket)) for bucket in rest], workers)

    def finish_compilation(self) -> None:
        """Wait until every bucket is compiled, and take them all into use. Raises what a compilation raised."""
        if self._background is not None:
            self._background.wait()
        self._take_in_compiled()

    def give_up_compilation(self) -> None:
        """Begin no further compilation in the background. Does not wait."""
        if self._background is not None:
            self._background.give_up()

    def _compiled_buckets(self) -> list[Bucket]:
        return list(self.programs)

    def _take_in_compiled(self) -> None:
        """Let steps use what has been compiled since, but for a runner asleep."""
        if len(self.ready) == len(self.buckets) or not self.kv_caches:
            return
        for bucket in [bucket for bucket in self._compiled_buckets() if bucket not in self.ready]:
            # On a GPU the first run of a program picks algorithms and records command buffers; on a CPU one run will do.
            if self.on_gpu or bucket == self.buckets.decode[-1]:
                vector, _ = self.layout(bucket).empty()
                self._run(bucket, vector)
            self.ready.add(bucket)

    def allocate(self) -> None:
        """Allocate the device blocks and rows."""
        self.kv_caches = allocate_kv_caches(self.kv_cache_config, self.cache_dtype, self.kv_sharding, self.num_arrays)
        self.state = row_state.init_row_state(
            self.max_num_seqs, self.num_groups, self.max_blocks, self.vocab_size, self.replicated
        )

    def warm_up(self) -> None:
        """Take the compiled buckets into use, and compile what is not part of a step."""
        self.state = row_state.warm_up(self.state)
        self.prompt_logprobs.warm_up(self.weights)
        self._take_in_compiled()
        jax.block_until_ready(self.kv_caches)

    def start(self, scheduler_output: SchedulerOutput) -> StepInFlight:
        """Dispatch one step. It waits for nothing but what the devices themselves need."""
        start = time.monotonic()
        self._update_rows(scheduler_output)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if num_tokens == 0:
            return StepInFlight(None, 0, [], np.empty(0, np.bool_), [], [], None, 0.0, 0, self.prompt_logprobs)
        req_ids, counts = self.batch.order(scheduler_output)
        prompt_chunks: list[PromptChunk] = []
        self._take_in_compiled()
        if scheduler_output.num_decode_steps > 1:
            bucket = self.buckets.choose_multi_step(len(req_ids), self.ready)
        else:
            prompt_chunks = self.prompt_logprobs.chunks(self.weights, self.batch, scheduler_output, req_ids, counts)
            bucket = self.buckets.choose(counts, mixed=bool(prompt_chunks), ready=self.ready)
        vector, sampled = self.batch.pack(self.layout(bucket), scheduler_output, req_ids, counts)
        asking: list[tuple[int, SamplingParams]] = []
        if ids := self.batch.asking:
            params = self.batch.sampling_params
            asking = [(row, params[req_id]) for row, req_id in enumerate(req_ids) if req_id in ids and sampled[row]]
        output = self._run(bucket, vector)
        if output is not None:
            output.sampled.token_ids.copy_to_host_async()
            if output.num_sampled is not None:
                output.num_sampled.copy_to_host_async()
        dispatch_time = time.monotonic() - start
        return StepInFlight(
            bucket,
            num_tokens,
            req_ids,
            sampled,
            asking,
            prompt_chunks,
            output,
            dispatch_time,
            self.compile_counter.count,
            self.prompt_logprobs,
        )

    def device_arrays(self) -> list[jax.Array]:
        """Blocks and rows."""
        return jax.tree.leaves((self.kv_caches, self.state))

    def set_weights(self, weights: Weights) -> None:
        """Run with these weights from now on, in the order of the specs of all stages; none while they are away."""
        self.weights = weights

    def drop_requests(self) -> None:
        """Forget all requests and free the device blocks and rows, until `allocate`."""
        for array in self.device_arrays():
            array.delete()
        self.kv_caches, self.state = (), None
        self._forget_requests()

    def close(self) -> None:
        """Drop the device arrays and the programs."""
        if self._background is not None:
            self._background.close()
        self.kv_caches, self.state, self.weights, self.programs = (), None, (), {}
        self.ready = set()

    def _run(self, bucket: Bucket, vector: np.ndarray) -> StepOutput | None:
        self.kv_caches, self.state, output = self.compile(bucket)(
            self.weights, self.kv_caches, self.state, replicate(vector, self.replicated)
        )
        return output

    def _update_rows(self, scheduler_output: SchedulerOutput) -> None:
        # Sorted: in every process the next requests must get the same rows, and each iterates over a set in an order of its own.
        for req_id in sorted(scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids):
            self.batch.remove(req_id)
            self.prompt_logprobs.remove(req_id)
        new_rows = {}
        for request in scheduler_output.scheduled_new_reqs:
            row = self.batch.add(request)
            self.prompt_logprobs.add(request)
            seed = default_seed(self.config.model.seed, request.req_id)
            sampling = pack_row(request.sampling_params, request.token_ids, request.num_prompt_tokens, self.vocab_size, seed)
            new_rows[row] = NewRow(self.batch.block_table(request), request.end_token_ids, sampling)
        if new_rows:
            self._write_rows(new_rows)

    def _write_rows(self, new_rows: dict[int, NewRow]) -> None:
        self.state = row_state.write_rows(self.state, new_rows)


def program_bytes(program: jax.stages.Compiled) -> int:
    """Bytes of temporaries and results, without what is updated in place."""
    analysis = program.memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
