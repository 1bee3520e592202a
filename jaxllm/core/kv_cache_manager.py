"""KVCacheManager: the scheduler's view of the KV cache. Requests and token counts in, block ids out."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, zip_longest

from jaxllm.core.block_pool import BlockPool
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.kv_cache_utils import KVCacheBlock
from jaxllm.core.request import Request
from jaxllm.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager, find_longest_common_hit
from jaxllm.core.types import PrefixCacheStats

BlockIds = tuple[list[int], ...]  # one list for each KV cache group
Hit = tuple[list[KVCacheBlock], ...]  # the same with the blocks themselves

NO_BLOCKS: BlockIds = ()


class KVCacheManager:
    """Block tables for all requests and all KV cache groups, over one block pool.

    Args:
        kv_cache_config: blocks and groups. All groups have the same block size.
        max_model_len: no request gets room for more tokens.
        enable_caching: whether to look for cached prefixes and to keep them.
        max_step_slots: most tokens, drafts and lookahead included, that a request gets in one step; None for `max_model_len`.

    Raises:
        ValueError: if the block sizes differ or the blocks cannot hold one request of `max_model_len` tokens.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, max_model_len: int, enable_caching: bool = True, max_step_slots: int | None = None
    ) -> None:
        specs = [group.spec for group in kv_cache_config.groups]
        if len({spec.block_size for spec in specs}) != 1:
            raise ValueError(f"KV cache groups must have one block size, got {[spec.block_size for spec in specs]}")
        self.block_size = specs[0].block_size
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.block_pool = BlockPool(kv_cache_config.num_blocks, len(specs))
        self.managers = [
            FullAttentionManager(spec, self.block_pool, group_id)
            if spec.sliding_window is None
            else SlidingWindowManager(spec, self.block_pool, group_id, max_step_slots or max_model_len)
            for group_id, spec in enumerate(specs)
        ]
        self.no_hit: Hit = tuple([] for _ in specs)
        self._stats = PrefixCacheStats()
        needed = sum(manager.max_blocks(max_model_len) for manager in self.managers)
        if needed > kv_cache_config.num_blocks - 1:
            raise ValueError(
                f"num_blocks {kv_cache_config.num_blocks} is too small: a request of max_model_len {max_model_len} tokens "
                f"needs {needed} blocks beside the null block"
            )

    @property
    def usage(self) -> float:
        """The share of the blocks in use, in [0, 1]."""
        return self.block_pool.usage

    def get_computed_blocks(self, request: Request) -> tuple[Hit, int]:
        """The longest cached prefix of a request that has no blocks, and its length in tokens.

        Whole blocks, and at least one token less than the request has: the last one must be computed for its logits. The blocks
        are not held: `allocate_slots` with nothing in between does that.
        """
        if not self._looks_up(request):
            return self.no_hit, 0
        max_blocks = (request.num_tokens - 1) // self.block_size
        hit = find_longest_common_hit(self.managers, request.block_hashes, max_blocks)
        return hit, len(hit[0]) * self.block_size

    def _looks_up(self, request: Request) -> bool:
        return self.enable_caching and not request.sampling_params.skip_reading_prefix_cache

    def record_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """Count the lookup of a request that was admitted with this hit."""
        if not self._looks_up(request):
            return
        stats = self._stats
        if request.num_preemptions:
            stats.preempted_requests += 1
            stats.preempted_queries += request.num_tokens
            stats.preempted_hits += num_hit_tokens
        else:
            stats.requests += 1
            stats.queries += request.num_tokens
            stats.hits += num_hit_tokens

    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        """The counts since the last call."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Hit | None = None,
        num_lookahead_tokens: int = 0,
        *,
        num_reserved_blocks: int = 0,
        full_sequence_must_fit: bool = False,
    ) -> BlockIds | None:
        """Make room for the tokens that a step computes, and cache the blocks that it fills.

            | computed | new_computed | new | lookahead |
            | in table |     hit      |    slots here   |

        A block is findable once its last token is scheduled: whoever hits it runs in the same step or a later one, after its
        keys and values were written. Drafts are never cached: they are not tokens of the request yet.

        Args:
            request: running, or waiting without blocks.
            num_new_tokens: scheduled in this step, drafts included.
            num_new_computed_tokens, new_computed_blocks: from `get_computed_blocks`, for a waiting request.
            num_lookahead_tokens: slots beyond the new tokens, for drafts.
            num_reserved_blocks: blocks that must stay free.
            full_sequence_must_fit: refuse unless all tokens that the request has fit, in this step and those after it.

        Returns:
            The ids of the new blocks, without those of the hit; `NO_BLOCKS` if none were needed. None if they do not fit: then no
            block was taken or touched (blocks that had left a sliding window may have been freed).
        """
        num_computed_tokens = request.num_computed_tokens + num_new_computed_tokens
        num_tokens = num_computed_tokens + num_new_tokens
        if num_tokens + num_lookahead_tokens < request.kv_quiet_until:
            return NO_BLOCKS

        request_id, managers = request.request_id, self.managers
        hit = self.no_hit if new_computed_blocks is None else new_computed_blocks
        # Sampled tokens on their way may include drafts that will be rejected: the window can step back that far.
        num_certain_tokens = request.num_computed_tokens - request.num_output_placeholders
        for manager in managers:
            manager.free_unseen(request_id, num_certain_tokens)
        num_available_blocks = self.block_pool.num_free_blocks - num_reserved_blocks
        num_slots = min(num_tokens + num_lookahead_tokens, self.max_model_len)
        needed = sum(m.num_blocks_to_take(request_id, num_slots, h) for m, h in zip(managers, hit, strict=True))
        if needed > num_available_blocks:
            return None
        if full_sequence_must_fit:
            num_full_tokens = min(request.num_tokens, self.max_model_len)
            needed = sum(m.num_blocks_to_finish(num_full_tokens, h) for m, h in zip(managers, hit, strict=True))
            if needed > num_available_blocks:
                return None

        if request_id not in managers[0].tables:
            # All hits are held before the first new block is taken, which could be one of them.
            for manager, blocks in zip(managers, hit, strict=True):
                manager.start_table(request_id, blocks)
        new_block_ids = tuple(manager.grow_table(request_id, num_slots) for manager in managers)
        if self.enable_caching:
            num_known_tokens = min(num_tokens, request.num_tokens)
            for manager in managers:
                manager.cache_blocks(request_id, request.block_hashes, num_known_tokens)
        request.kv_quiet_until = self._quiet_until(request_id, num_certain_tokens)
        return new_block_ids if any(new_block_ids) else NO_BLOCKS

    def fits(self, requests: Sequence[Request], num_new_tokens: Sequence[int]) -> bool:
        """Whether `allocate_slots` can give each of these running requests its number of new tokens, all of them together."""
        needed = 0
        for request, num_tokens in zip(requests, num_new_tokens, strict=True):
            num_slots = min(request.num_computed_tokens + num_tokens, self.max_model_len)
            needed += sum(manager.num_blocks_to_take(request.request_id, num_slots, ()) for manager in self.managers)
        return needed <= self.block_pool.num_free_blocks

    def _quiet_until(self, request_id: str, num_certain_tokens: int) -> int:
        """The number of slots from which the table must grow, a block becomes full, or one leaves a window."""
        size = self.block_size
        quiet = len(self.managers[0].tables[request_id]) * size + 1
        if self.enable_caching:
            quiet = min(quiet, (self.managers[0].num_cached_blocks[request_id] + 1) * size)
        for manager in self.managers:
            unseen = manager.next_unseen(num_certain_tokens)
            if unseen is not None:
                quiet = min(quiet, unseen)
        return quiet

    def cache_blocks(self, request: Request) -> None:
        """Cache the full blocks of a running request, as far as they are certain: computed from tokens that are known by now.

        `allocate_slots` does it as the request goes on. This is for one that does not, whose last tokens were drafts or
        placeholders when they were scheduled.
        """
        if self.enable_caching:
            num_tokens = min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens)
            for manager in self.managers:
                manager.cache_blocks(request.request_id, request.block_hashes, num_tokens)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, if it has any. What is cached of them can be hit until it is evicted.

        The end of a sequence is evicted first, in all groups at a time, since a prefix is of use only where all have it.

        `num_computed_tokens` must not count tokens of a step that will not run. Blocks that such a step was to fill are cached
        already (see `allocate_slots`) but nothing will be written to them, so they are taken out of the prefix cache.
        """
        request.kv_quiet_until = 0
        num_full_blocks = request.num_computed_tokens // self.block_size
        tables = [manager.take_table(request.request_id) for manager in self.managers]
        if len(tables) == 1:
            self.block_pool.free_blocks(reversed(tables[0]))
        else:
            in_step = zip_longest(*map(reversed, tables), fillvalue=self.block_pool.null_block)
            self.block_pool.free_blocks(chain.from_iterable(in_step))
        for table in tables:
            self.block_pool.uncache_blocks(table[num_full_blocks:])

    def get_block_ids(self, request_id: str) -> BlockIds:
        """The whole block table of a request, null blocks included. KeyError if it has none."""
        return tuple([block.block_id for block in manager.tables[request_id]] for manager in self.managers)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, for new weights. False, and no change, while any block is in use."""
        if not self.block_pool.reset_prefix_cache():
            return False
        self._stats.reset = True
        return True

    def check_integrity(self) -> None:
        """Recount every holder of every block. AssertionError if the books do not balance."""
        self.block_pool.check_integrity()
        holders: Counter[int] = Counter()
        for manager in self.managers:
            assert manager.tables.keys() == self.managers[0].tables.keys() == manager.num_cached_blocks.keys()
            for request_id, table in manager.tables.items():
                assert len(table) == len(self.managers[0].tables[request_id])
                held = [block for block in table if not block.is_null]
                assert len({block.block_id for block in held}) == len(held), f"{request_id!r} holds a block twice"
                for block in held:
                    assert block.block_hash is None or block.group_id == manager.group_id
                holders.update(block.block_id for block in held)
        for block in self.block_pool.blocks:
            assert block.ref_cnt == holders[block.block_id], f"{block!r} is held by {holders[block.block_id]} tables"
            assert block.ref_cnt <= 1 or block.block_hash is not None, f"{block!r} is shared without a hash"
