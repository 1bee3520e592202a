"""Sampling when several devices share the vocabulary: each takes a share of the rows.

The logits come in stripes of the vocabulary. Sampled as they lie, nearly every operation would need the other devices, in
branches that not every step takes; and a branch with communication in it cannot be part of a command buffer, so the host would
wait for it. So the logits change hands once, after which every device holds some rows whole and samples them alone, and all learn
the result: two communications a step, and a device's work is its share of the rows.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxllm.config import LogprobsMode
from jaxllm.sample.sampler import SamplerOutput, sample
from jaxllm.sample.state import NEUTRAL_SCALARS, SamplingMetadata
from sharding.rules import RULES


def sample_sharded(
    mesh: Mesh,
    logits: jax.Array,
    metadata: SamplingMetadata,
    positions: jax.Array,
    *,
    max_logprobs: int,
    logprobs_mode: LogprobsMode,
) -> SamplerOutput:
    """`sample`, with the rows shared by the devices of `mesh`. The result is on every device; arguments as those of `sample`."""
    num_rows, vocab_size = logits.shape
    axis = RULES["sampled_rows"]
    num_devices = mesh.shape[axis]
    run = partial(sample, max_logprobs=max_logprobs, logprobs_mode=logprobs_mode)
    shapes = jax.eval_shape(run, logits, metadata, positions)
    share = -(-num_rows // num_devices)
    padding = share * num_devices - num_rows
    striped = vocab_size % num_devices == 0

    def sample_share(logits: jax.Array, metadata: SamplingMetadata, positions: jax.Array) -> jax.Array:
        start = lax.axis_index(axis) * share

        def mine(array: jax.Array, fill: jax.typing.ArrayLike = 0) -> jax.Array:
            filling = jnp.broadcast_to(jnp.asarray(fill, array.dtype), (padding, *array.shape[1:]))
            return lax.dynamic_slice_in_dim(jnp.concatenate([array, filling]), start, share)

        if striped:
            padded = jnp.pad(logits, ((0, padding), (0, 0)))
            own = lax.all_to_all(padded, axis, split_axis=0, concat_axis=1, tiled=True)
        else:
            own = mine(logits)
        # Padding rows are greedy, so that no device takes a path that none of its rows needs.
        scalars = mine(metadata.scalars, NEUTRAL_SCALARS)
        own_metadata = SamplingMetadata(mine(metadata.row_ids), mine(metadata.in_use), scalars, metadata.tables)
        return lax.all_gather(_pack(run(own, own_metadata, mine(positions))), axis, tiled=True)

    # All of it by hand: left to choose, XLA would rather gather the weights of the output head than split its rows.
    whole = PartitionSpec()
    packed = jax.shard_map(
        sample_share,
        mesh=mesh,
        in_specs=(PartitionSpec(None, axis) if striped else whole, whole, whole),
        out_specs=whole,
        check_vma=False,
    )(logits, metadata, positions)
    return _unpack(packed[:num_rows], shapes)


def _pack(output: SamplerOutput) -> jax.Array:
    """All arrays of n rows side by side, so that one communication moves them: int32 [n, _]."""
    leaves = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(output)]
    return jnp.concatenate([lax.bitcast_convert_type(leaf, jnp.int32) for leaf in leaves], axis=1)


def _unpack(packed: jax.Array, shapes: SamplerOutput) -> SamplerOutput:
    leaves, treedef = jax.tree.flatten(shapes)
    stops = np.cumsum([math.prod(leaf.shape[1:]) for leaf in leaves])
    parts = jnp.split(packed, stops[:-1], axis=1)
    return jax.tree.unflatten(
        treedef,
        [lax.bitcast_convert_type(part, leaf.dtype).reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)],
    )
