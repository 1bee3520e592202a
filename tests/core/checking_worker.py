"""A worker that runs no model but keeps a KV cache, and finds every token that should be in it missing or wrong.

What it writes for a token stands for the whole prefix up to it, so a block that was freed too early, cached too early or shared
wrongly shows up when it is read. The token that it samples depends on the prefix alone: however requests are scheduled, the
output of each must be `expected_output`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core_builders import EOS

from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput


def extend_prefix(prefix: int, token_id: int) -> int:
    return hash((prefix, token_id))


def prefix_of(token_ids: Sequence[int], prefix: int = 0) -> int:
    for token_id in token_ids:
        prefix = extend_prefix(prefix, token_id)
    return prefix


def next_token(prefix: int) -> int:
    """One of few, EOS among them, so that outputs repeat each other now and then."""
    return EOS + prefix % 23


def expected_output(prompt: Sequence[int], max_tokens: int, max_model_len: int, root: int = 0) -> list[int]:
    prefix, output = prefix_of(prompt, root), []
    while not output or (output[-1] != EOS and len(output) < max_tokens and len(prompt) + len(output) < max_model_len):
        output.append(next_token(prefix))
        prefix = extend_prefix(prefix, output[-1])
    return output


@dataclass
class Row:
    root: int
    token_ids: list[int]
    tables: list[list[int]]


class CheckingWorker:
    """Runs SchedulerOutputs in order.

    Args:
        kv_cache_config: blocks and groups, as the scheduler's.
        roots: the empty prefix of a request, 0 unless it is named here: what its salt stands for.
        draft: prefix and true next token → a draft of it, right or wrong; None never drafts.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        roots: dict[str, int] | None = None,
        draft: Callable[[int, int], int] | None = None,
    ) -> None:
        self.roots = {} if roots is None else roots
        self.windows = [group.spec.sliding_window for group in kv_cache_config.groups]
        self.block_size = kv_cache_config.groups[0].spec.block_size
        self.kv_cache: list[list[int | None]] = [[None] * self.block_size for _ in range(kv_cache_config.num_blocks)]
        self.rows: dict[str, Row] = {}
        self.draft = draft

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids | output.preempted_req_ids:
            self.rows.pop(request_id, None)
        num_computed_tokens = {}
        for data in output.scheduled_new_reqs:
            assert data.req_id not in self.rows
            root = self.roots.get(data.req_id, 0)
            self.rows[data.req_id] = Row(root, data.token_ids.copy(), [ids.copy() for ids in data.block_ids])
            num_computed_tokens[data.req_id] = data.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            row = self.rows[request_id]
            if cached.new_block_ids[i] is not None:
                for table, ids in zip(row.tables, cached.new_block_ids[i], strict=True):
                    table += ids
            num_computed_tokens[request_id] = cached.num_computed_tokens[i]
        assert num_computed_tokens.keys() == output.num_scheduled_tokens.keys()

        req_ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            draft = output.scheduled_spec_decode_tokens.get(request_id, [])
            sampled.append(self._run_row(self.rows[request_id], num_computed_tokens[request_id], num_scheduled, draft))
        return ModelRunnerOutput(req_ids, {request_id: row for row, request_id in enumerate(req_ids)}, sampled)

    def _run_row(self, row: Row, start: int, num_scheduled: int, draft: list[int]) -> list[int]:
        stop = start + num_scheduled
        token_ids = row.token_ids + draft
        assert num_scheduled > 0
        assert stop <= len(token_ids)
        assert not draft or stop == len(token_ids), "drafts are scheduled after all known tokens"
        prefixes = [row.root]
        for token_id in token_ids[:stop]:
            prefixes.append(extend_prefix(prefixes[-1], token_id))
        for table, window in zip(row.tables, self.windows, strict=True):
            for position in range(start, stop):
                block_id = table[position // self.block_size]
                assert block_id != 0, "a write to the null block"
                self.kv_cache[block_id][position % self.block_size] = prefixes[position + 1]
            for position in range(0 if window is None else max(0, start - window + 1), stop):
                found = self.kv_cache[table[position // self.block_size]][position % self.block_size]
                assert found == prefixes[position + 1], f"the keys and values of position {position} are not in the cache"
        if stop < len(row.token_ids):
            return []
        # The tokens after the last known one: as many as drafts were right, and one.
        new_token_ids = []
        for position in range(len(row.token_ids), len(token_ids) + 1):
            new_token_ids.append(next_token(prefixes[position]))
            if position < len(token_ids) and token_ids[position] != new_token_ids[-1]:
                break
        row.token_ids += new_token_ids
        return new_token_ids

    def propose(self, num_drafts: int) -> tuple[list[str], list[list[int]]]:
        """Drafts for every request, as `Scheduler.update_draft_token_ids` takes them."""
        assert self.draft is not None
        drafts = []
        for row in self.rows.values():
            prefix, tokens = prefix_of(row.token_ids, row.root), []
            for _ in range(num_drafts):
                tokens.append(self.draft(prefix, next_token(prefix)))
                prefix = extend_prefix(prefix, tokens[-1])
            drafts.append(tokens)
        return list(self.rows), drafts
