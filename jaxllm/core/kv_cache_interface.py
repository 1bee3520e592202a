"""What a model keeps in the KV cache, told in integers: layers, groups of layers, blocks."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheSpec:
    """What one layer keeps for a block of `block_size` tokens.

    Attributes:
        num_kv_heads: heads over all devices, after any repetition for tensor parallelism.
        itemsize: bytes of one element.
        sliding_window: tokens that a query can see, itself included; None for all.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    sliding_window: int | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer, K and V, over all devices."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.itemsize


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share a block table. Layer `layers[i]` keeps its blocks in array `i` of the cache."""

    layers: tuple[int, ...]
    spec: KVCacheSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """The KV cache: `num_arrays` arrays of `num_blocks` blocks, shared by the groups through one block pool.

    A block id belongs to one group at a time, so layers of different groups use different blocks of the same array.
    Block 0 is the null block: never handed out, the target of padding.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def num_arrays(self) -> int:
        return max(len(group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block id over all arrays and devices."""
        return self.num_arrays * self.groups[0].spec.page_bytes

    def array_of_layer(self) -> list[tuple[int, int]]:
        """(group, array) of each layer."""
        places = {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}
        return [places[layer] for layer in range(len(places))]


def make_kv_cache_groups(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group the layers of a model by what they keep.

    All layers alike: one group. Full-attention layers mixed with sliding-window layers: groups of the size of the smallest
    kind, so that the arrays are used evenly; the last group of a kind may be shorter. Full attention comes first.

    Args:
        specs: one a layer.

    Raises:
        ValueError: if two layers have pages of different size.
    """
    if len({spec.page_bytes for spec in specs}) != 1:
        raise ValueError(f"layers keep pages of different sizes: {sorted({spec.page_bytes for spec in specs})} bytes")
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    size = min(len(layers) for layers in kinds.values())
    groups = [
        KVCacheGroup(tuple(layers[start : start + size]), spec)
        for spec, layers in sorted(kinds.items(), key=lambda item: item[0].sliding_window is not None)
        for start in range(0, len(layers), size)
    ]
    return tuple(groups)
