"""The step in stages: each stage of a pipeline has some of the layers, devices of its own and a program of its own.

    first:   (weights, kv_caches, block_tables, batch, last_tokens) -> (kv_caches, block_tables, hidden)
    between: (weights, kv_caches, block_tables, batch, hidden)      -> (kv_caches, block_tables, hidden)
    last:    (weights, kv_caches, state, batch, hidden)             -> (kv_caches, state, output, last_tokens)

`last_tokens` int32 [S] holds what every request row has sampled last. The last stage knows it; the first one needs it, for its
input, as many steps later as there are stages: see worker/pipeline_runner.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models.graph import ModelGraph
from jaxllm.worker.batch import BatchLayout
from jaxllm.worker.row_state import RowState
from jaxllm.worker.step import KVCaches, StepOptions, Weights, input_tokens, make_step, write_table


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
