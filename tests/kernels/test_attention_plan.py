"""The plan against one made by plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.paged_attention.plan import make_plan

SIZES = {"num_tokens": 60, "max_context": 640, "tile": 8, "slots": 5, "min_tiles": 2, "queries_per_block": 6}


@functools.cache
def jitted(**options):
    return jax.jit(functools.partial(make_plan, **options))


def plan_of(lengths, queries, num_decodes, num_rows, *, decode_only=False, window=None, **sizes):
    padding = [0] * (num_rows - len(lengths))
    starts = np.concatenate([[0], np.cumsum(queries + padding)])
    arrays = [jnp.asarray(array, jnp.int32) for array in (lengths + padding, starts, num_decodes)]
    return jitted(sliding_window=window, decode_only=decode_only, **{**SIZES, **sizes})(*arrays)


def cut(lengths, queries, num_decodes, window, *, tile, slots, min_tiles, max_items):
    """The items of each row: lists of (first tile, tile after the last)."""
    spans = []
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        first = 0 if window is None else max(0, length - count - window + 1) // tile
        spans.append((first, -(-length // tile)) if row < num_decodes else (0, 0))
    total = sum(stop - first for first, stop in spans)
    items = []
    for first, stop in spans:
        tiles = stop - first
        largest = max(min_tiles, -(-total // slots), -(-tiles // max_items))
        parts = -(-tiles // largest)
        items.append([(first + i * tiles // parts, first + (i + 1) * tiles // parts) for i in range(parts)])
    return items


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 640), st.integers(1, 4)), max_size=7),
    chunks=st.lists(st.integers(0, 12), max_size=2),
    window=st.sampled_from([None, 1, 20]),
    decode_only=st.booleans(),
)
def test_items_and_blocks(rows, chunks, window, decode_only):
    chunks = [] if decode_only else chunks
    lengths = [max(n, q) for n, q in rows] + [count + 3 for count in chunks]
    queries = [q for _, q in rows] + chunks
    plan = plan_of(lengths, queries, len(rows), 9, decode_only=decode_only, window=window)
    work, first, count = (np.asarray(x) for x in (plan.work, plan.first_item, plan.num_items))
    sizes = {name: SIZES[name] for name in ("tile", "slots", "min_tiles")}
    expected = cut(lengths, queries, len(rows), window, max_items=plan.max_items, **sizes)
    assert work.shape == (9 + SIZES["slots"], 4)
    for row, items in enumerate(expected):
        mine = work[first[row] : first[row] + count[row]]
        assert mine.tolist() == [[row, begin, end, queries[row]] for begin, end in items]
    total = sum(map(len, expected))
    assert count.sum() == total
    assert np.all(work[total:] == 0)
    if decode_only:
        assert plan.prefill_blocks is None
        return
    size = SIZES["queries_per_block"]
    blocks = [[len(rows) + row, start] for row, number in enumerate(chunks) for start in reversed(range(0, number, size))]
    found = np.asarray(plan.prefill_blocks).tolist()
    assert found[: len(blocks)] == blocks
    assert all(block == [-1, -1] for block in found[len(blocks) :])


def test_by_hand():
    """40 and 8 tiles on 5 slots: 10 tiles an item, so 4 items and 1."""
    plan = plan_of([320, 64], [1, 1], 2, 2, decode_only=True)
    assert plan.work.tolist() == [[0, 0, 10, 1], [0, 10, 20, 1], [0, 20, 30, 1], [0, 30, 40, 1], [1, 0, 8, 1], [0] * 4, [0] * 4]
    assert (plan.first_item.tolist(), plan.num_items.tolist()) == ([0, 4], [4, 1])


@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_no_row_takes_more_items_than_the_merge_reads(num_rows):
    plan = plan_of([100_000], [1], 1, num_rows, decode_only=True, max_context=131072, tile=64, slots=264)
    assert plan.max_items == {1: 256, 64: 8, 256: 8}[num_rows]
    assert int(plan.num_items[0]) <= plan.max_items
    assert int(plan.work[plan.num_items[0] - 1, 2]) == -(-100_000 // 64)
