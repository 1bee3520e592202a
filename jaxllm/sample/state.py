"""The device rows: sampling parameters and what has been sampled, one row for each running request.

A request's row is written when it comes (`pack_row` on the host, `write_rows` to the device) and read by the steps that run it
(`gather`); `update` notes what a step has sampled. All scalars of a row are one packed upload. The wide tables are written only
for requests that use them: what an earlier request has left in a table is never read, for the new row's scalars say how much of
each table is its own. So a free row needs no cleaning.
"""

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.sample.limits import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
)
from jaxllm.sampling_params import SamplingParams

NO_LOGPROBS = -1
MAX_COUNT = np.iinfo(np.uint16).max  # of one token in an output; counts stay there
WRITE_BYTES = 1 << 16  # rows are uploaded in chunks of about this size
MAX_WRITE_ROWS = 32

# The columns of `scalars`, four bytes each; SamplingMetadata gives them by the same names.
ROW = np.dtype(
    [
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("top_k", "i4"),
        ("min_p", "f4"),
        ("repetition_penalty", "f4"),
        ("frequency_penalty", "f4"),
        ("presence_penalty", "f4"),
        ("seed_high", "u4"),
        ("seed_low", "u4"),
        ("num_prompt_tokens", "i4"),
        ("min_tokens", "i4"),
        ("num_stop_ids", "i4"),
        ("num_bias", "i4"),
        ("num_bad_words", "i4"),
        ("num_allowed", "i4"),
        ("num_logprobs", "i4"),
        ("num_logprob_ids", "i4"),
    ]
)


def _neutral_row() -> np.ndarray:
    """A greedy request that uses nothing: what padding rows are. ROW [1]."""
    row = np.zeros(1, ROW)
    row["top_p"] = row["repetition_penalty"] = 1.0
    row["num_logprobs"] = NO_LOGPROBS
    return row


NEUTRAL_SCALARS: np.ndarray = _neutral_row().view(np.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Device rows; S is max_num_seqs, W is ceil(V / 32).

    Attributes:
        recent: the last outputs of each request; output i is in place i % MAX_BAD_WORD_LEN.
        bad_words: token sequences from their last token backwards, filled up with -1.
        prompt_bits, output_counts: kept only for requests with penalties.
    """

    scalars: jax.Array  # int32 [S, len(ROW)]
    stop_ids: jax.Array  # int32 [S, MAX_STOP_TOKEN_IDS]
    bias_ids: jax.Array  # int32 [S, MAX_LOGIT_BIAS]
    bias_values: jax.Array  # float32 [S, MAX_LOGIT_BIAS]
    allowed_bits: jax.Array  # int32 [S, W]
    bad_words: jax.Array  # int32 [S, MAX_BAD_WORDS, MAX_BAD_WORD_LEN]
    recent: jax.Array  # int32 [S, MAX_BAD_WORD_LEN]
    prompt_bits: jax.Array  # int32 [S, W]
    output_counts: jax.Array  # uint16 [S, V]
    logprob_ids: jax.Array  # int32 [S, MAX_LOGPROB_TOKEN_IDS]

    @property
    def max_num_seqs(self) -> int:
        return self.output_counts.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.output_counts.shape[1]


def _column(name: str) -> property:
    assert ROW.names is not None
    index, dtype = ROW.names.index(name), ROW[name]
    return property(lambda self: lax.bitcast_convert_type(self.scalars[:, index], dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingMetadata:
    """The rows of one batch.

    A column is cut out of `scalars` where it is used, so that branches take one array and not seventeen; `tables` is the whole
    state: what is rarely used is read from it only where it is used.

    Attributes:
        row_ids: each batch row's row in the tables; padding has one too, but neutral scalars.
        in_use: False for padding.
    """

    row_ids: jax.Array  # int32 [R]
    in_use: jax.Array  # bool [R]
    scalars: jax.Array  # int32 [R, len(ROW)]
    tables: SamplingState

    temperature = _column("temperature")  # float32 [R]; 0 is greedy
    top_p = _column("top_p")  # float32 [R]
    top_k = _column("top_k")  # int32 [R]; 0 for all
    min_p = _column("min_p")  # float32 [R]
    repetition_penalty = _column("repetition_penalty")  # float32 [R]
    frequency_penalty = _column("frequency_penalty")  # float32 [R]
    presence_penalty = _column("presence_penalty")  # float32 [R]
    seed_high = _column("seed_high")  # uint32 [R]
    seed_low = _column("seed_low")  # uint32 [R]
    num_prompt_tokens = _column("num_prompt_tokens")  # int32 [R]
    min_tokens = _column("min_tokens")  # int32 [R]
    num_stop_ids = _column("num_stop_ids")  # int32 [R]; 0 unless there is a min_tokens
    num_bias = _column("num_bias")  # int32 [R]
    num_bad_words = _column("num_bad_words")  # int32 [R]
    num_allowed = _column("num_allowed")  # int32 [R]; 0 if every token is
    num_logprobs = _column("num_logprobs")  # int32 [R]; NO_LOGPROBS if none are asked for, the vocabulary's size for all
    num_logprob_ids = _column("num_logprob_ids")  # int32 [R]

    @property
    def uses_penalties(self) -> jax.Array:
        """bool [R]."""
        return (self.repetition_penalty != 1.0) | (self.frequency_penalty != 0.0) | (self.presence_penalty != 0.0)


@dataclass(frozen=True)
class PackedRow:
    """A request's row on the host, ready to be written.

    Attributes:
        scalars: int32 [len(ROW)].
        tables: field of SamplingState → its row, for the tables that the request uses.
    """

    scalars: np.ndarray
    tables: Mapping[str, np.ndarray]


def init(max_num_seqs: int, vocab_size: int, sharding: jax.sharding.Sharding | None = None) -> SamplingState:
    """Device rows that are all neutral.

    Args:
        sharding: where to put them (replicated over the mesh); None for the default device.
    """
    num_words = -(-vocab_size // 32)

    def zeros(*shape: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.Array:
        return jnp.zeros((max_num_seqs, *shape), dtype, device=sharding)

    scalars = np.broadcast_to(NEUTRAL_SCALARS, (max_num_seqs, len(ROW)))
    return SamplingState(
        scalars=jax.device_put(scalars, sharding),
        stop_ids=zeros(MAX_STOP_TOKEN_IDS),
        bias_ids=zeros(MAX_LOGIT_BIAS),
        bias_values=zeros(MAX_LOGIT_BIAS, dtype=jnp.float32),
        allowed_bits=zeros(num_words),
        bad_words=zeros(MAX_BAD_WORDS, MAX_BAD_WORD_LEN),
        recent=zeros(MAX_BAD_WORD_LEN),
        prompt_bits=zeros(num_words),
        output_counts=zeros(vocab_size, dtype=jnp.uint16),
        logprob_ids=zeros(MAX_LOGPROB_TOKEN_IDS),
    )


def num_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Bytes of device memory that `init` takes."""
    shapes = jax.eval_shape(lambda: init(max_num_seqs, vocab_size))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def default_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that has none: the same whenever and wherever the request runs, a preemption included."""
    return int.from_bytes(hashlib.blake2b(f"{engine_seed}/{request_id}".encode(), digest_size=8).digest())


def _filled(values: Sequence[int], size: int, fill: int = 0) -> np.ndarray:
    row = np.full(size, fill, np.int32)
    row[: len(values)] = values
    return row


def _bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    member = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    member[np.asarray(token_ids, np.int64)] = True
    return np.packbits(member, bitorder="little").view("<i4").astype(np.int32, copy=False)


def pack_row(params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int, vocab_size: int, seed: int) -> PackedRow:
    """A request's row. Cheap unless the request uses one of the tables.

    Args:
        params: as the input processor completed them; `limits.check_sampling_limits` must have passed.
        token_ids: prompt, then the outputs so far: there are some if the request is resumed.
        seed: of a request without a seed of its own, see `default_seed`.
    """
    tables: dict[str, np.ndarray] = {}
    row = _neutral_row()
    row["temperature"] = 0.0 if params.is_greedy else params.temperature
    row["top_p"] = params.top_p
    row["top_k"] = 0 if params.top_k >= vocab_size else max(params.top_k, 0)
    row["min_p"] = params.min_p
    row["repetition_penalty"] = params.repetition_penalty
    row["frequency_penalty"] = params.frequency_penalty
    row["presence_penalty"] = params.presence_penalty
    seed = (seed if params.seed is None else params.seed) % (1 << 64)
    row["seed_high"], row["seed_low"] = seed >> 32, seed & 0xFFFFFFFF
    row["num_prompt_tokens"] = num_prompt_tokens

    if params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        tables["prompt_bits"] = _bits(token_ids[:num_prompt_tokens], vocab_size)
        tables["output_counts"] = counts = np.zeros(vocab_size, np.uint16)
        outputs, times = np.unique(np.asarray(token_ids[num_prompt_tokens:], np.int64), return_counts=True)
        counts[outputs] = np.minimum(times, MAX_COUNT)
    if params.min_tokens > 0 and params.all_stop_token_ids:
        row["min_tokens"] = params.min_tokens
        row["num_stop_ids"] = len(params.all_stop_token_ids)
        tables["stop_ids"] = _filled(sorted(params.all_stop_token_ids), MAX_STOP_TOKEN_IDS)
    if params.logit_bias:
        row["num_bias"] = len(params.logit_bias)
        tables["bias_ids"] = _filled(list(params.logit_bias), MAX_LOGIT_BIAS)
        tables["bias_values"] = np.zeros(MAX_LOGIT_BIAS, np.float32)
        tables["bias_values"][: len(params.logit_bias)] = list(params.logit_bias.values())
    if params.allowed_token_ids:
        row["num_allowed"] = len(params.allowed_token_ids)
        tables["allowed_bits"] = _bits(params.allowed_token_ids, vocab_size)
    if params.bad_words_token_ids:
        row["num_bad_words"] = len(params.bad_words_token_ids)
        words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, np.int32)
        for word, sequence in zip(words, params.bad_words_token_ids, strict=False):
            word[: len(sequence)] = sequence[::-1]
        tables["bad_words"] = words
        if len(token_ids) > num_prompt_tokens:
            recent = np.zeros(MAX_BAD_WORD_LEN, np.int32)
            for index in range(max(num_prompt_tokens, len(token_ids) - MAX_BAD_WORD_LEN), len(token_ids)):
                recent[(index - num_prompt_tokens) % MAX_BAD_WORD_LEN] = token_ids[index]
            tables["recent"] = recent
    if params.num_logprobs is not None:
        row["num_logprobs"] = vocab_size if params.num_logprobs == -1 else params.num_logprobs
    if params.logprob_token_ids is not None:
        row["num_logprob_ids"] = len(params.logprob_token_ids)
        tables["logprob_ids"] = _filled(params.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
    return PackedRow(row.view(np.int32), tables)


@partial(jax.jit, donate_argnums=0)
def _write(array: jax.Array, row_ids: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[row_ids].set(values, mode="drop")


def _write_chunked(array: jax.Array, row_ids: Sequence[int], rows: Sequence[np.ndarray]) -> jax.Array:
    """Write rows in chunks whose size depends on the table alone, so that each table has one compiled write."""
    row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    size = max(1, min(MAX_WRITE_ROWS, array.shape[0], WRITE_BYTES // row_bytes))
    for start in range(0, len(row_ids), size):
        ids = np.full(size, array.shape[0], np.int32)
        values = np.zeros((size, *array.shape[1:]), array.dtype)
        for place, (row_id, row) in enumerate(zip(row_ids[start : start + size], rows[start : start + size], strict=True)):
            ids[place], values[place] = row_id, row
        array = _write(array, ids, values)
    return array


def write_rows(state: SamplingState, rows: Mapping[int, PackedRow]) -> SamplingState:
    """Write the rows of new requests, by row id.

    The arrays that are written are donated: use the returned state. One dispatch for up to MAX_WRITE_ROWS rows of scalars, and
    about one for each table and row that is used; nothing is compiled after `warm_up`.

    Raises:
        ValueError: if a row id is not a row.
    """
    writes: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for row_id, row in rows.items():
        if not 0 <= row_id < state.max_num_seqs:
            raise ValueError(f"row_id must be in [0, {state.max_num_seqs}), got {row_id}")
        writes["scalars"][row_id] = row.scalars
        for name, table in row.tables.items():
            writes[name][row_id] = table
    changed = {name: _write_chunked(getattr(state, name), list(tables), list(tables.values())) for name, tables in writes.items()}
    return dataclasses.replace(state, **changed)


def warm_up(state: SamplingState) -> SamplingState:
    """Compile all that `write_rows` may need. Changes nothing, but donates the state."""

    def write_nowhere(array: jax.Array) -> jax.Array:
        return _write_chunked(array, [state.max_num_seqs], [np.zeros(array.shape[1:], array.dtype)])

    return jax.tree.map(write_nowhere, state)


def gather(state: SamplingState, row_ids: jax.Array) -> SamplingMetadata:
    """The rows of a batch. Inside jit.

    Args:
        row_ids: int32 [R]; anything outside [0, max_num_seqs) is padding.
    """
    in_use = (row_ids >= 0) & (row_ids < state.max_num_seqs)
    row_ids = jnp.clip(row_ids, 0, state.max_num_seqs - 1)
    scalars = jnp.where(in_use[:, None], state.scalars[row_ids], NEUTRAL_SCALARS)
    return SamplingMetadata(row_ids, in_use, scalars, tables=state)


def update(
    state: SamplingState, metadata: SamplingMetadata, positions: jax.Array, token_ids: jax.Array, valid: jax.Array
) -> SamplingState:
    """Note the sampled tokens. Inside jit; donate the state and it is changed in place.

    Args:
        metadata: of the batch, gathered from this state.
        positions: int32 [R]: where in its request each token is; the first token of the prompt has position 0.
        token_ids: int32 [R].
        valid: bool [R]; False for rows whose token is thrown away (a partial prefill). They and padding change nothing.
    """
    nowhere = state.max_num_seqs
    rows = jnp.where(valid & metadata.in_use, metadata.row_ids, nowhere)
    counted = jnp.where(metadata.uses_penalties, rows, nowhere)
    counts = state.output_counts.at[counted, token_ids].get(mode="fill", fill_value=0)
    place = (positions - metadata.num_prompt_tokens) % MAX_BAD_WORD_LEN
    return dataclasses.replace(
        state,
        recent=state.recent.at[rows, place].set(token_ids, mode="drop"),
        output_counts=state.output_counts.at[counted, token_ids].set(counts + (counts < MAX_COUNT), mode="drop"),
    )
