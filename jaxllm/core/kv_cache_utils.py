"""Blocks of the KV cache, the queue of free ones, and the hashes by which full ones are found again."""

import hashlib
import struct
from collections.abc import Iterable, Sequence


class KVCacheBlock:
    """One block id and what the block pool knows of it.

    Attributes:
        block_id: index into the cache arrays.
        ref_cnt: block tables that hold it. 0: it is in the free queue.
        block_hash: of its tokens and all before them, if it is in the prefix cache. A free block keeps it until it is handed out.
        group_id: the KV cache group in whose layers the cached tokens are; means nothing without a hash.
        is_null: the stand-in for blocks that a request does not need. Never free, never counted.
        prev_free, next_free: neighbours in the free queue; None outside it.
    """

    __slots__ = ("block_hash", "block_id", "group_id", "is_null", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.group_id = 0
        self.is_null = False
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        block_hash = None if self.block_hash is None else self.block_hash.hex()[:8]
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={block_hash})"


class FreeKVCacheBlockQueue:
    """Free blocks in the order of reuse: a doubly linked list through the blocks themselves.

    A free block may still hold a cached prefix, and a request that hits it takes it out of the middle. A deque would need O(n)
    for that; here it is O(1), and nothing is allocated. Two sentinels at the ends spare every operation its special cases.

    Args:
        blocks: all free, in the order of their first use.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Remove and return the first `n` blocks. ValueError, and no change, if there are fewer."""
        if not 0 <= n <= self.num_free_blocks:
            raise ValueError(f"n must be in [0, {self.num_free_blocks}], the number of free blocks, got {n}")
        blocks = []
        block = self._head.next_free
        for _ in range(n):
            blocks.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        self._head.next_free = block
        block.prev_free = self._head
        self.num_free_blocks -= n
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out from wherever it stands. ValueError if it is not in the queue."""
        if block.prev_free is None or block.next_free is None:
            raise ValueError(f"{block!r} is not in the free queue")
        block.prev_free.next_free = block.next_free
        block.next_free.prev_free = block.prev_free
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add blocks to the end: they are reused last, the first of them first."""
        self._insert_after(self._tail.prev_free, blocks)

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add blocks to the front: they are reused next, the first of them first."""
        self._insert_after(self._head, blocks)

    def _insert_after(self, left: KVCacheBlock, blocks: Iterable[KVCacheBlock]) -> None:
        right = left.next_free
        for block in blocks:
            assert block.next_free is None, f"{block!r} is in the free queue already"
            left.next_free = block
            block.prev_free = left
            # Set at once, so that a block given twice trips over the assertion above.
            block.next_free = right
            left = block
            self.num_free_blocks += 1
        right.prev_free = left

    def get_all(self) -> list[KVCacheBlock]:
        """All free blocks in order, checking the links. For tests and integrity checks: O(n)."""
        blocks = []
        left, block = self._head, self._head.next_free
        while block is not self._tail:
            assert block.prev_free is left, f"links around {block!r} do not match"
            blocks.append(block)
            left, block = block, block.next_free
        assert self._tail.prev_free is left
        assert len(blocks) == self.num_free_blocks, f"{len(blocks)} blocks in the queue, {self.num_free_blocks} counted"
        return blocks


# The parent of every first block.
ROOT_HASH = hashlib.sha256(b"jaxllm KV cache block").digest()


def encode_extra_keys(extra_keys: Sequence[str], cache_salt: str | None) -> bytes:
    """What enters a block's hash beside its tokens, as bytes: no two different inputs give the same.

    The number of keys, each key with its length before it, then the salt, if there is one, behind a byte of its own. Nothing at
    all gives no bytes.
    """
    if not extra_keys and cache_salt is None:
        return b""
    keys = [key.encode() for key in extra_keys]
    parts = [struct.pack("<I", len(keys)), *(struct.pack("<I", len(key)) + key for key in keys)]
    if cache_salt is not None:
        parts.append(b"\x01" + cache_salt.encode())
    return b"".join(parts)


class BlockHasher:
    """Hashes full blocks into a chain: SHA-256(parent's hash, token ids as little-endian uint32, extra keys).

    A hash stands for a block and everything before it, so equal hashes mean that keys and values may be shared. The same on
    every machine and in every process.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._pack_tokens = struct.Struct(f"<{block_size}I").pack

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], first_extra: bytes = b"", later_extra: bytes = b"") -> None:
        """Append to `hashes` those of the full blocks of `token_ids` that are not in it yet. Never looks at the others.

        Args:
            hashes: of the first blocks of `token_ids`.
            token_ids: all of the request.
            first_extra, later_extra: from `encode_extra_keys`, for the first block and for the others.

        Raises:
            ValueError: if a token id is no integer in [0, 2**32).
        """
        size = self.block_size
        parent = hashes[-1] if hashes else ROOT_HASH
        for stop in range((len(hashes) + 1) * size, len(token_ids) + 1, size):
            block = token_ids[stop - size : stop]
            try:
                tokens = self._pack_tokens(*block)
            except struct.error:
                raise ValueError(f"token ids must be integers in [0, 2**32), got {block}") from None
            parent = hashlib.sha256(parent + tokens + (first_extra if stop == size else later_extra)).digest()
            hashes.append(parent)
