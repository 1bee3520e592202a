"""RowState: what the devices keep of each running request, addressed by request row."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sample import state as sampling_state
from jaxllm.sample.state import PackedRow, SamplingState

ROWS_PER_WRITE = 8


@partial(jax.tree_util.register_dataclass, data_fields=["last_tokens", "block_tables", "sampling"], meta_fields=[])
@dataclass(frozen=True)
class RowState:
    """The rows of all requests.

    Attributes:
        last_tokens: int32 [S], the token sampled last, which is the next decode step's input.
        block_tables: int32 [G, S, P].
        sampling: parameters and history that sampling needs.
    """

    last_tokens: jax.Array
    block_tables: jax.Array
    sampling: SamplingState


@dataclass(frozen=True)
class NewRow:
    """A new request's row on the host. `block_table`: int32 [G, P]."""

    block_table: np.ndarray
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
        sampling=sampling_state.init(max_num_rows, vocab_size, sharding),
    )


@partial(jax.jit, donate_argnums=0)
def _write_tables(block_tables: jax.Array, rows: jax.Array, tables: jax.Array) -> jax.Array:
    return block_tables.at[:, rows].set(tables, mode="drop")


def _write_chunk(block_tables: jax.Array, tables: list[tuple[int, np.ndarray]]) -> jax.Array:
    num_groups, max_num_rows, max_blocks = block_tables.shape
    rows = np.full(ROWS_PER_WRITE, max_num_rows, np.int32)
    values = np.zeros((num_groups, ROWS_PER_WRITE, max_blocks), np.int32)
    for i, (row, table) in enumerate(tables):
        rows[i], values[:, i] = row, table
    return _write_tables(block_tables, rows, values)


def write_tables(block_tables: jax.Array, rows: Mapping[int, NewRow]) -> jax.Array:
    """Write the block tables of new requests; `block_tables` is donated. With no rows it writes nothing, and compiles."""
    tables = [(row, new.block_table) for row, new in rows.items()]
    for start in range(0, max(len(tables), 1), ROWS_PER_WRITE):
        block_tables = _write_chunk(block_tables, tables[start : start + ROWS_PER_WRITE])
    return block_tables


def write_rows(state: RowState, rows: Mapping[int, NewRow]) -> RowState:
    """Write the rows of new requests; `state` is donated. Compiles nothing after `warm_up`."""
    block_tables = write_tables(state.block_tables, rows)
    sampling = sampling_state.write_rows(state.sampling, {row: new.sampling for row, new in rows.items()})
    return dataclasses.replace(state, block_tables=block_tables, sampling=sampling)


def warm_up(state: RowState) -> RowState:
    """Compile all that `write_rows` may need. Changes nothing, but donates the state."""
    sampling = sampling_state.warm_up(state.sampling)
    return dataclasses.replace(state, block_tables=write_tables(state.block_tables, {}), sampling=sampling)
