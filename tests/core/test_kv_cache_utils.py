"""The free queue and block hashes."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.core.kv_cache_utils import ROOT_HASH, BlockHasher, FreeKVCacheBlockQueue, KVCacheBlock, encode_extra_keys


def make_queue(n: int) -> tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]:
    blocks = [KVCacheBlock(block_id) for block_id in range(n)]
    return FreeKVCacheBlockQueue(blocks), blocks


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_queue_starts_in_the_given_order() -> None:
    queue, blocks = make_queue(4)
    assert queue.get_all() == blocks
    assert queue.num_free_blocks == 4
    assert make_queue(0)[0].get_all() == []


def test_popleft_n() -> None:
    queue, blocks = make_queue(5)
    assert queue.popleft_n(0) == []
    assert ids(queue.popleft_n(2)) == [0, 1]
    assert (blocks[0].prev_free, blocks[0].next_free, blocks[1].next_free) == (None, None, None)
    assert ids(queue.get_all()) == [2, 3, 4]
    assert ids(queue.popleft_n(3)) == [2, 3, 4]
    assert (queue.get_all(), queue.num_free_blocks) == ([], 0)


@pytest.mark.parametrize("n", [-1, 4])
def test_popleft_n_of_more_than_there_are(n: int) -> None:
    queue, _ = make_queue(3)
    with pytest.raises(ValueError, match=rf"n must be in \[0, 3\], the number of free blocks, got {n}"):
        queue.popleft_n(n)
    assert ids(queue.get_all()) == [0, 1, 2]


def test_remove_at_both_ends_and_in_the_middle() -> None:
    queue, blocks = make_queue(5)
    for block_id, rest in ((2, [0, 1, 3, 4]), (0, [1, 3, 4]), (4, [1, 3]), (1, [3]), (3, [])):
        queue.remove(blocks[block_id])
        assert ids(queue.get_all()) == rest
    with pytest.raises(ValueError, match="is not in the free queue"):
        queue.remove(blocks[3])


def test_append_n_and_prepend_n_keep_the_order_given() -> None:
    queue, _ = make_queue(3)
    a, b, c, d = [*queue.popleft_n(3), KVCacheBlock(9)]
    queue.append_n([c])
    queue.append_n([a, d])
    queue.prepend_n([b])
    queue.append_n([])
    queue.prepend_n([])
    assert queue.get_all() == [b, c, a, d]
    assert queue.num_free_blocks == 4


def test_a_block_cannot_be_free_twice() -> None:
    queue, blocks = make_queue(2)
    with pytest.raises(AssertionError, match="in the free queue already"):
        queue.append_n([blocks[0]])
    taken = queue.popleft_n(1)
    with pytest.raises(AssertionError, match="in the free queue already"):
        queue.prepend_n(taken * 2)


@given(st.lists(st.tuples(st.sampled_from(["pop", "remove", "append", "prepend"]), st.integers(0, 7)), max_size=40))
def test_queue_against_a_list(operations: list[tuple[str, int]]) -> None:
    queue, blocks = make_queue(8)
    model, out = list(blocks), []
    for operation, n in operations:
        if operation == "pop" and n <= len(model):
            assert queue.popleft_n(n) == model[:n]
            out += model[:n]
            del model[:n]
        elif operation == "remove" and n < len(model):
            queue.remove(model[n])
            out.append(model.pop(n))
        elif operation == "append":
            queue.append_n(out[:n])
            model += out[:n]
            del out[:n]
        elif operation == "prepend":
            queue.prepend_n(out[:n])
            model[:0] = out[:n]
            del out[:n]
        assert queue.get_all() == model


def test_hash_by_hand() -> None:
    hashes: list[bytes] = []
    BlockHasher(2).extend(hashes, [1, 70000, 3, 4, 5], b"first", b"later")
    assert hashlib.sha256(b"jaxllm KV cache block").digest() == ROOT_HASH
    first = hashlib.sha256(ROOT_HASH + b"\x01\0\0\0" + b"\x70\x11\x01\0" + b"first").digest()
    second = hashlib.sha256(first + b"\x03\0\0\0\x04\0\0\0" + b"later").digest()
    assert hashes == [first, second]


def test_only_new_blocks_are_hashed() -> None:
    # The given hashes are taken on trust, and the tokens that they stand for are not looked at.
    hashes = [b"x" * 32]
    BlockHasher(2).extend(hashes, [None, None, 3, 4])
    assert hashes[1:] == [hashlib.sha256(b"x" * 32 + struct.pack("<2I", 3, 4)).digest()]


@pytest.mark.parametrize("token_id", [-1, 2**32, "a", None, 1.5])
def test_token_ids_that_are_none(token_id: object) -> None:
    with pytest.raises(ValueError, match="token ids must be integers"):
        BlockHasher(1).extend([], [token_id])


def test_encode_extra_keys_by_hand() -> None:
    assert encode_extra_keys((), None) == b""
    assert encode_extra_keys((), "s") == b"\0\0\0\0\x01s"
    assert encode_extra_keys(("ab", ""), None) == b"\x02\0\0\0\x02\0\0\0ab\0\0\0\0"
    assert encode_extra_keys(("é",), "") == b"\x01\0\0\0\x02\0\0\0\xc3\xa9\x01"


extra = st.tuples(
    st.lists(st.text(alphabet="\0\x01\x02ab", max_size=5), max_size=3).map(tuple), st.none() | st.text("\0\x01a", max_size=6)
)


@given(extra, extra)
def test_different_extra_keys_never_look_alike(a: tuple, b: tuple) -> None:
    assert (encode_extra_keys(*a) == encode_extra_keys(*b)) == (a == b)


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_equal_hashes_mean_equal_prefixes(a: list[int], b: list[int]) -> None:
    hashes_a: list[bytes] = []
    hashes_b: list[bytes] = []
    hasher = BlockHasher(3)
    hasher.extend(hashes_a, a)
    hasher.extend(hashes_b, b)
    for i, (hash_a, hash_b) in enumerate(zip(hashes_a, hashes_b, strict=False)):
        assert (hash_a == hash_b) == (a[: 3 * i + 3] == b[: 3 * i + 3])
