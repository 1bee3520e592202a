"""One step's batch as one int32 vector: packed on the host, uploaded once, unpacked inside the jitted step."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.layers.attention import AttentionMetadata
from jaxllm.worker.buckets import Bucket


@dataclass(frozen=True)
class Batch:
    """A step's batch inside the jitted step. Rows are in batch order, rows with one token first.

    Attributes:
        num_rows: int32 scalar: rows in use.
        num_decodes: int32 scalar: the rows with one token, which come first.
        rows: int32 [R], the request row of each; beyond the last request row for padding.
        sampled_rows: int32 [R], the same where this step samples the next token; beyond the last request row elsewhere.
        seq_lens: int32 [R], tokens in the cache after this step; 0 for padding.
        query_start_loc: int32 [R + 1], the first token of each row.
        token_ids: int32 [T].
        last_token_index: int32 [R], the token that is the one this row sampled last, known to the device only; T for none.
        table_index: int32 [U], flat places in the block tables.
        table_block: int32 [U], what to write there.
        limits: int32 [R], most tokens that the row decodes in a bucket of several steps; [0] in all others.
    """

    num_rows: jax.Array
    num_decodes: jax.Array
    rows: jax.Array
    sampled_rows: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array
    token_ids: jax.Array
    last_token_index: jax.Array
    table_index: jax.Array
    table_block: jax.Array
    limits: jax.Array


@dataclass(frozen=True)
class BatchLayout:
    """Where each field of a bucket's batch lies in the vector.

    Attributes:
        max_num_rows: request rows S; S itself stands for "no row".
        num_groups: KV cache groups G.
        max_blocks: block table width P.
    """

    bucket: Bucket
    block_size: int
    max_num_rows: int
    num_groups: int
    max_blocks: int

    @property
    def num_table_updates(self) -> int:
        """Most blocks that a step can append to the tables of requests already known.

        A row of q tokens crosses at most q // B + 1 block borders.
        """
        return self.num_groups * (self.bucket.num_tokens * self.bucket.num_steps // self.block_size + self.bucket.num_rows)

    @cached_property
    def _places(self) -> dict[str, slice]:
        tokens, rows, updates = self.bucket.num_tokens, self.bucket.num_rows, self.num_table_updates
        sizes = {
            "counts": 2,
            "rows": rows,
            "sampled_rows": rows,
            "seq_lens": rows,
            "query_start_loc": rows + 1,
            "token_ids": tokens,
            "last_token_index": rows,
            "table_index": updates,
            "table_block": updates,
            "limits": rows if self.bucket.num_steps > 1 else 0,
        }
        places, start = {}, 0
        for name, size in sizes.items():
            places[name] = slice(start, start + size)
            start += size
        return places

    @property
    def size(self) -> int:
        return self._places["limits"].stop

    def empty(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A batch of nothing but padding: the vector, and a view of each field of it to write to."""
        vector = np.zeros(self.size, np.int32)
        fields = self.fields(vector)
        fields["rows"][:] = self.max_num_rows
        fields["sampled_rows"][:] = self.max_num_rows
        fields["last_token_index"][:] = self.bucket.num_tokens
        fields["table_index"][:] = self.num_groups * self.max_num_rows * self.max_blocks
        return vector, fields

    def fields(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """A view of each field of a batch on the host."""
        return {name: vector[place] for name, place in self._places.items()}

    def unpack(self, vector: jax.Array) -> Batch:
        """Inside jit."""
        fields = {name: vector[place] for name, place in self._places.items()}
        counts = fields.pop("counts")
        return Batch(num_rows=counts[0], num_decodes=counts[1], **fields)

    def attention_metadata(self, batch: Batch, block_tables: jax.Array) -> AttentionMetadata:
        """Positions and cache slots of the batch's tokens, inside jit.

        Args:
            block_tables: int32 [G, S, P], of all request rows.
        """
        num_tokens, num_rows = self.bucket.num_tokens, self.bucket.num_rows
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        if self.bucket.decode_only:
            row, valid = token, batch.rows < self.max_num_rows
        else:
            # Padding rows start where the last row ends, so the last start at or before a token is its row's.
            row = jnp.searchsorted(batch.query_start_loc[1:], token, side="right").astype(jnp.int32)
            valid, row = row < batch.num_rows, jnp.minimum(row, num_rows - 1)
        after = batch.query_start_loc[row + 1] - token
        positions = jnp.where(valid, batch.seq_lens[row] - after, 0)
        tables = block_tables[:, jnp.minimum(batch.rows, self.max_num_rows - 1)]
        block, offset = positions // self.block_size, positions % self.block_size
        slots = tables[:, row, block] * self.block_size + offset
        return AttentionMetadata(
            positions=positions,
            slot_mapping=jnp.where(valid, slots, -1),
            block_tables=tables,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            num_decodes=batch.num_decodes,
            decode_only=self.bucket.decode_only,
        )
