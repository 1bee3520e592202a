"""KVCacheManager with one group of full attention: hits, slots, caching, freeing. Block size 16 unless said otherwise."""

import pytest
from core_builders import free_ids, make_kv_cache_config, make_manager, make_request

from jaxllm.core.kv_cache_manager import NO_BLOCKS, BlockIds, KVCacheManager
from jaxllm.core.kv_cache_utils import BlockHasher
from jaxllm.core.request import Request
from jaxllm.core.types import PrefixCacheStats

HASHER = BlockHasher(16)
COMMON = [i for i in range(3) for _ in range(16)]


def request(request_id: str, tokens: list[int], **kwargs: object) -> Request:
    return make_request(request_id, tokens, HASHER, **kwargs)


def admit(manager: KVCacheManager, request: Request, num_new_tokens: int | None = None, **kwargs: object) -> BlockIds | None:
    """Look up and allocate, and count the tokens as computed, as the scheduler does."""
    hit, num_hit_tokens = manager.get_computed_blocks(request)
    if num_new_tokens is None:
        num_new_tokens = request.num_tokens - num_hit_tokens
    block_ids = manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hit, **kwargs)
    if block_ids is not None:
        request.num_computed_tokens = num_hit_tokens + num_new_tokens
    manager.check_integrity()
    return block_ids


def decode(manager: KVCacheManager, request: Request, token_id: int = 7, **kwargs: object) -> BlockIds | None:
    request.append_output_token_ids([token_id])
    block_ids = manager.allocate_slots(request, 1, **kwargs)
    if block_ids is not None:
        request.num_computed_tokens += 1
    manager.check_integrity()
    return block_ids


def hit_of(manager: KVCacheManager, request: Request) -> tuple[list[int], int]:
    hit, num_tokens = manager.get_computed_blocks(request)
    assert len(hit) == 1
    return [block.block_id for block in hit[0]], num_tokens


def refs(manager: KVCacheManager) -> list[int]:
    return [block.ref_cnt for block in manager.block_pool.blocks[1:]]


def test_prefill_and_the_order_of_reuse() -> None:
    manager = make_manager(11, 16)
    a = request("a", COMMON + [3] * 7)
    assert hit_of(manager, a) == ([], 0)
    assert admit(manager, a) == ([1, 2, 3, 4],)
    assert refs(manager) == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert [block.block_hash for block in manager.block_pool.blocks[1:5]] == [*a.block_hashes, None]

    b = request("b", COMMON + [4] * 5)
    assert hit_of(manager, b) == ([1, 2, 3], 48)
    assert refs(manager)[:3] == [1, 1, 1], "a lookup holds nothing"
    assert admit(manager, b) == ([5],)
    assert manager.get_block_ids("b") == ([1, 2, 3, 5],)
    assert refs(manager)[:3] == [2, 2, 2]

    manager.free(a)
    manager.free(b)
    # Tails first: those without a prefix to the front of the queue, the others to its end.
    assert free_ids(manager) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    c = request("c", COMMON + [5] * 6)
    assert hit_of(manager, c) == ([1, 2, 3], 48)
    assert admit(manager, c) == ([5],)
    assert free_ids(manager) == [4, 6, 7, 8, 9, 10]
    manager.free(c)

    d = request("d", [99] * 160)
    assert admit(manager, d) == ([5, 4, 6, 7, 8, 9, 10, 3, 2, 1],)
    assert (manager.block_pool.num_free_blocks, manager.usage) == (0, 1.0)
    assert hit_of(manager, c) == ([], 0), "all is evicted"


def test_a_hit_has_whole_blocks_and_leaves_a_token_to_compute() -> None:
    manager = make_manager(11, 16)
    admit(manager, request("a", COMMON))
    assert hit_of(manager, request("b", COMMON)) == ([1, 2], 32)
    assert hit_of(manager, request("b", [*COMMON, 3])) == ([1, 2, 3], 48)
    assert hit_of(manager, request("b", COMMON[:47])) == ([1, 2], 32)
    assert hit_of(manager, request("b", COMMON[:16])) == ([], 0)
    assert hit_of(manager, request("b", COMMON[:16] + [9] * 32)) == ([1], 16)


def test_decode_takes_a_block_when_the_last_is_full_and_caches_it_when_its_last_token_is_scheduled() -> None:
    manager = make_manager(11, 16)
    a = request("a", COMMON + [3] * 7)
    admit(manager, a)
    for _ in range(8):
        assert decode(manager, a) == NO_BLOCKS
    assert manager.block_pool.blocks[4].block_hash is None
    assert decode(manager, a) == NO_BLOCKS
    assert (a.num_tokens, manager.block_pool.blocks[4].block_hash) == (64, a.block_hashes[3])
    assert decode(manager, a) == ([5],)
    assert manager.get_block_ids("a") == ([1, 2, 3, 4, 5],)


def test_chunked_prefill_caches_what_each_chunk_fills() -> None:
    manager = make_manager(11, 16)
    a, b = request("a", COMMON + [3] * 7), request("b", COMMON)
    assert admit(manager, a, 20) == ([1, 2],)
    assert hit_of(manager, b) == ([1], 16)
    assert manager.allocate_slots(a, 11) == NO_BLOCKS
    a.num_computed_tokens += 11
    assert hit_of(manager, b) == ([1], 16)
    assert manager.allocate_slots(a, 1) == NO_BLOCKS
    a.num_computed_tokens += 1
    assert hit_of(manager, b) == ([1, 2], 32)
    assert manager.allocate_slots(a, 23) == ([3, 4],)


def test_evict() -> None:
    manager = make_manager(11, 16)
    a = request("a", list(range(5 * 16 + 7)))
    b = request("b", list(range(1000, 1000 + 48)))
    admit(manager, a)
    admit(manager, b)
    manager.free(a)
    assert free_ids(manager) == [6, 10, 5, 4, 3, 2, 1]
    manager.free(b)
    assert free_ids(manager) == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    c = request("c", list(range(32 + 3)))
    assert hit_of(manager, c) == ([1, 2], 32)
    assert admit(manager, c) == ([6],)
    assert free_ids(manager) == [10, 5, 4, 3, 9, 8, 7]


def test_a_reused_block_loses_its_hash() -> None:
    manager = make_manager(2, 16)
    a = request("a", list(range(16)))
    admit(manager, a)
    manager.free(a)
    admit(manager, request("b", list(range(15))))
    assert manager.block_pool.blocks[1].block_hash is None


def test_a_hit_is_not_evicted_by_its_own_request() -> None:
    manager = make_manager(3, 16)
    a, b = request("a", list(range(16))), request("b", list(range(16, 32)))
    for r in (a, b):
        admit(manager, r)
    for r in (a, b):
        manager.free(r)
    # Block 1 is the next to be handed out, and c's hit.
    assert free_ids(manager) == [1, 2]
    c = request("c", [*range(16), *[77] * 16])
    assert hit_of(manager, c) == ([1], 16)
    assert admit(manager, c) == ([2],)
    assert manager.get_block_ids("c") == ([1, 2],)


def test_free_blocks_of_a_hit_are_needed_too_and_a_refusal_touches_nothing() -> None:
    manager = make_manager(11, 16)
    a = request("a", COMMON)
    admit(manager, a)
    b = request("b", COMMON + [3] * 48)
    assert admit(manager, b) == ([4, 5, 6],)
    manager.free(a)
    manager.free(b)
    assert admit(manager, request("c", [9] * 80)) == ([7, 8, 9, 10, 6],)
    # 5 blocks are free, of which 5 would be d's hit, and it needs one more.
    d = request("d", COMMON + [3] * 48)
    assert hit_of(manager, d) == ([1, 2, 3, 4, 5], 80)
    before = free_ids(manager)
    assert before == [5, 4, 3, 2, 1]
    assert admit(manager, d) is None
    assert (free_ids(manager), refs(manager)[:5], manager.managers[0].tables.keys()) == (before, [0] * 5, {"c"})
    assert hit_of(manager, d) == ([1, 2, 3, 4, 5], 80)
    # Without the last block of the prompt it fits.
    e = request("e", COMMON + [3] * 32)
    assert hit_of(manager, e) == ([1, 2, 3, 4], 64)
    assert admit(manager, e) == ([5],)


def test_duplicate_blocks_stay_apart() -> None:
    manager = make_manager(11, 4)
    hasher = BlockHasher(4)
    a, b = (make_request(name, [1, 2, 3, 4, 5], hasher) for name in "ab")
    admit(manager, a, 2)
    admit(manager, b, 2)
    for r in (a, b):
        manager.allocate_slots(r, 3)
        r.num_computed_tokens += 3
    manager.check_integrity()
    assert (manager.get_block_ids("a"), manager.get_block_ids("b")) == (([1, 3],), ([2, 4],))
    c = make_request("c", [1, 2, 3, 4, 9], hasher)
    assert hit_of(manager, c) == ([1], 4)
    manager.free(a)
    manager.free(b)
    admit(manager, make_request("d", list(range(50, 82)), hasher))
    assert free_ids(manager) == [1, 2]
    admit(manager, make_request("e", [99], hasher))
    assert hit_of(manager, c) == ([2], 4)


def test_without_prefix_caching() -> None:
    manager = make_manager(11, 16, enable_caching=False)
    a, b = (make_request(name, COMMON + [3] * 7) for name in "ab")
    assert admit(manager, a) == ([1, 2, 3, 4],)
    assert hit_of(manager, b) == ([], 0)
    assert admit(manager, b) == ([5, 6, 7, 8],)
    for _ in range(10):
        decode(manager, a)
    manager.free(a)
    # Last in, first out: nothing worth keeping.
    assert free_ids(manager) == [9, 4, 3, 2, 1, 10]
    manager.record_lookup(a, 0)
    assert manager.take_prefix_cache_stats() == PrefixCacheStats()


def test_a_request_that_must_not_read_the_cache_still_fills_it() -> None:
    manager = make_manager(11, 16)
    a = request("a", COMMON, prompt_logprobs=1)
    admit(manager, a)
    assert hit_of(manager, a) == ([], 0)
    b = request("b", COMMON, skip_reading_prefix_cache=True)
    assert admit(manager, b) == ([4, 5, 6],)
    assert hit_of(manager, request("c", [*COMMON, 1])) == ([1, 2, 3], 48)


def test_salt_and_extra_keys_keep_requests_apart() -> None:
    manager = make_manager(20, 16)
    admit(manager, request("a", [*COMMON, 1], cache_salt="x"))
    admit(manager, request("b", [*COMMON, 1], extra_keys=("adapter",)))
    assert hit_of(manager, request("c", [*COMMON, 1])) == ([], 0)
    assert hit_of(manager, request("c", [*COMMON, 1], cache_salt="y")) == ([], 0)
    assert hit_of(manager, request("c", [*COMMON, 1], cache_salt="x")) == ([1, 2, 3], 48)
    assert hit_of(manager, request("c", [*COMMON, 1], extra_keys=("adapter",))) == ([5, 6, 7], 48)
    assert hit_of(manager, request("c", [*COMMON, 1], extra_keys=("adapter",), cache_salt="x")) == ([], 0)


def test_lookahead_slots_are_allocated_and_not_cached() -> None:
    manager = make_manager(11, 4)
    a = make_request("a", [1, 2, 3], BlockHasher(4))
    assert admit(manager, a, num_lookahead_tokens=5) == ([1, 2],)
    assert manager.block_pool.blocks[1].block_hash is None
    assert decode(manager, a, num_lookahead_tokens=4) == NO_BLOCKS
    assert manager.block_pool.blocks[1].block_hash == a.block_hashes[0]
    assert decode(manager, a, num_lookahead_tokens=4) == ([3],)


def test_slots_end_at_max_model_len() -> None:
    manager = make_manager(11, 4, max_model_len=10)
    a = make_request("a", 8, BlockHasher(4))
    assert admit(manager, a, num_lookahead_tokens=100) == ([1, 2, 3],)
    assert decode(manager, a, num_lookahead_tokens=100) == NO_BLOCKS


def test_drafts_are_not_cached() -> None:
    manager = make_manager(11, 4)
    a = make_request("a", [1, 2, 3], BlockHasher(4))
    a.spec_token_ids = [4, 5, 6]
    assert admit(manager, a, 6) == ([1, 2],)
    assert manager.block_pool.blocks[1].block_hash is None


def test_full_sequence_must_fit() -> None:
    manager = make_manager(11, 16)
    admit(manager, request("a", COMMON))
    b = request("b", [9] * 128)
    assert admit(manager, b, 16, full_sequence_must_fit=True) is None
    assert admit(manager, b, 16) == ([4],)
    manager.free(b)
    # 7 blocks fit exactly; of a prompt with a hit only the rest counts.
    assert admit(manager, request("c", [6] * 112), 16, full_sequence_must_fit=True) == ([5],)
    assert admit(manager, request("d", COMMON + [8] * 112), 16, full_sequence_must_fit=True) is None
    assert admit(manager, request("d", COMMON + [8] * 96), 16, full_sequence_must_fit=True) == ([6],)


def test_reserved_blocks_stay_free() -> None:
    manager = make_manager(11, 16)
    assert admit(manager, request("a", [9] * 128), num_reserved_blocks=3) is None
    assert admit(manager, request("a", [9] * 128), 32, num_reserved_blocks=3, full_sequence_must_fit=True) is None
    assert admit(manager, request("a", [9] * 112), num_reserved_blocks=3) == ([1, 2, 3, 4, 5, 6, 7],)


def test_blocks_of_a_step_that_does_not_run_leave_the_cache() -> None:
    manager = make_manager(11, 4)
    hasher = BlockHasher(4)
    a = make_request("a", list(range(100, 113)), hasher)
    admit(manager, a, 5)
    # Scheduled up to token 13, which caches blocks 2 and 3, and then not run: num_computed_tokens stays 5.
    assert manager.allocate_slots(a, 8) == ([3, 4],)
    assert hit_of(manager, make_request("b", list(range(100, 113)), hasher)) == ([1, 2, 3], 12)
    manager.free(a)
    manager.check_integrity()
    assert hit_of(manager, make_request("b", list(range(100, 113)), hasher)) == ([1], 4)


def test_reset_prefix_cache() -> None:
    manager = make_manager(11, 16)
    a = request("a", COMMON)
    admit(manager, a)
    assert not manager.reset_prefix_cache()
    assert not manager.take_prefix_cache_stats().reset
    manager.free(a)
    assert hit_of(manager, request("b", [*COMMON, 1])) == ([1, 2, 3], 48)
    assert manager.reset_prefix_cache()
    assert hit_of(manager, request("b", [*COMMON, 1])) == ([], 0)
    assert manager.take_prefix_cache_stats().reset


def test_stats_count_tokens_and_keep_preempted_requests_apart() -> None:
    manager = make_manager(11, 16)
    a = request("a", COMMON)
    manager.record_lookup(a, 16)
    manager.record_lookup(a, 0)
    a.num_preemptions = 1
    a.append_output_token_ids([1, 2])
    manager.record_lookup(a, 32)
    manager.record_lookup(request("b", COMMON, skip_reading_prefix_cache=True), 0)
    expected = PrefixCacheStats(
        requests=2, queries=96, hits=16, preempted_requests=1, preempted_queries=50, preempted_hits=32, reset=False
    )
    assert manager.take_prefix_cache_stats() == expected
    assert manager.take_prefix_cache_stats() == PrefixCacheStats()


def test_freeing_a_request_without_blocks() -> None:
    manager = make_manager(11, 16)
    manager.free(request("a", COMMON))
    assert manager.block_pool.num_free_blocks == 10
    with pytest.raises(KeyError):
        manager.get_block_ids("a")


def test_too_few_blocks_for_one_request() -> None:
    assert make_manager(5, 4, max_model_len=16).block_pool.num_blocks == 5
    with pytest.raises(
        ValueError, match="num_blocks 5 is too small: a request of max_model_len 17 tokens needs 5 blocks beside the null block"
    ):
        make_manager(5, 4, max_model_len=17)


def test_groups_of_different_block_size() -> None:
    groups = make_kv_cache_config(9, 4).groups + make_kv_cache_config(9, 8).groups
    config = type(make_kv_cache_config(9, 4))(9, groups)
    with pytest.raises(ValueError, match=r"KV cache groups must have one block size, got \[4, 8\]"):
        KVCacheManager(config, 8)


def test_nothing_is_done_for_a_request_that_stays_within_its_last_block() -> None:
    # The quick path of a decode step: no growth, nothing full. It ends exactly where there is something to do.
    manager = make_manager(11, 16)
    a = request("a", [1] * 17)
    admit(manager, a)
    assert a.kv_quiet_until == 32
    manager.free(a)
    assert a.kv_quiet_until == 0
    uncached = make_manager(11, 16, enable_caching=False)
    b = make_request("b", [1] * 17)
    admit(uncached, b)
    assert b.kv_quiet_until == 33
