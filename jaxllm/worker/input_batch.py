"""InputBatch: what the worker knows of each running request, in NumPy rows that persist from step to step."""

from collections.abc import Sequence

import numpy as np

from jaxllm.core.output import NewRequestData, SchedulerOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker.batch import BatchLayout


class InputBatch:
    """Rows of running requests. A request keeps its row until it finishes or is preempted; the row's number addresses its
    state on the device.

    Args:
        max_num_rows: S, most requests at once.
        num_groups: KV cache groups G.
        max_blocks: block table width P.
    """

    def __init__(self, max_num_rows: int, num_groups: int, max_blocks: int) -> None:
        self.max_num_rows, self.num_groups, self.max_blocks = max_num_rows, num_groups, max_blocks
        self.row_of: dict[str, int] = {}
        self.sampling_params: dict[str, SamplingParams] = {}
        self.asking: set[str] = set()  # requests that want log probabilities of their tokens
        self._free_rows = list(range(max_num_rows - 1, -1, -1))
        # Tokens that the host knows; from the first position beyond them on, each token is the one sampled last.
        self._token_ids: list[np.ndarray] = [np.empty(0, np.int32)] * max_num_rows
        self._num_known = np.zeros(max_num_rows, np.int64)
        self._num_prompt = np.zeros(max_num_rows, np.int64)
        self._num_blocks = np.zeros((max_num_rows, num_groups), np.int64)

    def remove(self, req_id: str) -> None:
        """Forget a request; one that has no row is no error, since it may never have run."""
        row = self.row_of.pop(req_id, None)
        if row is None:
            return
        del self.sampling_params[req_id]
        self.asking.discard(req_id)
        self._token_ids[row] = np.empty(0, np.int32)
        self._free_rows.append(row)

    def add(self, request: NewRequestData) -> int:
        """Give a request a row and return it."""
        assert request.req_id not in self.row_of, f"request {request.req_id} has a row already"
        row = self._free_rows.pop()
        self.row_of[request.req_id] = row
        self.sampling_params[request.req_id] = request.sampling_params
        if request.sampling_params.num_logprobs is not None:
            self.asking.add(request.req_id)
        self._token_ids[row] = np.asarray(request.token_ids, np.int32)
        self._num_known[row] = len(request.token_ids)
        self._num_prompt[row] = request.num_prompt_tokens
        self._num_blocks[row] = [len(blocks) for blocks in request.block_ids]
        return row

    def block_table(self, request: NewRequestData) -> np.ndarray:
        """Its block table, int32 [G, P]."""
        table = np.zeros((self.num_groups, self.max_blocks), np.int32)
        for group, blocks in enumerate(request.block_ids):
            table[group, : len(blocks)] = blocks
        return table

    def prompt_chunk(self, req_id: str, start: int, stop: int) -> np.ndarray:
        """Prompt tokens `start` to `stop`, cut at the end of the prompt."""
        row = self.row_of[req_id]
        return self._token_ids[row][start : min(stop, self._num_prompt[row])]

    def num_prompt_tokens(self, req_id: str) -> int:
        """Tokens of its prompt."""
        return int(self._num_prompt[self.row_of[req_id]])

    def order(self, scheduler_output: SchedulerOutput) -> tuple[list[str], np.ndarray]:
        """The requests of a step in batch order, those with one token first, and their token counts."""
        req_ids = list(scheduler_output.num_scheduled_tokens)
        counts = np.fromiter(scheduler_output.num_scheduled_tokens.values(), np.int64, len(req_ids))
        if counts.max(initial=1) > 1:
            order = np.argsort(counts > 1, kind="stable")
            req_ids, counts = [req_ids[i] for i in order], counts[order]
        return req_ids, counts

    def pack(
        self, layout: BatchLayout, scheduler_output: SchedulerOutput, req_ids: Sequence[str], counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write a step's batch.

        Args:
            req_ids, counts: as `order` gave them. In a bucket of several steps the counts are tokens to decode, one a step.

        Returns:
            The packed vector, and bool [rows]: which rows sample a token. The others are prefills that go on.
        """
        vector, fields = layout.empty()
        num_rows = len(req_ids)
        if layout.bucket.num_steps > 1:
            fields["limits"][:num_rows] = counts
            counts = np.ones_like(counts)
        rows = np.fromiter(map(self.row_of.__getitem__, req_ids), np.int64, num_rows)
        computed = self.num_computed(scheduler_output, req_ids)
        ends = computed + counts
        stops = np.cumsum(counts)
        starts = stops - counts
        known = self._num_known[rows]
        sampled = ends >= known

        fields["counts"][:] = num_rows, np.count_nonzero(counts == 1)
        fields["rows"][:num_rows] = rows
        fields["sampled_rows"][:num_rows] = np.where(sampled, rows, self.max_num_rows)
        fields["seq_lens"][:num_rows] = ends
        fields["query_start_loc"][1 : num_rows + 1] = stops
        fields["query_start_loc"][num_rows + 1 :] = stops[-1]
        token_ids = fields["token_ids"]
        from_device = computed >= known
        fields["last_token_index"][:num_rows] = np.where(from_device, starts, layout.bucket.num_tokens)
        for i in np.flatnonzero(~from_device):
            token_ids[starts[i] : stops[i]] = self._token_ids[rows[i]][computed[i] : ends[i]]
        self._pack_new_blocks(scheduler_output, fields["table_index"], fields["table_block"])
        return vector, sampled

    def num_computed(self, scheduler_output: SchedulerOutput, req_ids: Sequence[str]) -> np.ndarray:
        """Tokens of each request that were in the cache before this step, int64 [rows]."""
        cached = scheduler_output.scheduled_cached_reqs
        if req_ids == cached.req_ids:  # so it is in a step of nothing but decodes
            return np.array(cached.num_computed_tokens, np.int64)
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request in scheduler_output.scheduled_new_reqs:
            computed[request.req_id] = request.num_computed_tokens
        return np.fromiter(map(computed.__getitem__, req_ids), np.int64, len(req_ids))

    def _pack_new_blocks(self, scheduler_output: SchedulerOutput, index: np.ndarray, block: np.ndarray) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        n = 0
        for i, new_blocks in enumerate(cached.new_block_ids):
            if new_blocks is None:
                continue
            row = self.row_of[cached.req_ids[i]]
            for group, ids in enumerate(new_blocks):
                first = (group * self.max_num_rows + row) * self.max_blocks + self._num_blocks[row, group]
                index[n : n + len(ids)] = np.arange(first, first + len(ids))
                block[n : n + len(ids)] = ids
                self._num_blocks[row, group] += len(ids)
                n += len(ids)
