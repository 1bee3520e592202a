"""RowState: what the devices keep of each running request, addressed by request row."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.core.output import MAX_END_TOKEN_IDS
from jaxllm.sample import state as sampling_state
from jaxllm.sample.state import PackedRow, SamplingState

ROWS_PER_WRITE = 8


@partial(jax.tree_util.register_dataclass, data_fields=["last_tokens", "block_tables", "end_ids", "sampling"], meta_fields=[])
@dataclass(frozen=True)
class RowState:
    """The rows of all requests.

    Attributes:
        last_tokens: int32 [S], the token sampled last, which is the next decode step's input.
        block_tables: int32 [G, S, P].
        end_ids: int32 [S, MAX_END_TOKEN_IDS], tokens that end the request, filled up with -1. Read by steps of several decodes.
        sampling: parameters and history that sampling needs.
    """

    last_tokens: jax.Array
    block_tables: jax.Array
    end_ids: jax.Array
    sampling: SamplingState


@dataclass(frozen=True)
class NewRow:
    """A new request's row on the host. `block_table`: int32 [G, P]; `end_token_ids`: at most MAX_END_TOKEN_IDS."""

    block_table: np.ndarray
    end_token_ids: Sequence[int]
    sampling: PackedRow


def state_bytes(state: RowState) -> int:
    """Bytes on a device, of the rows or of their shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def init_row_state(
    max_num_rows: int, num_groups: int, max_blocks: int, vocab_size: int, sharding: jax.sharding.Sharding | None
) -> RowState:
    """Rows of no request, the same on every device of `sharding`."""
    return RowState(
        last_tokens=jnp.zeros(max_num_rows, jnp.int32, device=sharding),
        block_tables=jnp.zeros((num_groups, max_num_rows, max_blocks), jnp.int32, device=sharding),
        end_ids=jnp.full((max_num_rows, MAX_END_TOKEN_IDS), -1, jnp.int32, device=sharding),
        sampling=sampling_state.init(max_num_rows, vocab_size, sharding),
    )


@partial(jax.jit, donate_argnums=0)
def _write_tables(block_tables: jax.Array, rows: jax.Array, tables: jax.Array) -> jax.Array:
    return block_tables.at[:, rows].set(tables, mode="drop")


@partial(jax.jit, donate_argnums=0)
def _write_ends(end_ids: jax.Array, rows: jax.Array, ends: jax.Array) -> jax.Array:
    return end_ids.at[rows].set(ends, mode="drop")


def _chunks(rows: Mapping[int, NewRow], nowhere: int) -> Iterator[tuple[np.ndarray, list[NewRow]]]:
    """Rows of at most ROWS_PER_WRITE requests, filled up with `nowhere`; one chunk of none for no request."""
    items = list(rows.items())
    for start in range(0, max(len(items), 1), ROWS_PER_WRITE):
        chunk = items[start : start + ROWS_PER_WRITE]
        index = np.full(ROWS_PER_WRITE, nowhere, np.int32)
        index[: len(chunk)] = [row for row, _ in chunk]
        yield index, [new for _, new in chunk]


def write_tables(block_tables: jax.Array, rows: Mapping[int, NewRow]) -> jax.Array:
    """Write the block tables of new requests; `block_tables` is donated. With no rows it writes nothing, and compiles."""
    num_groups, max_num_rows, max_blocks = block_tables.shape
    for index, chunk in _chunks(rows, max_num_rows):
        tables = np.zeros((num_groups, ROWS_PER_WRITE, max_blocks), np.int32)
        for i, new in enumerate(chunk):
            tables[:, i] = new.block_table
        block_tables = _write_tables(block_tables, index, tables)
    return block_tables


def write_ends(end_ids: jax.Array, rows: Mapping[int, NewRow]) -> jax.Array:
    """The same for the tokens that end new requests; `end_ids` is donated."""
    for index, chunk in _chunks(rows, end_ids.shape[0]):
        ends = np.full((ROWS_PER_WRITE, MAX_END_TOKEN_IDS), -1, np.int32)
        for i, new in enumerate(chunk):
            ends[i, : len(new.end_token_ids)] = new.end_token_ids
        end_ids = _write_ends(end_ids, index, ends)
    return end_ids


def write_rows(state: RowState, rows: Mapping[int, NewRow]) -> RowState:
    """Write the rows of new requests; `state` is donated. Compiles nothing after `warm_up`."""
    return RowState(
        last_tokens=state.last_tokens,
        block_tables=write_tables(state.block_tables, rows),
        end_ids=write_ends(state.end_ids, rows),
        sampling=sampling_state.write_rows(state.sampling, {row: new.sampling for row, new in rows.items()}),
    )


def warm_up(state: RowState) -> RowState:
    """Compile all that `write_rows` may need. Changes nothing, but donates the state."""
    return RowState(
        last_tokens=state.last_tokens,
        block_tables=write_tables(state.block_tables, {}),
        end_ids=write_ends(state.end_ids, {}),
        sampling=sampling_state.warm_up(state.sampling),
    )
