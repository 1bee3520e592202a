"""KV cache groups whose layers see a window of tokens, alone and beside full attention. Block size 4."""

import pytest
from core_builders import free_ids, make_manager, make_request
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.core.block_pool import BlockPool
from jaxllm.core.kv_cache_interface import KVCacheSpec
from jaxllm.core.kv_cache_manager import NO_BLOCKS, KVCacheManager
from jaxllm.core.kv_cache_utils import BlockHasher
from jaxllm.core.request import Request
from jaxllm.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager, find_longest_common_hit

B = 4
HASHER = BlockHasher(B)
HASHES = [bytes([i]) * 32 for i in range(16)]


def pool_with(cached: list[set[int]]) -> tuple[BlockPool, list[dict[int, int]]]:
    """A pool in which group g has cached the blocks `cached[g]` of one sequence. Also the block id of each."""
    pool = BlockPool(80, num_groups=len(cached))
    ids: list[dict[int, int]] = []
    for group_id, indices in enumerate(cached):
        table = pool.get_new_blocks(16)
        ids.append({index: block.block_id for index, block in enumerate(table)})
        for index in indices:
            pool.cache_full_blocks(table, HASHES, index, index + 1, group_id)
    return pool, ids


def sliding(pool: BlockPool, window: int, group_id: int = 0) -> SlidingWindowManager:
    return SlidingWindowManager(KVCacheSpec(B, 1, 8, 2, sliding_window=window), pool, group_id, max_step_slots=8)


def full(pool: BlockPool, group_id: int = 0) -> FullAttentionManager:
    return FullAttentionManager(KVCacheSpec(B, 1, 8, 2), pool, group_id)


@pytest.mark.parametrize(
    ("window", "cached", "expected"),
    [
        # window 5 reaches 4 tokens back: 1 block; 6 reaches 5 back: 2 blocks; 9 is 2 blocks, 10 is 3.
        (5, {0, 1, 2}, [0, 0, 1]),
        (6, {0, 1, 2}, [0, 1, 1]),
        (9, {0, 1, 2, 3}, [0, 0, 1, 1]),
        (10, {0, 1, 2, 3}, [0, 1, 1, 1]),
        # The window at the end decides; gaps before it do not matter.
        (6, {1, 2, 5, 6}, [0, 0, 0, 0, 0, 1, 1]),
        (6, {1, 2, 5}, [0, 1, 1]),
        (6, {1, 3, 5}, []),
        # A prefix shorter than the window must be cached as a whole.
        (10, {0, 1}, [1, 1]),
        (10, {1, 2}, []),
        (10, {0, 2, 3}, [1]),
        (10, set(), []),
        # Every query sees itself alone: nothing needs to be there.
        (1, set(), [0] * 16),
        (2, {3}, [0, 0, 0, 1]),
    ],
)
def test_find_longest_hit(window: int, cached: set[int], expected: list[int]) -> None:
    pool, (ids,) = pool_with([cached])
    hit = sliding(pool, window).find_longest_hit(HASHES, 16)
    assert [block.block_id for block in hit] == [ids[i] if real else 0 for i, real in enumerate(expected)]


def test_find_longest_hit_within_a_limit() -> None:
    pool, (ids,) = pool_with([{0, 1, 2, 4, 5}])
    manager = sliding(pool, 6)
    found = {limit: [block.block_id for block in manager.find_longest_hit(HASHES, limit)] for limit in range(8)}
    assert found == {
        0: [],
        1: [ids[0]],
        2: [ids[0], ids[1]],
        3: [0, ids[1], ids[2]],
        4: [0, ids[1], ids[2]],
        5: [0, ids[1], ids[2]],
        6: [0, 0, 0, 0, ids[4], ids[5]],
        7: [0, 0, 0, 0, ids[4], ids[5]],
    }
    assert manager.find_longest_hit(HASHES[:3], 8) == manager.find_longest_hit(HASHES, 3)


@given(st.sets(st.integers(0, 9)), st.integers(1, 20), st.integers(0, 10))
def test_find_longest_hit_is_the_longest_whose_window_is_cached(cached: set[int], window: int, limit: int) -> None:
    pool, _ = pool_with([cached])
    hit = sliding(pool, window).find_longest_hit(HASHES[:10], limit)

    def works(length: int) -> bool:
        return all(position // B in cached for position in range(max(0, length * B - window + 1), length * B))

    assert len(hit) == max(length for length in range(limit + 1) if works(length))
    assert all(block.is_null or index in cached for index, block in enumerate(hit))
    for position in range(max(0, len(hit) * B - window + 1), len(hit) * B):
        assert not hit[position // B].is_null


@given(st.lists(st.tuples(st.none() | st.integers(1, 14), st.sets(st.integers(0, 7))), min_size=1, max_size=4), st.integers(0, 8))
def test_the_common_hit_is_the_longest_that_all_groups_have(groups: list[tuple[int | None, set[int]]], limit: int) -> None:
    pool, _ = pool_with([cached for _, cached in groups])
    managers = [full(pool, g) if window is None else sliding(pool, window, g) for g, (window, _) in enumerate(groups)]
    hits = find_longest_common_hit(managers, HASHES[:8], limit)

    def works(length: int) -> bool:
        return all(
            position // B in cached
            for window, cached in groups
            for position in range(0 if window is None else max(0, length * B - window + 1), length * B)
        )

    assert {len(hit) for hit in hits} == {max(length for length in range(limit + 1) if works(length))}


def test_full_attention_is_cut_to_what_the_window_has_and_the_window_looks_again() -> None:
    # Full: 5 blocks. Window of 2 blocks: 4, 5 are beyond that; then 1, 2 end at length 3.
    pool, (full_ids, window_ids) = pool_with([{0, 1, 2, 3, 4}, {1, 2, 5, 6}])
    hits = find_longest_common_hit([full(pool, 0), sliding(pool, 6, 1)], HASHES, 16)
    assert [[block.block_id for block in hit] for hit in hits] == [
        [full_ids[0], full_ids[1], full_ids[2]],
        [0, window_ids[1], window_ids[2]],
    ]


def run(manager: KVCacheManager, request: Request, num_new_tokens: int) -> object:
    hit, num_hit_tokens = manager.get_computed_blocks(request) if request.num_computed_tokens == 0 else (None, 0)
    block_ids = manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hit)
    if block_ids is not None:
        request.num_computed_tokens += num_hit_tokens + num_new_tokens
    manager.check_integrity()
    return block_ids


def test_blocks_that_leave_the_window_are_freed() -> None:
    manager = make_manager(20, B, windows=(6,))
    a = make_request("a", 13, HASHER)
    assert run(manager, a, 13) == ([1, 2, 3, 4],)
    tables = []
    for _ in range(7):
        a.append_output_token_ids([7])
        run(manager, a, 1)
        tables.append((a.num_computed_tokens, *manager.get_block_ids("a")))
    # The query at position p sees p - 5 and following. Block 1 (positions 4 to 7) is unseen from p = 13, block 2 from p = 17.
    assert tables == [
        (14, [0, 0, 3, 4]),
        (15, [0, 0, 3, 4]),
        (16, [0, 0, 3, 4]),
        (17, [0, 0, 3, 4, 5]),
        (18, [0, 0, 0, 4, 5]),
        (19, [0, 0, 0, 4, 5]),
        (20, [0, 0, 0, 4, 5]),
    ]
    # Freed from the window's far end on, cached all of them, so they were appended: later blocks first.
    assert free_ids(manager) == [*range(6, 20), 2, 1, 3]
    manager.free(a)
    assert free_ids(manager) == [*range(6, 20), 2, 1, 3, 5, 4]


def test_the_window_counts_from_what_is_certain() -> None:
    # Three of the computed tokens are placeholders and may yet be rejected: the next query may be three positions earlier.
    manager = make_manager(20, B, windows=(6,))
    a = make_request("a", 13, HASHER)
    run(manager, a, 13)
    a.append_output_token_ids([7])
    a.num_computed_tokens, a.num_output_placeholders = 16, 4
    manager.allocate_slots(a, 1)
    assert manager.get_block_ids("a") == ([0, 2, 3, 4, 5],)
    a.num_output_placeholders = 3
    manager.allocate_slots(a, 2)
    assert manager.get_block_ids("a") == ([0, 0, 3, 4, 5],)


def test_a_hit_fills_what_lies_before_the_window_with_null_blocks() -> None:
    manager = make_manager(20, B, windows=(6,))
    a = make_request("a", list(range(100, 117)), HASHER)
    run(manager, a, 17)
    manager.free(a)
    assert free_ids(manager) == [5, *range(6, 20), 4, 3, 2, 1]
    b = make_request("b", [*range(100, 116), 1, 2, 3], HASHER)
    hit, num_hit_tokens = manager.get_computed_blocks(b)
    assert ([block.block_id for block in hit[0]], num_hit_tokens) == ([0, 0, 3, 4], 16)
    assert run(manager, b, 3) == ([5],)
    assert manager.get_block_ids("b") == ([0, 0, 3, 4, 5],)
    assert [manager.block_pool.blocks[i].ref_cnt for i in range(6)] == [0, 0, 0, 1, 1, 1]


def test_admission_counts_only_what_a_window_can_hold() -> None:
    # A window of 6 and steps of at most 8 slots: 5 + 8 tokens may lie in 5 blocks.
    manager = make_manager(7, B, windows=(6,), max_model_len=100, max_step_slots=8)
    a = make_request("a", 60, HASHER)
    assert manager.managers[0].max_blocks(60) == 5
    assert manager.managers[0].max_blocks(9) == 3
    hit, _ = manager.get_computed_blocks(a)
    assert manager.allocate_slots(a, 8, 0, hit, full_sequence_must_fit=True, num_reserved_blocks=2) is None
    assert manager.allocate_slots(a, 8, 0, hit, full_sequence_must_fit=True, num_reserved_blocks=1) == ([1, 2],)
    a.num_computed_tokens = 8
    while a.num_computed_tokens < 56:
        assert run(manager, a, 8) is not None
    assert run(manager, a, 4) is not None
    with pytest.raises(ValueError, match="max_model_len 100 tokens needs 5 blocks"):
        make_manager(5, B, windows=(6,), max_model_len=100, max_step_slots=8)


def test_two_groups_take_blocks_from_one_pool() -> None:
    manager = make_manager(21, B, windows=(None, 6))
    a = make_request("a", list(range(100, 114)), HASHER)
    assert run(manager, a, 14) == ([1, 2, 3, 4], [5, 6, 7, 8])
    for _ in range(2):
        a.append_output_token_ids([7])
        assert run(manager, a, 1) == NO_BLOCKS
    assert manager.get_block_ids("a") == ([1, 2, 3, 4], [0, 0, 7, 8])
    a.append_output_token_ids([7])
    assert run(manager, a, 1) == ([9], [10])
    # Tails first in both groups at once; 9 and 10 have no prefix.
    manager.free(a)
    assert free_ids(manager) == [9, 10, *range(11, 21), 6, 5, 4, 8, 3, 7, 2, 1]


def test_two_groups_hit_only_what_both_have() -> None:
    manager = make_manager(21, B, windows=(None, 6))
    a = make_request("a", list(range(100, 117)), HASHER)
    run(manager, a, 17)
    manager.free(a)
    b = make_request("b", list(range(100, 117)), HASHER)
    assert [[block.block_id for block in hit] for hit in manager.get_computed_blocks(b)[0]] == [[1, 2, 3, 4], [0, 0, 8, 9]]
    # Take free blocks until the tail of the sequence is evicted: block 3 (tokens 12 to 15) of both groups.
    c = make_request("c", 25, HASHER)
    run(manager, c, 25)
    assert free_ids(manager) == [3, 8, 2, 7, 1, 6]
    assert manager.get_computed_blocks(b)[1] == 12
    run(manager, make_request("d", 1, HASHER), 1)
    assert free_ids(manager) == [2, 7, 1, 6]
    assert manager.get_computed_blocks(b)[1] == 8


def test_two_groups_fit_together_or_not_at_all() -> None:
    manager = make_manager(8, B, windows=(None, 6), max_model_len=12)
    a = make_request("a", 12, HASHER)
    assert run(manager, a, 12) == ([1, 2, 3], [4, 5, 6])
    b = make_request("b", 3, HASHER)
    assert run(manager, b, 3) is None
    assert free_ids(manager) == [7]
    assert [manager_.tables.keys() for manager_ in manager.managers] == [{"a"}, {"a"}]
