"""The block tables of one KV cache group, by what its layers can see; and the longest prefix that several groups share."""

from collections.abc import Sequence

from jaxllm.core.block_pool import BlockPool
from jaxllm.core.kv_cache_interface import KVCacheSpec
from jaxllm.core.kv_cache_utils import KVCacheBlock


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class FullAttentionManager:
    """Block tables of layers that see every token. Block `i` of a table holds tokens `i * block_size` and following.

    Attributes:
        tables: request id → its blocks.
        num_cached_blocks: request id → leading blocks of the table that were offered to the prefix cache.
    """

    # Whether the first blocks of a hit are a hit themselves.
    hit_is_prefix_closed = True

    def __init__(self, spec: KVCacheSpec, block_pool: BlockPool, group_id: int = 0) -> None:
        self.block_size = spec.block_size
        self.block_pool = block_pool
        self.group_id = group_id
        self.tables: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_blocks: dict[str, int] = {}

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[KVCacheBlock]:
        """The longest run of cached blocks from the start, at most `max_blocks`. Holds nothing: `start_table` does."""
        hit = []
        for block_hash in block_hashes[:max_blocks]:
            block = self.block_pool.get_cached_block(block_hash, self.group_id)
            if block is None:
                break
            hit.append(block)
        return hit

    def max_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at once."""
        return cdiv(num_tokens, self.block_size)

    def num_blocks_to_take(self, request_id: str, num_slots: int, hit: Sequence[KVCacheBlock]) -> int:
        """Blocks that leave the free queue for a request to have `num_slots` slots: new ones and free ones of the hit."""
        num_blocks = len(self.tables.get(request_id, ())) + len(hit)
        return max(cdiv(num_slots, self.block_size) - num_blocks, 0) + _num_free(hit)

    def num_blocks_to_finish(self, num_tokens: int, hit: Sequence[KVCacheBlock]) -> int:
        """The same for a new request until it has computed `num_tokens` tokens, in however many steps."""
        num_held = sum(not block.is_null for block in hit)
        return max(self.max_blocks(num_tokens) - num_held, 0) + _num_free(hit)

    def start_table(self, request_id: str, hit: Sequence[KVCacheBlock]) -> None:
        """Begin a request's table with a hit, holding its blocks."""
        assert request_id not in self.tables, f"request {request_id!r} has a block table already"
        self.block_pool.touch(hit)
        self.tables[request_id] = list(hit)
        self.num_cached_blocks[request_id] = len(hit)

    def grow_table(self, request_id: str, num_slots: int) -> list[int]:
        """Make room for `num_slots` tokens, where there are enough free blocks. Returns the ids of the new blocks."""
        table = self.tables[request_id]
        num_new_blocks = cdiv(num_slots, self.block_size) - len(table)
        if num_new_blocks <= 0:
            return []
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
        table += new_blocks
        return [block.block_id for block in new_blocks]

    def cache_blocks(self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Offer the full blocks among the first `num_tokens` tokens to the prefix cache."""
        start, stop = self.num_cached_blocks[request_id], num_tokens // self.block_size
        if stop > start:
            self.block_pool.cache_full_blocks(self.tables[request_id], block_hashes, start, stop, self.group_id)
            self.num_cached_blocks[request_id] = stop

    def free_unseen(self, request_id: str, num_tokens: int) -> None:
        """Free blocks that no query from position `num_tokens` on can see. Here: none."""

    def next_unseen(self, num_tokens: int) -> int | None:
        """The number of tokens from which `free_unseen` would free more than at `num_tokens`. Here: never."""
        return None

    def take_table(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a request and return its blocks, still held. Empty if it has none."""
        self.num_cached_blocks.pop(request_id, None)
        return self.tables.pop(request_id, [])


class SlidingWindowManager(FullAttentionManager):
    """Block tables of layers whose queries see `sliding_window` tokens, their own included.

    Blocks that have left the window are freed; the null block takes their place, so that positions in the table stay.

    Args:
        max_step_slots: most token slots that a request is given in one step. Bounds what it can hold at once.
    """

    hit_is_prefix_closed = False

    def __init__(self, spec: KVCacheSpec, block_pool: BlockPool, group_id: int, max_step_slots: int) -> None:
        super().__init__(spec, block_pool, group_id)
        assert spec.sliding_window is not None
        self.sliding_window = spec.sliding_window
        # The tokens before the next one that its query sees may start in the middle of a block.
        self.num_window_blocks = cdiv(self.sliding_window - 1, self.block_size)
        self._max_blocks = cdiv(self.sliding_window - 1 + max_step_slots, self.block_size) + 1

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[KVCacheBlock]:
        """The longest prefix whose window is cached: its last blocks, as many as a window needs, or all of a shorter prefix.

        Found from the end, so the length is the first that works. Blocks before the window are null blocks.
        """
        null_block = self.block_pool.null_block
        num_blocks = min(max_blocks, len(block_hashes))
        if self.num_window_blocks == 0:
            return [null_block] * num_blocks
        run: list[KVCacheBlock] = []  # cached blocks without a gap, the last one first
        for index in range(num_blocks - 1, -1, -1):
            block = self.block_pool.get_cached_block(block_hashes[index], self.group_id)
            if block is None:
                run.clear()
                continue
            run.append(block)
            if len(run) == self.num_window_blocks:
                return [null_block] * index + run[::-1]
        return run[::-1]

    def max_blocks(self, num_tokens: int) -> int:
        return min(cdiv(num_tokens, self.block_size), self._max_blocks)

    def free_unseen(self, request_id: str, num_tokens: int) -> None:
        table = self.tables.get(request_id, [])
        unseen = []
        null_block = self.block_pool.null_block
        for index in range(min(self._num_unseen_blocks(num_tokens), len(table)) - 1, -1, -1):
            if table[index].is_null:
                break
            unseen.append(table[index])
            table[index] = null_block
        self.block_pool.free_blocks(unseen)

    def next_unseen(self, num_tokens: int) -> int:
        return (self._num_unseen_blocks(num_tokens) + 1) * self.block_size + self.sliding_window - 1

    def _num_unseen_blocks(self, num_tokens: int) -> int:
        return max(num_tokens - self.sliding_window + 1, 0) // self.block_size


def _num_free(blocks: Sequence[KVCacheBlock]) -> int:
    return sum(block.ref_cnt == 0 and not block.is_null for block in blocks)


def find_longest_common_hit(
    managers: Sequence[FullAttentionManager], block_hashes: Sequence[bytes], max_blocks: int
) -> tuple[list[KVCacheBlock], ...]:
    """The longest prefix of at most `max_blocks` blocks that every group has cached, as one list of blocks a group.

    A group that finds less shortens the search of the others, round after round until all agree; lengths only fall, so it ends.
    A full-attention hit is cut; a sliding window must look again, since the cut prefix ends in another window.
    """
    if len(managers) == 1:
        return (managers[0].find_longest_hit(block_hashes, max_blocks),)
    length = min(max_blocks, len(block_hashes))
    hits: list[list[KVCacheBlock] | None] = [None] * len(managers)
    while not all(hit is not None and len(hit) == length for hit in hits):
        for group_id, manager in enumerate(managers):
            hit = hits[group_id]
            if hit is None or (len(hit) > length and not manager.hit_is_prefix_closed):
                hit = manager.find_longest_hit(block_hashes, length)
            hits[group_id] = hit[:length]
            length = len(hits[group_id])
    return tuple(hits)
