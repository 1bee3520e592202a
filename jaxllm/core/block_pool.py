"""BlockPool: who holds which block, which blocks are free, and which cached prefix is in which block."""

from collections.abc import Iterable, Sequence

from jaxllm.checks import check_at_least
from jaxllm.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from jaxllm.core.kv_events import KVEventLog


class BlockPool:
    """All blocks of the KV cache.

    A free block keeps its content, and its place in the prefix cache, until it is handed out again: the free queue is at the
    same time the order of eviction. Identical blocks are not merged, so a block table only ever grows at its end.

    Args:
        num_blocks: block 0, the null block, included.
        num_groups: KV cache groups; each has a prefix cache of its own over the same blocks.

    Raises:
        ValueError: if there is no block beside the null block.

    Attributes:
        events: notes what the prefix cache of the first group gains and loses; None to note nothing.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        check_at_least("num_blocks", num_blocks, 2)
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.events: KVEventLog | None = None
        # Hash → block, or → block id → block if several hold the same, the first cached first.
        self._cached: list[dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]]] = [{} for _ in range(num_groups)]

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_free_blocks

    @property
    def usage(self) -> float:
        """The share of the blocks that block tables hold, in [0, 1]."""
        return 1.0 - self.num_free_blocks / (self.num_blocks - 1)

    def get_cached_block(self, block_hash: bytes, group_id: int = 0) -> KVCacheBlock | None:
        """A block that holds this prefix for this group, free or not; of several the one cached first. None if there is none."""
        found = self._cached[group_id].get(block_hash)
        if isinstance(found, dict):
            return next(iter(found.values()))
        return found

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Hand out `n` blocks, evicting the prefixes that they held. ValueError, and no change, if fewer are free."""
        blocks = self.free_queue.popleft_n(n)
        for block in blocks:
            if block.block_hash is not None:
                self._evict(block)
            block.ref_cnt = 1
        return blocks

    def cache_full_blocks(
        self, blocks: Sequence[KVCacheBlock], block_hashes: Sequence[bytes], start: int, stop: int, group_id: int = 0
    ) -> None:
        """Make blocks `start` to `stop` of a block table findable. Null blocks among them are passed over.

        Args:
            blocks: the block table.
            block_hashes: of the same request.
        """
        cached = self._cached[group_id]
        for index in range(start, stop):
            block = blocks[index]
            if block.is_null:
                continue
            assert block.block_hash is None, f"{block!r} is cached already"
            block_hash = block.block_hash = block_hashes[index]
            block.group_id = group_id
            twin = cached.setdefault(block_hash, block)
            if isinstance(twin, dict):
                twin[block.block_id] = block
            elif twin is not block:
                cached[block_hash] = {twin.block_id: twin, block.block_id: block}
            elif self.events is not None and group_id == 0:
                self.events.note_stored(block_hash)

    def uncache_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Make blocks unfindable. Null blocks and blocks without a prefix among them are passed over."""
        for block in blocks:
            if block.block_hash is not None:
                self._evict(block)

    def _evict(self, block: KVCacheBlock) -> None:
        cached = self._cached[block.group_id]
        twins = cached[block.block_hash]
        if isinstance(twins, dict):
            del twins[block.block_id]
            if len(twins) == 1:
                cached[block.block_hash] = next(iter(twins.values()))
        else:
            assert twins is block, f"{block!r} is not in the prefix cache, {twins!r} is in its place"
            del cached[block.block_hash]
            if self.events is not None and block.group_id == 0:
                self.events.note_removed(block.block_hash)
        block.block_hash = None

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a holder to each block; those that were free are no longer."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take a holder from each block. Those left without one become free.

        Blocks with a prefix go to the end of the queue, to be evicted last; the others go to its front, to be used next.

        Args:
            blocks: in the order of eviction. Null blocks are passed over.
        """
        with_hash, without_hash = [], []
        for block in blocks:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, f"{block!r} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (without_hash if block.block_hash is None else with_hash).append(block)
        self.free_queue.append_n(with_hash)
        self.free_queue.prepend_n(without_hash)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False, and no change, unless all blocks are free. The order of reuse stays."""
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        for cached in self._cached:
            cached.clear()
        if self.events is not None:
            self.events.note_cleared()
        for block in self.blocks:
            block.block_hash = None
        return True

    def check_integrity(self) -> None:
        """Recount everything. AssertionError if a block is lost, free and held at once, or misplaced in the prefix cache."""
        free_ids = [block.block_id for block in self.free_queue.get_all()]
        assert len(set(free_ids)) == len(free_ids), f"a block is in the free queue twice: {free_ids}"
        unheld = {block.block_id for block in self.blocks if block.ref_cnt == 0 and not block.is_null}
        assert set(free_ids) == unheld, f"free queue {sorted(free_ids)}, blocks without a holder {sorted(unheld)}"
        assert all(block.ref_cnt >= 0 for block in self.blocks)
        assert self.null_block.ref_cnt == 0
        assert self.null_block.block_hash is None
        num_cached = 0
        for group_id, cached in enumerate(self._cached):
            for block_hash, found in cached.items():
                assert not isinstance(found, dict) or len(found) > 1, "a set of twins that are none"
                for block in found.values() if isinstance(found, dict) else [found]:
                    assert block is self.blocks[block.block_id]
                    assert (block.block_hash, block.group_id) == (block_hash, group_id), f"{block!r} stands under another hash"
                    num_cached += 1
        num_hashed = sum(block.block_hash is not None for block in self.blocks)
        assert num_cached == num_hashed, f"{num_cached} blocks in the prefix cache, {num_hashed} blocks with a hash"
