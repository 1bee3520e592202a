"""Who works on what: the tables that split a batch's attention over the blocks of a GPU.

Computed inside the jitted step, once for all layers that see the same window: nothing to upload, no time on the host, and right
also where the lengths are known on the device only. No loops: sums, comparisons and gathers of small integer arrays.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["work", "first_item", "num_items", "prefill_blocks"],
    meta_fields=["max_items"],
)
@dataclass(frozen=True)
class AttentionPlan:
    """W work items for the decode rows, Q blocks of queries for the others.

    Attributes:
        work: int32 [W, 4], an item a line: row, first tile of keys, tile after the last, queries of the row. An idle item has
            no tiles.
        first_item: int32 [R], the first item of each row; its items follow one another.
        num_items: int32 [R], 0 for rows that are not decodes.
        prefill_blocks: int32 [Q, 2], a block a line: row and the first of its queries; -1, -1 for an idle block. None for a
            batch of decodes only.
        max_items: the most items a row has; static.
    """

    work: jax.Array
    first_item: jax.Array
    num_items: jax.Array
    prefill_blocks: jax.Array | None
    max_items: int


def make_plan(
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    num_decodes: jax.Array,
    *,
    num_tokens: int,
    max_context: int,
    sliding_window: int | None,
    decode_only: bool,
    tile: int,
    slots: int,
    min_tiles: int,
    queries_per_block: int,
) -> AttentionPlan:
    """Cut decode rows into items of about equal numbers of tiles, and the queries of the other rows into blocks.

    With t tiles in all and s slots, an item has at most c = max(min_tiles, t / s) tiles; a row of t_r tiles then takes
    ceil(t_r / c) items, all rows together at most s more than there are rows. A row takes no more items than the merge of its
    partial results can read in little time.

    Args:
        seq_lens, query_start_loc, num_decodes: as in `paged_attention`.
        max_context: tokens that a row can have, P * B.
        queries_per_block: of a prefill block.
    """
    num_rows = seq_lens.shape[0]
    num_queries = query_start_loc[1:] - query_start_loc[:-1]
    is_decode = jnp.arange(num_rows) < (num_rows if decode_only else num_decodes)
    max_items = min(slots, -(-max_context // tile), max(8, 256 // num_rows))

    stops = jnp.where(is_decode, (seq_lens + tile - 1) // tile, 0)
    starts = jnp.zeros_like(stops)
    if sliding_window is not None:
        starts = jnp.minimum(jnp.maximum(seq_lens - num_queries - sliding_window + 1, 0) // tile, stops)
    tiles = stops - starts
    largest = jnp.maximum(jnp.maximum(min_tiles, -(-jnp.sum(tiles) // slots)), -(-tiles // max_items))
    num_items = -(-tiles // largest)
    after = jnp.cumsum(num_items)
    first_item = after - num_items

    item = jnp.arange(num_rows + slots, dtype=jnp.int32)
    row = jnp.minimum(_count_at_most(after, item), num_rows - 1)
    nth, parts = item - first_item[row], jnp.maximum(num_items[row], 1)
    begin = starts[row] + nth * tiles[row] // parts
    end = starts[row] + (nth + 1) * tiles[row] // parts
    busy = item < after[-1]
    work = jnp.where(busy[:, None], jnp.stack([row, begin, end, num_queries[row]], axis=1), 0)

    blocks = None
    if not decode_only:
        num_blocks = jnp.where(is_decode, 0, -(-num_queries // queries_per_block))
        after = jnp.cumsum(num_blocks)
        block = jnp.arange(num_tokens // queries_per_block + min(num_rows, num_tokens), dtype=jnp.int32)
        row = jnp.minimum(_count_at_most(after, block), num_rows - 1)
        # Late queries see the most keys: a row's longest block comes first, so that no long one starts last.
        nth = after[row] - 1 - block
        blocks = jnp.where((block < after[-1])[:, None], jnp.stack([row, nth * queries_per_block], axis=1), -1)
    return AttentionPlan(work.astype(jnp.int32), first_item, num_items, blocks, max_items)


def _count_at_most(ascending: jax.Array, values: jax.Array) -> jax.Array:
    """int32: how many of `ascending` are at most each value. All pairs are compared, since a search would be a loop."""
    return jnp.sum(ascending[None, :] <= values[:, None], axis=1, dtype=jnp.int32)
