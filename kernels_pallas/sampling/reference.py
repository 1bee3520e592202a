"""The sampler's operations in jax.numpy: the specification, and quick enough to serve with.

Nothing here sorts a whole row. The vocabulary is cut into small blocks of neighbouring tokens; the k blocks with the largest
maxima hold the k largest logits, for a logit among them has at most k - 1 blocks before its own: each holds a larger one. So the
first `NUM_CANDIDATE_BLOCKS` blocks answer almost every question about the top of the distribution, and the rows for which they do
not (a flat distribution with a large top-p, a very large top-k) are searched in full.

The same functions serve logits that are sharded over the vocabulary: what is gathered is one number a block, never the logits.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

SMALL_BLOCK = 32  # tokens a block, where the blocks with the largest maxima are wanted
BLOCK = 128  # tokens a block, where one block is wanted
NUM_CANDIDATE_BLOCKS = 64
ROWS_PER_SEARCH = 4  # rows that are searched in full at once
_SMALLEST_NORMAL = 0x00800000  # float32, as `_order` gives it


def _blocks(logits: jax.Array, size: int) -> jax.Array:
    """[R, V] -> [R, ceil(V / size), size], filled up with -inf."""
    rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // size)
    if num_blocks * size != vocab_size:
        logits = jnp.pad(logits, ((0, 0), (0, num_blocks * size - vocab_size)), constant_values=-jnp.inf)
    return logits.reshape(rows, num_blocks, size)


def _take_blocks(blocks: jax.Array, block_ids: jax.Array) -> jax.Array:
    """[R, n, size], [R, k] -> [R, k * size]."""
    rows, _, size = blocks.shape
    taken = jnp.take_along_axis(blocks, block_ids[:, :, None], axis=1, mode="promise_in_bounds")
    return taken.reshape(rows, block_ids.shape[1] * size)


def _unpack(words: jax.Array, vocab_size: int) -> jax.Array:
    """int32 [R, W] -> bool [R, V]."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size].astype(jnp.bool_)


def argmax(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    blocks = _blocks(logits, BLOCK)
    block_max = blocks.max(axis=2)
    block_id = jnp.argmax(block_max, axis=1).astype(jnp.int32)
    block = _take_blocks(blocks, block_id[:, None])
    token_ids = block_id * BLOCK + jnp.argmax(block, axis=1).astype(jnp.int32)
    return token_ids, block_max.max(axis=1)


def _order(x: jax.Array) -> jax.Array:
    """float32 -> int32 in the same order; its own inverse on the bits."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _value(order: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(order ^ ((order >> 31) & 0x7FFFFFFF), jnp.float32)


def _largest(holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array) -> jax.Array:
    """The largest float32 t in [low, high] for which `holds(t)`, which must fall with t; `low` if it holds nowhere. All [R]."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        inside, outside = bounds
        middle = (inside & outside) + ((inside ^ outside) >> 1)
        good = holds(_value(middle))
        return jnp.where(good, middle, inside), jnp.where(good, outside, middle)

    found = lax.fori_loop(0, 32, halve, (_order(low), _order(high) + 1))[0]
    # A device that takes denormal numbers for 0 finds the largest of them in place of 0.
    return _value(jnp.where((found > 0) & (found < _SMALLEST_NORMAL), 0, found))


def _search(
    x: jax.Array,
    row_max: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    cutoff: jax.Array,
    floor: jax.Array,
    mass: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Thresholds from the values `x` [R, C], which must hold all values of the row above `floor` [R].

    `cutoff` [R] is min-p's threshold, `mass` [R] the mass of all values at or above it (not looked at where `floor` is -inf). The
    second result says for which rows the values sufficed: where `x` holds enough values, and enough mass, from `floor` up.
    """
    weights = jnp.exp((x - row_max[:, None]) / temperature[:, None])

    def mass_from(t: jax.Array) -> jax.Array:
        return jnp.where(x >= t[:, None], weights, 0.0).sum(axis=1)

    limit_k = top_k >= 1
    kth = lax.cond(
        limit_k.any(),
        lambda: _largest(lambda t: (x >= t[:, None]).sum(axis=1) >= top_k, floor, row_max),
        lambda: floor,
    )
    base = jnp.maximum(cutoff, jnp.where(limit_k, kth, -jnp.inf))
    complete = (base > floor) | (floor == -jnp.inf)
    start = jnp.maximum(base, floor)
    target = top_p * jnp.where(complete, mass_from(base), mass)
    limit_p = top_p < 1.0
    nucleus = lax.cond(
        limit_p.any(),
        lambda: _largest(lambda t: mass_from(t) >= target, start, row_max),
        lambda: start,
    )
    enough_k = ~limit_k | ((x >= floor[:, None]).sum(axis=1) >= top_k)
    enough_p = ~limit_p | complete | (~limit_k & (mass_from(start) >= target))
    return jnp.where(limit_p, jnp.maximum(base, nucleus), base), enough_k & enough_p


def thresholds(
    logits: jax.Array,
    row_max: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    rows, vocab_size = logits.shape
    top_k = jnp.where(top_k < vocab_size, top_k, 0)
    cutoff = jnp.where(min_p > 0.0, row_max + temperature * jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)

    def search_in_full(x: jax.Array, row_ids: jax.Array) -> jax.Array:
        at_row = [a[row_ids] for a in (row_max, temperature, top_k, top_p, cutoff)]
        return _search(x, *at_row, floor=jnp.full(row_ids.shape, -jnp.inf), mass=jnp.zeros(row_ids.shape))[0]

    if vocab_size <= SMALL_BLOCK * NUM_CANDIDATE_BLOCKS:
        return search_in_full(logits, jnp.arange(rows))

    blocks = _blocks(logits, SMALL_BLOCK)
    largest, block_ids = lax.top_k(blocks.max(axis=2), NUM_CANDIDATE_BLOCKS)
    # No slice of `largest`: XLA would no longer see a top-k in it, and sort.
    floor = largest.min(axis=1)

    def mass_above_cutoff() -> jax.Array:
        weights = jnp.exp((logits - row_max[:, None]) / temperature[:, None])
        return jnp.where(logits >= cutoff[:, None], weights, 0.0).sum(axis=1)

    mass = lax.cond((top_p < 1.0).any(), mass_above_cutoff, lambda: jnp.zeros_like(row_max))
    found, sufficient = _search(_take_blocks(blocks, block_ids), row_max, temperature, top_k, top_p, cutoff, floor, mass)
    unsettled = ~sufficient

    size = min(ROWS_PER_SEARCH, rows)
    # Longer than needed: were the slice below the whole queue, XLA would hoist the search out of the loop and always run it.
    queue = jnp.pad(jnp.sort(jnp.where(unsettled, jnp.arange(rows), rows)), (0, size), constant_values=rows)
    count = unsettled.sum()

    def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0] < count

    def search_some(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, found = carry
        row_ids = lax.dynamic_slice(queue, (done,), (size,))
        some = jnp.minimum(row_ids, rows - 1)
        return done + size, found.at[row_ids].set(search_in_full(logits[some], some), mode="drop")

    return lax.while_loop(more, search_some, (jnp.zeros((), count.dtype), found))[1]


def _draw(masses: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Invert the distribution function: [R, n], [R] -> int32 [R]."""
    # Summed in another order, sums could rise by a last bit where there is no mass: so a mass is asked for too.
    sums = jnp.cumsum(masses, axis=1)
    hit = (sums > (uniforms * sums[:, -1])[:, None]) & (masses > 0.0)
    return jnp.argmax(hit, axis=1).astype(jnp.int32)


def choose(
    logits: jax.Array,
    row_max: jax.Array,
    temperature: jax.Array,
    threshold: jax.Array,
    uniforms: jax.Array,
) -> jax.Array:
    def masses(x: jax.Array) -> jax.Array:
        per_row = (-1,) + (1,) * (x.ndim - 1)
        weights = jnp.exp((x - row_max.reshape(per_row)) / temperature.reshape(per_row))
        return jnp.where(x >= threshold.reshape(per_row), weights, 0.0)

    blocks = _blocks(logits, BLOCK)
    block_id = _draw(masses(blocks).sum(axis=2), uniforms[:, 0])
    block = _take_blocks(blocks, block_id[:, None])
    return block_id * BLOCK + _draw(masses(block), uniforms[:, 1])


def top_tokens(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    if k * SMALL_BLOCK >= logits.shape[1]:
        values, token_ids = lax.top_k(logits, k)
        return token_ids, values
    blocks = _blocks(logits, SMALL_BLOCK)
    # In the order of the vocabulary, so that the lower id of equal logits stays in front.
    block_ids = jnp.sort(lax.top_k(blocks.max(axis=2), k)[1], axis=1)
    values, places = lax.top_k(_take_blocks(blocks, block_ids), k)
    block_id = jnp.take_along_axis(block_ids, places // SMALL_BLOCK, axis=1, mode="promise_in_bounds")
    return block_id * SMALL_BLOCK + places % SMALL_BLOCK, values


def log_sum_exp(logits: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits, axis=1)


def token_ranks(logits: jax.Array, token_logits: jax.Array) -> jax.Array:
    return 1 + (logits > token_logits[:, None]).sum(axis=1, dtype=jnp.int32)


def mask_tokens(logits: jax.Array, row_ids: jax.Array, bits: jax.Array, active: jax.Array) -> jax.Array:
    allowed = _unpack(bits.at[row_ids].get(mode="clip"), logits.shape[1])
    return jnp.where(allowed | ~active[:, None], logits, -jnp.inf)


def apply_penalties(
    logits: jax.Array,
    row_ids: jax.Array,
    prompt_bits: jax.Array,
    output_counts: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
    active: jax.Array,
) -> jax.Array:
    counts = output_counts.at[row_ids].get(mode="clip").astype(jnp.float32)
    seen = _unpack(prompt_bits.at[row_ids].get(mode="clip"), logits.shape[1]) | (counts > 0.0)
    repeated = jnp.where(logits > 0.0, logits / repetition[:, None], logits * repetition[:, None])
    penalized = jnp.where(seen, repeated, logits)
    penalized -= frequency[:, None] * counts
    penalized -= presence[:, None] * (counts > 0.0)
    return jnp.where(active[:, None], penalized, logits)
