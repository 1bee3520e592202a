"""PipelineRunner: a ModelRunner whose steps go through several stages, all in this process, each with devices and programs of its
own.

A step is dispatched to all stages at once. What a stage gives goes straight to the devices of the next, whose program waits for
it there; so while one step is in the second stage the next one runs in the first, as long as the first needs nothing that the
last has yet to give. That is the token that a request sampled last.
"""

from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.worker import row_state
from jaxllm.worker.buckets import Bucket, Buckets
from jaxllm.worker.compile_cache import CompileCounter, compile_all
from jaxllm.worker.kv_cache import allocate_kv_caches
from jaxllm.worker.model_runner import ModelRunner, program_bytes
from jaxllm.worker.pipeline_step import lower_stage
from jaxllm.worker.row_state import NewRow
from jaxllm.worker.stages import Stage
from jaxllm.worker.step import KVCaches, StepOutput, Weights
from jaxllm.worker.ticks import SampledIn
from sharding.rules import KV_CACHE_AXES, sharding_of


class _EarlyStage:
    """A stage before the last: its weights, its part of the KV cache, and the block tables."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.weights: Weights = ()
        self.replicated = sharding_of(stage.mesh, ())
        self.kv_sharding = sharding_of(stage.mesh, KV_CACHE_AXES)
        self.kv_caches: KVCaches = ()
        self.block_tables: jax.Array | None = None


class PipelineRunner(ModelRunner):
    """Runs steps on the stages of a pipeline. As a ModelRunner it is the last of them, which samples.

    Args:
        stages: at least two.
        weights: in the order of the specs of all stages.
    """

    def __init__(
        self,
        config: EngineConfig,
        stages: Sequence[Stage],
        weights: Weights,
        kv_cache_config: KVCacheConfig,
        buckets: Buckets,
        rows_per_group: int | None,
        compile_counter: CompileCounter,
    ) -> None:
        *early, last = stages
        super().__init__(config, last.mesh, last.graph, (), kv_cache_config, buckets, rows_per_group, compile_counter)
        self.num_arrays = last.num_arrays
        self.stages = list(stages)
        self.early = [_EarlyStage(stage) for stage in early]
        self.set_weights(weights)
        self.program_caches = [
            self._make_program_cache(stage.mesh, {"stage": (index, len(stages), stage.layers)})
            for index, stage in enumerate(stages)
        ]
        self.stage_programs: dict[tuple[Bucket, int], jax.stages.Compiled] = {}
        # The last token of every row after each of the latest steps, with the step's number, on the first stage. As many as
        # there are steps in flight: of those before, each row's token is still there.
        self._last_tokens: deque[tuple[int, jax.Array]] = deque(maxlen=len(stages) + 1)
        self._num_steps = 0
        self._sampled_in = SampledIn(self.max_num_seqs)

    def set_weights(self, weights: Weights) -> None:
        start = 0
        for stage in self.early:
            stop = start + len(stage.stage.graph.specs)
            stage.weights, start = weights[start:stop], stop
        self.weights = weights[start:]

    def compile_stage(self, bucket: Bucket, index: int) -> jax.stages.Compiled:
        """The program of one bucket and stage, compiled once."""
        key = (bucket, index)
        if key not in self.stage_programs:
            name = f"{bucket} stage {index}"
            self.stage_programs[key] = self.program_caches[index].get(name, key, lambda name: self._lower_stage(*key, name))
        return self.stage_programs[key]

    def _lower_stage(self, bucket: Bucket, index: int, name: str) -> jax.stages.Lowered:
        is_last = index == len(self.early)
        weights = self.weights if is_last else self.early[index].weights
        return lower_stage(self, self.stages[index], weights, bucket, name, is_first=index == 0, is_last=is_last)

    def step_bytes(self, bucket: Bucket) -> int:
        return max(program_bytes(self.compile_stage(bucket, index)) for index in range(len(self.stages)))

    def facts(self) -> dict[str, str]:
        """Of all stages: those in which they differ are there once for each."""
        differing = {
            f"stage {index}": repr([cache.facts.get(name) for name in ("devices", "mesh", "stage")])
            for index, cache in enumerate(self.program_caches)
        }
        return {**super().facts(), **differing}

    def _compiled_buckets(self) -> list[Bucket]:
        return [
            bucket for bucket in self.buckets if all((bucket, index) in self.stage_programs for index in range(len(self.stages)))
        ]

    def compile_all(self, progress: bool, only: Sequence[Bucket] | None = None) -> None:
        jobs = [
            (f"{bucket} stage {index}", lambda bucket=bucket, index=index: self.compile_stage(bucket, index))
            for bucket in self.buckets
            if only is None or bucket in only
            for index in range(len(self.stages))
        ]
        compile_all(jobs, progress)

    def allocate(self) -> None:
        super().allocate()
        for early in self.early:
            early.kv_caches = allocate_kv_caches(
                self.kv_cache_config, self.cache_dtype, early.kv_sharding, early.stage.num_arrays
            )
            shape = (self.num_groups, self.max_num_seqs, self.max_blocks)
            early.block_tables = jnp.zeros(shape, jnp.int32, device=early.replicated)
        nothing = jnp.zeros(self.max_num_seqs, jnp.int32, device=self.early[0].replicated)
        self._last_tokens.clear()
        self._last_tokens.append((self._num_steps, nothing))

    def warm_up(self) -> None:
        self._write_rows({})
        super().warm_up()
        jax.block_until_ready(self.device_arrays())

    def device_arrays(self) -> list[jax.Array]:
        early = [(stage.kv_caches, stage.block_tables) for stage in self.early]
        return jax.tree.leaves((super().device_arrays(), early))

    def drop_requests(self) -> None:
        super().drop_requests()
        for stage in self.early:
            stage.kv_caches, stage.block_tables = (), None
        self._last_tokens.clear()

    def close(self) -> None:
        super().close()
        for stage in self.early:
            stage.kv_caches, stage.block_tables, stage.weights = (), None, ()
        self._last_tokens.clear()
        self.stage_programs = {}

    def _write_rows(self, new_rows: dict[int, NewRow]) -> None:
        super()._write_rows(new_rows)
        for stage in self.early:
            stage.block_tables = row_state.write_tables(stage.block_tables, new_rows)

    def _needed_step(self, bucket: Bucket, fields: dict[str, np.ndarray]) -> int:
        """The number of the step that sampled the newest token that a batch takes from the devices; 0 if it takes none."""
        return self._sampled_in.needed(fields, bucket.num_tokens)

    def _run(self, bucket: Bucket, vector: np.ndarray) -> StepOutput:
        fields = self.layout(bucket).fields(vector)
        needed = self._needed_step(bucket, fields)
        # The oldest that will do: it is there, or will be soon, while a newer one may be of a step that has only begun.
        given = next((tokens for number, tokens in self._last_tokens if number >= needed))
        for index, early in enumerate(self.early):
            early.kv_caches, early.block_tables, hidden = self.compile_stage(bucket, index)(
                early.weights, early.kv_caches, early.block_tables, jax.device_put(vector, early.replicated), given
            )
            following = self.early[index + 1].replicated if index + 1 < len(self.early) else self.replicated
            given = jax.device_put(hidden, following)
        self.kv_caches, self.state, output, last_tokens = self.compile_stage(bucket, len(self.early))(
            self.weights, self.kv_caches, self.state, jax.device_put(vector, self.replicated), given
        )
        self._num_steps += 1
        self._last_tokens.append((self._num_steps, jax.device_put(last_tokens, self.early[0].replicated)))
        self._sampled_in.note(fields, self._num_steps)
        return output
