"""StageRunner: a ModelRunner of one stage of a pipeline, in a process that has a part of that stage's devices, or all.

Every process is given every step and starts its own stage's program; what a stage gives goes from its devices to those of the
next, and the host of neither waits for it. Which process exchanges what when: worker/ticks.py.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import SchedulerOutput
from jaxllm.worker import row_state
from jaxllm.worker.buckets import Bucket, Buckets
from jaxllm.worker.compile_cache import CompileCounter
from jaxllm.worker.kv_cache import allocate_kv_caches
from jaxllm.worker.model_runner import ModelRunner, StepInFlight
from jaxllm.worker.pipeline_step import lower_stage
from jaxllm.worker.processes import replicate
from jaxllm.worker.row_state import NewRow
from jaxllm.worker.stage_link import StageLink
from jaxllm.worker.stages import Stage
from jaxllm.worker.step import StepOutput, Weights
from jaxllm.worker.ticks import SampledIn, Ticks


class StageRunner(ModelRunner):
    """Runs the steps of one stage.

    Args:
        stages: of the pipeline, at least two.
        index: which of them is this process's; no process has devices of two.
        weights: in the order of the specs of that stage.
    """

    def __init__(
        self,
        config: EngineConfig,
        stages: Sequence[Stage],
        index: int,
        weights: Weights,
        kv_cache_config: KVCacheConfig,
        buckets: Buckets,
        rows_per_group: int | None,
        compile_counter: CompileCounter,
    ) -> None:
        stage = stages[index]
        super().__init__(config, stage.mesh, stage.graph, weights, kv_cache_config, buckets, rows_per_group, compile_counter)
        self.stage, self.index = stage, index
        self.is_first, self.is_last = index == 0, index == len(stages) - 1
        self.num_arrays = stage.num_arrays
        self.program_cache = self._make_program_cache(stage.mesh, {"stage": (index, len(stages), stage.layers)})
        self._from_before = None if self.is_first else StageLink(stages[index - 1].mesh, stage.mesh)
        self._to_next = None if self.is_last else StageLink(stage.mesh, stages[index + 1].mesh)
        # The way of the sampled tokens.
        self._back = StageLink(stages[-1].mesh, stages[0].mesh) if self.is_first or self.is_last else None
        self._link_caches = {
            link: self._make_program_cache(link.mesh, {"stage": "between"})
            for link in (self._from_before, self._to_next, self._back)
            if link is not None
        }
        self.block_tables: jax.Array | None = None  # but in the last stage, whose rows have them
        self._ticks = Ticks(len(stages))
        self._sampled_in = SampledIn(self.max_num_seqs)
        self._num_steps = 0
        # On the first stage, what every row has sampled last as far as it has come; on the last, what each step has yet to send.
        self._last_tokens: jax.Array | None = None
        self._to_send: dict[int, jax.Array] = {}

    def _hidden(self, bucket: Bucket) -> tuple[tuple[int, int], str]:
        """Shape and dtype of what goes from stage to stage."""
        return (bucket.num_tokens, self.config.model.decoder.hidden_size), self.config.model.dtype

    def compile(self, bucket: Bucket) -> jax.stages.Compiled:
        program = super().compile(bucket)
        for link in (self._from_before, self._to_next):
            if link is not None:
                link.compile(*self._hidden(bucket), self._link_caches[link])
        if self._back is not None:
            self._back.compile((self.max_num_seqs,), "int32", self._link_caches[self._back])
        return program

    def _lower(self, bucket: Bucket, name: str) -> jax.stages.Lowered:
        return lower_stage(self, self.stage, self.weights, bucket, name, is_first=self.is_first, is_last=self.is_last)

    def allocate(self) -> None:
        if self.is_last:
            super().allocate()
            return
        self.kv_caches = allocate_kv_caches(self.kv_cache_config, self.cache_dtype, self.kv_sharding, self.num_arrays)
        shape = (self.num_groups, self.max_num_seqs, self.max_blocks)
        self.block_tables = jnp.zeros(shape, jnp.int32, device=self.replicated)
        if self.is_first:
            self._last_tokens = jnp.zeros(self.max_num_seqs, jnp.int32, device=self.replicated)

    def warm_up(self) -> None:
        if self.is_last:
            super().warm_up()
        else:
            self._write_rows({})
            self._take_in_compiled()
        self._finish()
        jax.block_until_ready(self.device_arrays())

    def device_arrays(self) -> list[jax.Array]:
        return jax.tree.leaves((super().device_arrays(), self.block_tables, self._last_tokens))

    def drop_requests(self) -> None:
        super().drop_requests()
        self.block_tables = self._last_tokens = None

    def close(self) -> None:
        super().close()
        for link in self._link_caches:
            link.close()
        self.block_tables = self._last_tokens = None
        self._to_send.clear()

    def _write_rows(self, new_rows: dict[int, NewRow]) -> None:
        if self.is_last:
            super()._write_rows(new_rows)
        else:
            self.block_tables = row_state.write_tables(self.block_tables, new_rows)

    def start(self, scheduler_output: SchedulerOutput) -> StepInFlight:
        step = super().start(scheduler_output)
        if step.bucket is None:
            return step
        # Log probabilities of a prompt are computed behind all that was started: the last stage must not wait for tokens to go
        # back that the first one would take when it starts a further step.
        number = None if step.prompt_chunks else self._num_steps
        return dataclasses.replace(step, before_result=partial(self._finish, number))

    def _run(self, bucket: Bucket, vector: np.ndarray) -> StepOutput | None:
        fields = self.layout(bucket).fields(vector)
        self._num_steps += 1
        tick = self._ticks.enter(self._num_steps, self._sampled_in.needed(fields, bucket.num_tokens))
        self._sampled_in.note(fields, self._num_steps)
        program, batch = self.compile(bucket), replicate(vector, self.replicated)
        if self.is_last:
            return self._run_last(program, batch, bucket, tick + self.index)
        if self._from_before is None:
            self._take_tokens(tick)
            given = self._last_tokens
        else:
            given = self._from_before.receive(*self._hidden(bucket))
        self.kv_caches, self.block_tables, hidden = program(self.weights, self.kv_caches, self.block_tables, batch, given)
        assert self._to_next is not None
        self._to_next.send(hidden)
        if self.is_first:
            self._take_tokens(tick + 1)
        return None

    def _run_last(self, program: jax.stages.Compiled, batch: jax.Array, bucket: Bucket, tick: int) -> StepOutput:
        """
        Args:
            tick: in which this stage runs the step.
        """
        assert self._from_before is not None
        self._send_tokens(self._ticks.due(tick - 1))
        hidden = self._from_before.receive(*self._hidden(bucket))
        # What came of the step before goes back while the first stage hands on a step too.
        self._send_tokens(self._ticks.due(tick))
        self.kv_caches, self.state, output, last_tokens = program(self.weights, self.kv_caches, self.state, batch, hidden)
        self._to_send[self._num_steps] = last_tokens
        return output

    def _finish(self, step: int | None = None) -> None:
        """Let the tokens of this step go back, or of all that were started."""
        self._ticks.finish(self._num_steps if step is None else step)
        if self.is_last:
            self._send_tokens(self._ticks.due(self._ticks.next))
        else:
            self._take_tokens(self._ticks.next)

    def _take_tokens(self, tick: int) -> None:
        """On a stage before the last: the first of them gets those that come before `tick`."""
        for _ in self._ticks.due(tick):
            if self.is_first:
                assert self._back is not None
                self._last_tokens = self._back.receive((self.max_num_seqs,), "int32")

    def _send_tokens(self, steps: list[int]) -> None:
        """On the last stage."""
        assert self._back is not None
        for step in steps:
            self._back.send(self._to_send.pop(step))
