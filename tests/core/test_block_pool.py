"""BlockPool: allocation, prefix cache, eviction."""

import pytest

from jaxllm.core.block_pool import BlockPool
from jaxllm.core.kv_cache_utils import KVCacheBlock

HASHES = [bytes([i]) * 32 for i in range(8)]


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def free(pool: BlockPool) -> list[int]:
    pool.check_integrity()
    return ids(pool.free_queue.get_all())


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert (pool.null_block.block_id, pool.null_block.is_null, pool.num_free_blocks) == (0, True, 3)
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    with pytest.raises(ValueError, match=r"n must be in \[0, 0\]"):
        pool.get_new_blocks(1)


@pytest.mark.parametrize("num_blocks", [1, 0, -3, True, 2.0])
def test_too_few_blocks(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="num_blocks must be an integer of at least 2"):
        BlockPool(num_blocks)


def test_usage() -> None:
    pool = BlockPool(5)
    assert pool.usage == 0.0
    blocks = pool.get_new_blocks(3)
    assert pool.usage == 0.75
    pool.free_blocks(blocks)
    assert pool.usage == 0.0


def test_blocks_without_a_prefix_are_reused_first_the_others_last() -> None:
    pool = BlockPool(8)
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(blocks, HASHES, 0, 2)
    pool.free_blocks(reversed(blocks))
    assert free(pool) == [4, 3, 5, 6, 7, 2, 1]


def test_a_prefix_is_found_until_its_block_is_handed_out() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, HASHES, 0, 2)
    pool.free_blocks(reversed(blocks))
    assert pool.get_cached_block(HASHES[0]) is blocks[0]
    assert pool.get_cached_block(HASHES[2]) is None
    assert ids(pool.get_new_blocks(2)) == [3, 2]
    assert pool.get_cached_block(HASHES[0]) is blocks[0]
    assert pool.get_cached_block(HASHES[1]) is None
    assert blocks[1].block_hash is None
    pool.check_integrity()


def test_touch_takes_a_block_out_of_the_middle_of_the_queue() -> None:
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, HASHES, 0, 3)
    pool.free_blocks(reversed(blocks))
    assert free(pool) == [4, 3, 2, 1]
    pool.touch([pool.null_block, blocks[1]])
    assert free(pool) == [4, 3, 1]
    pool.touch([blocks[1]])
    assert blocks[1].ref_cnt == 2
    pool.free_blocks([blocks[1]])
    assert free(pool) == [4, 3, 1]
    pool.free_blocks([pool.null_block, blocks[1]])
    assert free(pool) == [4, 3, 1, 2]


def test_twins_are_kept_apart_and_the_first_is_found() -> None:
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.cache_full_blocks([block], HASHES, 0, 1)
    assert pool.get_cached_block(HASHES[0]) is blocks[0]
    # Free in this order: 4, 5, then the twins; the first one cached is evicted first.
    pool.free_blocks(blocks)
    pool.get_new_blocks(3)
    assert pool.get_cached_block(HASHES[0]) is blocks[1]
    pool.check_integrity()
    pool.get_new_blocks(1)
    assert pool.get_cached_block(HASHES[0]) is blocks[2]
    pool.check_integrity()
    pool.get_new_blocks(1)
    assert pool.get_cached_block(HASHES[0]) is None
    pool.check_integrity()


def test_groups_do_not_see_each_other() -> None:
    pool = BlockPool(5, num_groups=2)
    a, b = pool.get_new_blocks(2)
    pool.cache_full_blocks([a], HASHES, 0, 1, group_id=0)
    assert pool.get_cached_block(HASHES[0], 1) is None
    pool.cache_full_blocks([b], HASHES, 0, 1, group_id=1)
    assert (pool.get_cached_block(HASHES[0], 0), pool.get_cached_block(HASHES[0], 1)) == (a, b)
    pool.check_integrity()


def test_null_blocks_are_not_cached() -> None:
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([pool.null_block, block], HASHES, 0, 2)
    assert pool.get_cached_block(HASHES[0]) is None
    assert pool.get_cached_block(HASHES[1]) is block
    pool.check_integrity()


def test_uncache_blocks() -> None:
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, HASHES, 0, 2)
    pool.uncache_blocks([pool.null_block, *blocks[1:]])
    assert pool.get_cached_block(HASHES[0]) is blocks[0]
    assert pool.get_cached_block(HASHES[1]) is None
    pool.check_integrity()


def test_reset_prefix_cache_needs_all_blocks_free() -> None:
    pool = BlockPool(5, num_groups=2)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, HASHES, 0, 1, group_id=0)
    pool.cache_full_blocks(blocks, HASHES, 1, 2, group_id=1)
    pool.free_blocks(blocks[:1])
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(HASHES[0], 0) is blocks[0]
    pool.free_blocks(blocks[1:])
    before = free(pool)
    assert pool.reset_prefix_cache()
    assert free(pool) == before
    assert pool.get_cached_block(HASHES[0], 0) is pool.get_cached_block(HASHES[1], 1) is None


def test_our_own_mistakes_are_caught() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, HASHES, 0, 1)
    with pytest.raises(AssertionError, match="cached already"):
        pool.cache_full_blocks(blocks, HASHES, 0, 1)
    pool.free_blocks([blocks[1]])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free_blocks([blocks[1]])
    pool.check_integrity()


def test_check_integrity_finds_a_lost_block() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(1)[0].ref_cnt = 0
    with pytest.raises(AssertionError, match="blocks without a holder"):
        pool.check_integrity()


def test_check_integrity_finds_a_hash_that_is_not_in_the_cache() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(1)[0].block_hash = HASHES[0]
    with pytest.raises(AssertionError, match="0 blocks in the prefix cache, 1 blocks with a hash"):
        pool.check_integrity()
