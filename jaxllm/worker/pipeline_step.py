"""The step in stages: each stage of a pipeline has some of the layers, devices of its own and a program of its own.

    first:   (weights, kv_caches, block_tables, batch, last_tokens) -> (kv_caches, block_tables, hidden)
    between: (weights, kv_caches, block_tables, batch, hidden)      -> (kv_caches, block_tables, hidden)
    last:    (weights, kv_caches, state, batch, hidden)             -> (kv_caches, state, output, last_tokens)

`last_tokens` int32 [S] holds what every request row has sampled last. The last stage knows it; the first one needs it, for its
input, as many steps later as there are stages: see worker/pipeline_runner.py, and worker/stage_runner.py where each stage has
processes of its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models.graph import ModelGraph
from jaxllm.worker.batch import BatchLayout
from jaxllm.worker.buckets import Bucket
from jaxllm.worker.kv_cache import abstract_kv_caches
from jaxllm.worker.model_runner import ModelRunner
from jaxllm.worker.row_state import RowState
from jaxllm.worker.stages import Stage
from jaxllm.worker.step import KVCaches, StepOptions, Weights, input_tokens, make_step, write_table
from sharding.rules import KV_CACHE_AXES, sharding_of


def make_stage_step(
    graph: ModelGraph, layout: BatchLayout, options: StepOptions, *, is_first: bool, is_last: bool
) -> Callable[..., tuple[Any, ...]]:
    """A stage's step function of one bucket, to be jitted with its second and third argument donated."""
    if is_last:
        whole = make_step(graph, layout, options)

        def last_step(weights: Weights, kv_caches: KVCaches, state: RowState, vector: jax.Array, hidden: jax.Array):
            kv_caches, state, output = whole(weights, kv_caches, state, vector, hidden)
            # A copy: the state is donated to the next step while the first stage has yet to read this.
            return kv_caches, state, output, jnp.copy(state.last_tokens)

        return last_step

    def step(weights: Weights, kv_caches: KVCaches, block_tables: jax.Array, vector: jax.Array, given: jax.Array):
        batch = layout.unpack(vector)
        block_tables = write_table(block_tables, batch)
        inputs = input_tokens(given, batch) if is_first else given
        hidden, kv_caches = graph.bind(weights)(inputs, kv_caches, layout.attention_metadata(batch, block_tables))
        return kv_caches, block_tables, hidden

    return step


def lower_stage(
    runner: ModelRunner, stage: Stage, weights: Weights, bucket: Bucket, name: str, *, is_first: bool, is_last: bool
) -> jax.stages.Lowered:
    """A stage's step of one bucket, lowered.

    Args:
        runner: of the last stage, or of this one.
        weights: of this stage, or their shapes.
    """
    layout, model = runner.layout(bucket), runner.config.model
    function = make_stage_step(stage.graph, layout, runner.options, is_first=is_first, is_last=is_last)
    function.__name__ = name
    replicated, kv_sharding = sharding_of(stage.mesh, ()), sharding_of(stage.mesh, KV_CACHE_AXES)
    out_shardings = (kv_sharding, replicated, replicated, replicated) if is_last else (kv_sharding, replicated, replicated)
    step = jax.jit(function, donate_argnums=(1, 2), out_shardings=out_shardings)

    def replica(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

    tables = replica((runner.num_groups, runner.max_num_seqs, runner.max_blocks), jnp.int32)
    given = replica((bucket.num_tokens, model.decoder.hidden_size), jnp.dtype(model.dtype))
    return step.lower(
        tuple(jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding) for w in weights),
        abstract_kv_caches(runner.kv_cache_config, runner.cache_dtype, kv_sharding, stage.num_arrays),
        runner.abstract_state() if is_last else tables,
        replica((layout.size,), jnp.int32),
        replica((runner.max_num_seqs,), jnp.int32) if is_first else given,
    )
