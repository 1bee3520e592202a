"""Random use of BlockPool against a naive model, and of KVCacheManager with the content of the cache checked."""

from core_builders import make_manager, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.core.block_pool import BlockPool
from jaxllm.core.kv_cache_utils import BlockHasher, KVCacheBlock
from jaxllm.core.request import Request

NUM_BLOCKS = 8
NUM_GROUPS = 2
hashes = st.integers(0, 3).map(lambda i: bytes([i]) * 32)
groups = st.integers(0, NUM_GROUPS - 1)


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: a list of free ids, a list of ids for each (group, hash), a list of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, NUM_GROUPS)
        self.free = list(range(1, NUM_BLOCKS))
        self.cached: dict[tuple[int, bytes], list[int]] = {}
        self.held: list[KVCacheBlock] = []

    def is_hashed(self, block_id: int) -> bool:
        return any(block_id in ids for ids in self.cached.values())

    def forget(self, block_id: int) -> None:
        for ids in self.cached.values():
            if block_id in ids:
                ids.remove(block_id)

    @rule(n=st.integers(0, 4))
    def get_new_blocks(self, n: int) -> None:
        if n > len(self.free):
            return
        blocks = self.pool.get_new_blocks(n)
        assert [block.block_id for block in blocks] == self.free[:n]
        for block_id in self.free[:n]:
            self.forget(block_id)
        del self.free[:n]
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data(), block_hash=hashes, group_id=groups)
    def cache(self, data: st.DataObject, block_hash: bytes, group_id: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        if not self.is_hashed(block.block_id):
            self.pool.cache_full_blocks([block], [block_hash], 0, 1, group_id)
            self.cached.setdefault((group_id, block_hash), []).append(block.block_id)

    @rule(block_hash=hashes, group_id=groups)
    def touch(self, block_hash: bytes, group_id: int) -> None:
        block = self.pool.get_cached_block(block_hash, group_id)
        if block is not None:
            self.pool.touch([block])
            if block.block_id in self.free:
                self.free.remove(block.block_id)
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_blocks(self, data: st.DataObject) -> None:
        indices = data.draw(st.lists(st.sampled_from(range(len(self.held))), unique=True, max_size=3))
        blocks = [self.held[i] for i in indices]
        self.pool.free_blocks(blocks)
        self.held = [block for i, block in enumerate(self.held) if i not in indices]
        freed = [block.block_id for block in blocks if block not in self.held]
        freed = list(dict.fromkeys(reversed(freed)))[::-1]  # free with the last holder, not the first
        self.free = [
            *(block_id for block_id in freed if not self.is_hashed(block_id)),
            *self.free,
            *(block_id for block_id in freed if self.is_hashed(block_id)),
        ]

    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.pool.blocks))
        self.pool.uncache_blocks([block])
        self.forget(block.block_id)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == (not self.held)
        if not self.held:
            self.cached.clear()

    @invariant()
    def matches_the_model(self) -> None:
        self.pool.check_integrity()
        assert [block.block_id for block in self.pool.free_queue.get_all()] == self.free
        for block in self.pool.blocks:
            assert block.ref_cnt == self.held.count(block)
        for group_id in range(NUM_GROUPS):
            for i in range(4):
                found = self.pool.get_cached_block(bytes([i]) * 32, group_id)
                ids = self.cached.get((group_id, bytes([i]) * 32), [])
                assert (None if found is None else found.block_id) == (ids[0] if ids else None)


class KVCacheManagerMachine(RuleBasedStateMachine):
    """Requests with few different tokens come, grow and go. What each finds in its blocks must be its own prefix."""

    @initialize(
        windows=st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3),
        block_size=st.integers(1, 4),
        enable_caching=st.booleans(),
    )
    def start(self, windows: list[int | None], block_size: int, enable_caching: bool) -> None:
        self.windows, self.block_size = windows, block_size
        self.manager = make_manager(
            12 * len(windows) + 1, block_size, windows, max_model_len=10 * block_size, enable_caching=enable_caching
        )
        self.hasher = BlockHasher(block_size) if enable_caching else None
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}  # (block id, offset) → the prefix that was written there
        self.requests: list[Request] = []
        self.num_requests = 0

    def compute(self, request: Request, num_new_tokens: int) -> None:
        """Write the new tokens and read what they see."""
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_new_tokens
        for table, window in zip(self.manager.get_block_ids(request.request_id), self.windows, strict=True):
            slots = [(table[p // self.block_size], p % self.block_size) for p in range(stop)]
            for position in range(start, stop):
                assert slots[position][0] != 0
                self.content[slots[position]] = tuple(request.all_token_ids[: position + 1])
            for position in range(0 if window is None else max(0, start - window + 1), stop):
                assert self.content[slots[position]] == tuple(request.all_token_ids[: position + 1])
        request.num_computed_tokens = stop

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30), chunk=st.integers(1, 30), must_fit=st.booleans())
    def admit(self, tokens: list[int], chunk: int, must_fit: bool) -> None:
        self.num_requests += 1
        request = make_request(f"r{self.num_requests}", tokens[: 10 * self.block_size - 1], self.hasher)
        hit, num_hit_tokens = self.manager.get_computed_blocks(request)
        assert num_hit_tokens < request.num_tokens
        num_new_tokens = min(chunk, request.num_tokens - num_hit_tokens)
        if self.manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hit, full_sequence_must_fit=must_fit) is None:
            assert self.requests, "an empty cache takes any request"
            return
        request.num_computed_tokens = num_hit_tokens
        self.requests.append(request)
        self.compute(request, num_new_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token_id=st.integers(0, 1), chunk=st.integers(1, 8), lookahead=st.integers(0, 3))
    def grow(self, data: st.DataObject, token_id: int, chunk: int, lookahead: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.num_computed_tokens == request.num_tokens:
            if request.num_tokens == self.manager.max_model_len:
                return
            request.append_output_token_ids([token_id])
        num_new_tokens = min(chunk, request.num_tokens - request.num_computed_tokens)
        before = self.manager.get_block_ids(request.request_id)
        new = self.manager.allocate_slots(request, num_new_tokens, num_lookahead_tokens=lookahead)
        if new is None:
            return
        after = self.manager.get_block_ids(request.request_id)
        assert [len(ids) for ids in after] == [len(b) + len(n) for b, n in zip(before, new or ((),) * len(before), strict=True)]
        self.compute(request, num_new_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.manager.free(request)
        self.requests.remove(request)

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() == (not self.requests)

    @invariant()
    def books_balance(self) -> None:
        self.manager.check_integrity()
        assert self.manager.managers[0].tables.keys() == {request.request_id for request in self.requests}
        for manager, window in zip(self.manager.managers, self.windows, strict=True):
            for request in self.requests:
                held = [block for block in manager.tables[request.request_id] if not block.is_null]
                assert window is None or len(held) <= manager.max_blocks(self.manager.max_model_len)

    def teardown(self) -> None:
        for request in self.requests:
            self.manager.free(request)
        assert self.manager.usage == 0.0
        self.manager.check_integrity()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestKVCacheManager = KVCacheManagerMachine.TestCase
TestKVCacheManager.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
