"""The one table of where things go: logical axis names to mesh axes."""

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

# None: the same on every device.
RULES: dict[str, str | None] = {
    "heads": "tensor",  # query heads, and the fused q, k, v columns in stripes
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "sampled_rows": "tensor",  # while sampling, when the logits have changed hands
    "expert": "expert",
    "rows": "data",
}


def spec_of(axes: Sequence[str | None]) -> PartitionSpec:
    """The mesh axis of each dimension.

    Args:
        axes: the logical axis of each dimension, None for one that is never sharded.

    Raises:
        ValueError: if a logical axis is not in the table.
    """
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"logical axis {axis!r} is unknown; known: {', '.join(sorted(RULES))}")
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def sharding_of(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """Where an array with these logical axes goes on `mesh`; errors as `spec_of`."""
    return NamedSharding(mesh, spec_of(axes))


# A layer's KV cache, [N, 2, K, B, D].
KV_CACHE_AXES = (None, None, "kv_heads", None, None)
