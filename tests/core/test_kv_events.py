"""Events of the prefix cache against the prefix cache itself, and the index against what it was told."""

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.core.block_pool import BlockPool
from jaxllm.core.kv_events import KVEventLog, KVEvents, PrefixIndex, short_hash

HASHES = [bytes([i]) * 32 for i in range(8)]


def short(hashes: Sequence[bytes]) -> np.ndarray:
    return np.array([short_hash(one) for one in hashes], np.uint64)


def events(stored: Sequence[bytes] = (), removed: Sequence[bytes] = (), cleared: bool = False) -> KVEvents:
    return KVEvents(short(stored), short(removed), cleared)


def test_log() -> None:
    log = KVEventLog()
    assert log.take() is None
    log.note_stored(HASHES[0])
    log.note_stored(HASHES[1])
    log.note_removed(HASHES[1])
    log.note_removed(HASHES[2])
    log.note_stored(HASHES[2])
    found = log.take()
    assert found is not None
    assert found.stored.tolist() == [short_hash(HASHES[0]), short_hash(HASHES[2])]
    assert (found.removed.tolist(), found.cleared) == ([short_hash(HASHES[1])], False)
    assert log.take() is None
    log.note_stored(HASHES[0])
    log.note_cleared()
    log.note_stored(HASHES[3])
    found = log.take()
    assert found is not None
    assert (found.stored.tolist(), found.removed.tolist(), found.cleared) == ([short_hash(HASHES[3])], [], True)


def test_index_by_hand() -> None:
    index = PrefixIndex(3)
    assert index.cached_blocks(HASHES).tolist() == [0, 0, 0]
    index.update(0, events(HASHES[:4]))
    index.update(2, events(HASHES[:2]))
    assert index.cached_blocks(HASHES[:3]).tolist() == [3, 0, 2]
    assert index.cached_blocks(HASHES).tolist() == [4, 0, 2]
    assert index.cached_blocks([]).tolist() == [0, 0, 0]
    # A later block without the first is worth nothing.
    index.update(0, events(removed=HASHES[:1]))
    index.update(1, events(HASHES[1:]))
    assert index.cached_blocks(HASHES).tolist() == [0, 0, 2]
    index.update(2, events(HASHES[:1], cleared=True))
    assert index.cached_blocks(HASHES).tolist() == [0, 0, 1]
    index.forget(1)
    index.forget(2)
    assert index.cached_blocks(HASHES).tolist() == [0, 0, 0]
    index.forget(0)
    assert len(index) == 0


@given(st.integers(0, 2**32 - 1))
def test_events_of_a_block_pool_tell_what_can_be_found(seed: int) -> None:
    rng = random.Random(seed)
    pool, index, held = BlockPool(6), PrefixIndex(1), []
    pool.events = KVEventLog()
    for _ in range(40):
        action = rng.random()
        if action < 0.5 and pool.num_free_blocks:
            (block,) = pool.get_new_blocks(1)
            pool.cache_full_blocks([block], [rng.choice(HASHES)], 0, 1)  # twins among them
            held.append(block)
        elif action < 0.9 and held:
            pool.free_blocks([held.pop(rng.randrange(len(held)))])
        elif action < 0.95 and held:
            pool.uncache_blocks([rng.choice(held)])
        else:
            pool.reset_prefix_cache()
        if rng.random() < 0.5 and (found := pool.events.take()) is not None:
            index.update(0, found)
    if (found := pool.events.take()) is not None:
        index.update(0, found)
    for block_hash in HASHES:
        assert index.cached_blocks([block_hash]).tolist() == [pool.get_cached_block(block_hash) is not None]
