"""The jitted step: one program a bucket does everything from the packed batch to the sampled token ids.

    step(weights, kv_caches, state, batch) -> (kv_caches, state, output)

`kv_caches` and `state` are donated and updated in place. A bucket of several steps decodes in a loop on the device: the tokens
are the same, but the host is asked once for all of them. The stages of a pipeline:
worker/pipeline_step.py.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxllm.config import LogprobsMode
from jaxllm.layers.attention import rows_in_use
from jaxllm.models.graph import ModelGraph
from jaxllm.sample.sampler import SamplerOutput, sample
from jaxllm.sample.sharded import sample_sharded
from jaxllm.sample.state import gather, update
from jaxllm.worker.batch import Batch, BatchLayout
from jaxllm.worker.row_state import RowState

Weights = tuple[jax.Array, ...]
KVCaches = tuple[jax.Array, ...]


@dataclass(frozen=True)
class StepOptions:
    """What is static in every step of an engine.

    Attributes:
        rows_per_group: logits and sampling of a mixed bucket go through the rows in use in groups of this many, so that their
            cost follows the rows in use. None: all rows of the bucket at once, which suits devices where a few more rows cost
            nothing and a loop does.
        sampling_mesh: devices that share the rows while sampling; None for one device.
    """

    max_logprobs: int
    logprobs_mode: LogprobsMode
    rows_per_group: int | None = None
    sampling_mesh: Mesh | None = None


class StepOutput(NamedTuple):
    """What a step gives back.

    Attributes:
        sampled: of each row of the batch. In a bucket of K steps every array has a leading axis [K], one entry a step.
        hidden: [T, M] of a mixed bucket, for prompt log probabilities; None of a decode bucket, which holds no prompt.
        num_sampled: int32 [R], tokens that each row sampled, in a bucket of several steps; None in all others, where it is one.
    """

    sampled: SamplerOutput
    hidden: jax.Array | None
    num_sampled: jax.Array | None = None


StepFunction = Callable[..., tuple[KVCaches, RowState, StepOutput]]


def make_step(graph: ModelGraph, layout: BatchLayout, options: StepOptions) -> StepFunction:
    """The step function of one bucket, to be jitted with `kv_caches` and `state` donated.

    That of a pipeline's last stage takes a fifth argument, [T, M], what the stage before gave.
    """
    compute = _make_compute(graph, layout, options)

    def step(weights: Weights, kv_caches: KVCaches, state: RowState, vector: jax.Array, hidden: jax.Array | None = None):
        batch = layout.unpack(vector)
        state = dataclasses.replace(state, block_tables=write_table(state.block_tables, batch))
        if layout.bucket.num_steps == 1:
            return compute(weights, kv_caches, state, batch, hidden)
        return _repeat(layout, partial(compute, weights), kv_caches, state, batch)

    return step


def _make_compute(
    graph: ModelGraph, layout: BatchLayout, options: StepOptions
) -> Callable[..., tuple[KVCaches, RowState, StepOutput]]:
    """From a batch whose blocks are in the tables, or what the stage before gave, to the sampled tokens."""
    bucket = layout.bucket
    run_sampler = sample if options.sampling_mesh is None else partial(sample_sharded, options.sampling_mesh)

    def compute(weights: Weights, kv_caches: KVCaches, state: RowState, batch: Batch, hidden: jax.Array | None = None):
        model = graph.bind(weights)
        inputs = input_tokens(state.last_tokens, batch) if hidden is None else hidden
        hidden, kv_caches = model(inputs, kv_caches, layout.attention_metadata(batch, state.block_tables))

        def sample_rows(start: jax.Array | int, size: int) -> SamplerOutput:
            """Sample for batch rows `start` to `start + size`."""
            rows = lax.dynamic_slice_in_dim(batch.rows, start, size)
            seq_lens = lax.dynamic_slice_in_dim(batch.seq_lens, start, size)
            stops = lax.dynamic_slice_in_dim(batch.query_start_loc, start + 1, size)
            logits = model.compute_logits(hidden[jnp.maximum(stops - 1, 0)], rows_in_use(seq_lens))
            # The sampled token takes the position after the row's last token.
            return run_sampler(
                logits,
                gather(state.sampling, rows),
                seq_lens,
                max_logprobs=options.max_logprobs,
                logprobs_mode=options.logprobs_mode,
            )

        if bucket.decode_only or options.rows_per_group is None or options.rows_per_group >= bucket.num_rows:
            sampled = sample_rows(0, bucket.num_rows)
        else:
            sampled = _sample_in_groups(sample_rows, batch.num_rows, bucket.num_rows, options.rows_per_group)
        metadata = gather(state.sampling, batch.sampled_rows)
        new_state = dataclasses.replace(
            state,
            last_tokens=state.last_tokens.at[batch.sampled_rows].set(sampled.token_ids, mode="drop"),
            sampling=update(state.sampling, metadata, batch.seq_lens, sampled.token_ids, metadata.in_use),
        )
        return kv_caches, new_state, StepOutput(sampled, None if bucket.decode_only else hidden)

    return compute


def _repeat(
    layout: BatchLayout,
    compute: Callable[[KVCaches, RowState, Batch], tuple[KVCaches, RowState, StepOutput]],
    kv_caches: KVCaches,
    state: RowState,
    batch: Batch,
) -> tuple[KVCaches, RowState, StepOutput]:
    """Decode until every row has sampled its limit of tokens or one that ends it. A row that is done is padding from then on."""
    num_rows, nowhere = layout.bucket.num_rows, layout.max_num_rows
    ends = state.end_ids[jnp.minimum(batch.rows, nowhere - 1)]

    def one(i: jax.Array, active: jax.Array, kv_caches: KVCaches, state: RowState):
        rows = jnp.where(active, batch.rows, nowhere)
        # After the first step every input is what the step before it has sampled.
        from_device = jnp.where(active, jnp.arange(num_rows, dtype=jnp.int32), num_rows)
        now = dataclasses.replace(
            batch,
            rows=rows,
            sampled_rows=rows,
            seq_lens=jnp.where(active, batch.seq_lens + i, 0),
            last_token_index=jnp.where(i == 0, batch.last_token_index, from_device),
        )
        return compute(kv_caches, state, now)

    def unfinished(carry: Any) -> jax.Array:
        return carry[1].any()

    def body(carry: Any) -> Any:
        i, active, num_sampled, kv_caches, state, results = carry
        kv_caches, state, output = one(i, active, kv_caches, state)
        results = jax.tree.map(lambda all_steps, new: all_steps.at[i].set(new), results, output.sampled)
        num_sampled = num_sampled + active
        ended = (output.sampled.token_ids[:, None] == ends).any(axis=1)
        return i + 1, active & ~ended & (num_sampled < batch.limits), num_sampled, kv_caches, state, results

    active = batch.limits > 0
    shapes = jax.eval_shape(one, jnp.int32(0), active, kv_caches, state)[2].sampled
    results = jax.tree.map(lambda leaf: jnp.zeros((layout.bucket.num_steps, *leaf.shape), leaf.dtype), shapes)
    start = (jnp.int32(0), active, jnp.zeros(num_rows, jnp.int32), kv_caches, state, results)
    _, _, num_sampled, kv_caches, state, results = lax.while_loop(unfinished, body, start)
    return kv_caches, state, StepOutput(results, None, num_sampled)


def input_tokens(last_tokens: jax.Array, batch: Batch) -> jax.Array:
    """int32 [T]: those of the batch, and where only the devices know them, those that the rows sampled last.

    Args:
        last_tokens: int32 [S], of every request row.
    """
    last = last_tokens[jnp.minimum(batch.rows, last_tokens.shape[0] - 1)]
    return batch.token_ids.at[batch.last_token_index].set(last, mode="drop")


def write_table(block_tables: jax.Array, batch: Batch) -> jax.Array:
    """int32 [G, S, P] with the blocks that the batch's requests got."""
    flat = block_tables.reshape(-1).at[batch.table_index].set(batch.table_block, mode="drop")
    return flat.reshape(block_tables.shape)


def _sample_in_groups(
    sample_rows: Callable[[jax.Array | int, int], SamplerOutput], num_used: jax.Array, num_rows: int, size: int
) -> SamplerOutput:
    """`sample_rows` over rows 0 to `num_used`, `size` at a time; rows beyond give zeros."""
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros((num_rows, *leaf.shape[1:]), leaf.dtype), jax.eval_shape(lambda: sample_rows(0, size))
    )

    def one_group(i: jax.Array, done: SamplerOutput) -> SamplerOutput:
        # The last group is moved back to end with the bucket; the rows it shares with the one before come out the same.
        start = jnp.minimum(i * size, num_rows - size)
        group = sample_rows(start, size)
        return jax.tree.map(lambda all_rows, rows: lax.dynamic_update_slice_in_dim(all_rows, rows, start, 0), done, group)

    return lax.fori_loop(0, -(-num_used // size), one_group, zeros)
