"""The operations on logits against NumPy in float64, by hand and by hypothesis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kernels_pallas import sampling

INF = np.inf
ops = {name: jax.jit(getattr(sampling, name)) for name in sampling.__all__ if name != "top_tokens"}
top_tokens = jax.jit(sampling.top_tokens, static_argnums=1)


def floats(*values):
    return jnp.asarray(values, jnp.float32)


def random_logits(seed, rows, vocab_size, spread, grid, masked):
    """Normal logits; `grid` above 0 rounds them, so that there are ties; `masked` is the share of -inf."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab_size)) * spread
    if grid:
        logits = np.round(logits / grid) * grid
    logits[rng.random(logits.shape) < masked] = -INF
    logits[:, rng.integers(vocab_size)] = 0.5
    return logits.astype(np.float32) + np.float32(0)  # no -0.0, which lax.top_k puts below 0.0


logits_arguments = {
    "seed": st.integers(0, 10**6),
    "spread": st.sampled_from([0.1, 1.0, 3.0, 8.0]),
    "grid": st.sampled_from([0.0, 0.25, 1.0]),
    "masked": st.sampled_from([0.0, 0.3, 0.99]),
}


# argmax


@settings(max_examples=40, deadline=None)
@given(vocab_size=st.sampled_from([1, 4, 127, 128, 3000]), **logits_arguments)
def test_argmax(seed, vocab_size, spread, grid, masked):
    logits = random_logits(seed, 5, vocab_size, spread, grid, masked)
    token_ids, values = ops["argmax"](logits)
    np.testing.assert_array_equal(token_ids, logits.argmax(axis=1))
    np.testing.assert_array_equal(values, logits.max(axis=1))


@pytest.mark.parametrize("vocab_size", [4, 200])
@pytest.mark.parametrize("value", [np.nan, -INF])
def test_argmax_of_garbage_is_a_token(vocab_size, value):
    token_ids, _ = ops["argmax"](np.full((2, vocab_size), value, np.float32))
    assert ((token_ids >= 0) & (token_ids < vocab_size)).all()


# thresholds


def kept_in_float64(logits, temperature, top_k, top_p, min_p):
    """One row by sorting: the specification."""
    logits = logits.astype(np.float64)
    weights = np.exp((logits - logits.max()) / temperature)
    kept = weights >= min_p
    if 0 < top_k < len(logits):
        kept &= logits >= np.sort(logits)[-top_k]
    if top_p < 1.0:
        values = np.sort(np.unique(logits[kept & (weights > 0)]))[::-1]
        masses = np.cumsum([weights[logits == value].sum() for value in values])
        enough = np.flatnonzero(masses >= top_p * weights[kept].sum())
        kept &= logits >= (values[enough[0]] if len(enough) else -INF)
    return kept & (logits > -INF)


ROWS = 6
row_parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.01, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 50, 65, 100, 700, 2999, 3000, 10**6]),
        "top_p": st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.1, 1e-6]),
        "min_p": st.sampled_from([0.0, 1e-4, 0.05, 0.5, 1.0]),
    }
)


@settings(max_examples=120, deadline=None)
@given(
    vocab_size=st.sampled_from([4, 37, 3000, 5120]),
    parameters=st.lists(row_parameters, min_size=ROWS, max_size=ROWS),
    **logits_arguments,
)
def test_thresholds(seed, vocab_size, parameters, spread, grid, masked):
    """Sums in float32 may move a boundary by a hair: what is kept lies between what a hair less and a hair more would keep."""
    logits = random_logits(seed, ROWS, vocab_size, spread, grid, masked)
    column = {name: np.asarray([row[name] for row in parameters], np.float32) for name in parameters[0]}
    threshold = ops["thresholds"](
        logits, logits.max(axis=1), column["temperature"], column["top_k"].astype(np.int32), column["top_p"], column["min_p"]
    )
    kept = (logits >= np.asarray(threshold)[:, None]) & (logits > -INF)
    for row, values in enumerate(parameters):
        t, k, p, m = values["temperature"], values["top_k"], values["top_p"], values["min_p"]
        less = kept_in_float64(logits[row], t, k, p * (1 - 1e-5) if p < 1 else p, min(m * (1 + 1e-5), 1.0))
        more = kept_in_float64(logits[row], t, k, p * (1 + 1e-5) if p < 1 else p, m * (1 - 1e-5))
        assert (kept[row] | ~less).all()
        assert (more | ~kept[row]).all()
        assert kept[row].any()


FOUR = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, [0, 1, 2, 3]),
        (1, 1.0, 0.0, [1]),
        (3, 1.0, 0.0, [1, 2, 3]),
        (9, 1.0, 0.0, [0, 1, 2, 3]),
        (0, 0.39, 0.0, [1]),
        (0, 0.41, 0.0, [1, 3]),
        (0, 0.71, 0.0, [1, 2, 3]),
        (0, 0.91, 0.0, [0, 1, 2, 3]),
        (0, 1.0, 0.3, [1, 2, 3]),
        (0, 1.0, 0.6, [1, 3]),
        (0, 1.0, 1.0, [1]),
        (2, 0.6, 0.0, [1, 3]),  # of 0.4 + 0.3, 0.4 is 57 %
        (2, 0.56, 0.0, [1]),
        (3, 0.44, 0.6, [1]),  # min_p leaves 0.4 + 0.3 too
    ],
)
def test_thresholds_of_four_tokens(top_k, top_p, min_p, kept):
    row_max = FOUR.max(axis=1)
    threshold = ops["thresholds"](FOUR, row_max, floats(1), jnp.asarray([top_k]), floats(top_p), floats(min_p))
    assert np.flatnonzero(FOUR[0] >= threshold[0]).tolist() == kept


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (0, 0.9)])
def test_a_boundary_at_zero_is_zero(top_k, top_p):
    """Where denormal numbers count as 0, as on a CPU, the largest of them has as many tokens above it."""
    logits = np.float32([[0.5, 0.0, 0.0, -3.0]])
    args = (floats(0.5), floats(1.0), jnp.asarray([top_k], jnp.int32), floats(top_p), floats(0.0))
    threshold = np.asarray(ops["thresholds"](logits, *args))
    np.testing.assert_array_equal(threshold.view(np.int32), [0])


def test_temperature_comes_before_top_p_and_min_p():
    # At temperature 0.5 the probabilities are as 1 : 16 : 4 : 9, of 30.
    row_max = FOUR.max(axis=1)
    for top_p, min_p, kept in [(0.52, 0.0, [1]), (0.54, 0.0, [1, 3]), (1.0, 0.55, [1, 3]), (1.0, 0.57, [1])]:
        threshold = ops["thresholds"](FOUR, row_max, floats(0.5), jnp.asarray([0]), floats(top_p), floats(min_p))
        assert np.flatnonzero(FOUR[0] >= threshold[0]).tolist() == kept


def test_ties_are_kept():
    logits = jnp.log(floats(0.2, 0.2, 0.4, 0.2))[None]
    threshold = ops["thresholds"](logits, logits.max(axis=1), floats(1), jnp.asarray([2]), floats(1), floats(0))
    assert (logits >= threshold[:, None]).all()
    threshold = ops["thresholds"](logits, logits.max(axis=1), floats(1), jnp.asarray([0]), floats(0.5), floats(0))
    assert (logits >= threshold[:, None]).all()


# choose


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.09, 0), (0.11, 1), (0.49, 1), (0.51, 2), (0.69, 2), (0.71, 3)])
def test_choose_inverts_the_distribution_function(uniform, token):
    row_max = FOUR.max(axis=1)
    uniforms = floats(0.3, uniform)[None]
    assert ops["choose"](FOUR, row_max, floats(1), floats(-INF), uniforms).tolist() == [token]


def test_choose_never_takes_what_has_no_mass():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2000, 300)).astype(np.float32) * 4
    logits[rng.random(logits.shape) < 0.9] = -INF
    logits[:, 7] = 1.0
    threshold = np.where(rng.random(2000) < 0.5, 1.0, -INF).astype(np.float32)
    uniforms = rng.choice(np.array([0.0, 2.0**-24, 0.5, 1 - 2.0**-24], np.float32), (2000, 2))
    token_ids = ops["choose"](logits, logits.max(axis=1), np.ones(2000, np.float32), threshold, uniforms)
    chosen = logits[np.arange(2000), token_ids]
    assert (chosen > -INF).all()
    assert (chosen >= threshold).all()


def test_choose_takes_what_has_mass_at_every_boundary():
    """Uniforms on the steps of the distribution function, where a sum's last bit decides."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(5_000, 128)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.5] = -INF
    logits[:, 0] = 0.0
    row_max = logits.max(axis=1)
    sums = np.asarray(jnp.cumsum(jnp.exp(logits - row_max[:, None]), axis=1))
    steps = sums[np.arange(5_000), rng.integers(0, 127, 5_000)] / sums[:, -1]
    uniforms = np.minimum(np.stack([steps, steps], axis=1), np.float32(1 - 2.0**-24))
    ones = np.ones(5_000, np.float32)
    token_ids = ops["choose"](logits, row_max, ones, -INF * ones, uniforms)
    assert (logits[np.arange(5_000), token_ids] > -INF).all()


@pytest.mark.parametrize(("vocab_size", "temperature", "threshold"), [(8, 1.0, -INF), (300, 0.7, -INF), (300, 1.3, 0.2)])
def test_choose_follows_the_distribution(vocab_size, temperature, threshold):
    """Chi-square over 200 000 draws with fixed uniforms: the same result whenever it runs."""
    draws = 200_000 // 8
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=vocab_size).astype(np.float32)
    probabilities = np.where(logits >= threshold, np.exp(logits.astype(np.float64) / temperature), 0.0)
    probabilities /= probabilities.sum()
    row = (jnp.full(draws, logits.max()), jnp.full(draws, temperature, jnp.float32), jnp.full(draws, threshold, jnp.float32))
    observed = np.zeros(vocab_size)
    for _ in range(8):
        uniforms = rng.integers(0, 1 << 24, (draws, 2)).astype(np.float32) * np.float32(2.0**-24)
        token_ids = ops["choose"](jnp.broadcast_to(logits, (draws, vocab_size)), *row, uniforms)
        observed += np.bincount(token_ids, minlength=vocab_size)
    possible = probabilities > 0
    assert observed[~possible].sum() == 0
    expected = probabilities[possible] * observed.sum()
    assert expected.min() > 5
    statistic = ((observed[possible] - expected) ** 2 / expected).sum()
    assert statistic < stats.chi2.ppf(0.999, possible.sum() - 1)


# top_tokens, log_sum_exp, token_ranks


@settings(max_examples=40, deadline=None)
@given(vocab_size=st.sampled_from([4, 640, 3000]), k=st.sampled_from([1, 4, 20]), **logits_arguments)
def test_top_tokens(seed, vocab_size, k, spread, grid, masked):
    k = min(k, vocab_size)
    logits = random_logits(seed, 5, vocab_size, spread, grid, masked)
    token_ids, values = top_tokens(logits, k)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(token_ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order, axis=1))


def test_all_tokens_in_order():
    token_ids, _ = top_tokens(FOUR, 4)
    assert token_ids.tolist() == [[1, 3, 2, 0]]


def test_log_sum_exp_and_ranks():
    np.testing.assert_allclose(ops["log_sum_exp"](FOUR), [0.0], atol=1e-6)
    logits = floats(1.0, 3.0, 3.0, 2.0)[None]
    assert [ops["token_ranks"](logits, logits[:, i]).item() for i in range(4)] == [4, 1, 1, 3]


# mask_tokens, apply_penalties


def test_mask_tokens():
    logits = jnp.arange(80, dtype=jnp.float32).reshape(2, 40)
    bits = jnp.asarray([[0, 0], [-(2**31) + 5, 128]], jnp.int32)  # tokens 0, 2, 31 and 39
    masked = ops["mask_tokens"](logits, jnp.asarray([1, 0]), bits, jnp.asarray([True, False]))
    assert np.flatnonzero(masked[0] > -INF).tolist() == [0, 2, 31, 39]
    np.testing.assert_array_equal(masked[0, [0, 2, 31, 39]], [0, 2, 31, 39])
    np.testing.assert_array_equal(masked[1], logits[1])


def test_apply_penalties():
    logits = jnp.asarray([[2.0, -1.0, 3.0, 0.5], [2.0, -1.0, 3.0, 0.5]], jnp.float32)
    prompt_bits = jnp.asarray([[0b0001], [0b1111]], jnp.int32)
    counts = jnp.asarray([[0, 3, 0, 0], [9, 9, 9, 9]], jnp.uint16)
    penalized = ops["apply_penalties"](
        logits,
        jnp.asarray([0, 1]),
        prompt_bits,
        counts,
        floats(2, 2),
        floats(0.5, 0.5),
        floats(0.25, 0.25),
        jnp.asarray([1, 0]) > 0,
    )
    # Token 0 is in the prompt: 2 / 2. Token 1 three times in the output: -1 * 2 - 3 * 0.5 - 0.25.
    np.testing.assert_allclose(penalized, [[1.0, -3.75, 3.0, 0.5], [2.0, -1.0, 3.0, 0.5]])


# rows are alone


def test_nan_rows_reach_no_other_row():
    rng = np.random.default_rng(0)
    clean = rng.normal(size=(6, 3000)).astype(np.float32) * 0.5
    dirty = clean.copy()
    dirty[[1, 4]] = np.nan
    good = np.array([0, 2, 3, 5])
    ones = np.ones(6, np.float32)

    def everything(logits):
        token_ids, row_max = ops["argmax"](logits)
        threshold = ops["thresholds"](
            logits, row_max, ones, np.array([0, 0, 5, 500, 0, 0], np.int32), ones * np.float32(0.9), 0 * ones
        )
        chosen = ops["choose"](logits, row_max, ones, threshold, np.full((6, 2), 0.4, np.float32))
        best_ids, best = top_tokens(logits, 5)
        assert ((chosen >= 0) & (chosen < 3000)).all()
        return (
            token_ids,
            row_max,
            threshold,
            chosen,
            best_ids,
            best,
            ops["log_sum_exp"](logits),
            ops["token_ranks"](logits, row_max),
        )

    for a, b in zip(everything(clean), everything(dirty), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[good], np.asarray(b)[good])


# callers' mistakes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, r, i: sampling.argmax(x[0]), "logits must be float32"),
        (lambda x, r, i: sampling.argmax(x.astype(jnp.bfloat16)), "logits must be float32"),
        (lambda x, r, i: sampling.thresholds(x, r, r, r, r, r), "top_k must be int32"),
        (lambda x, r, i: sampling.thresholds(x, r, r[:1], i, r, r), "temperature must be float32"),
        (lambda x, r, i: sampling.choose(x, r, r, r, r), r"uniforms must be float32 \[2, 2\]"),
        (lambda x, r, i: sampling.top_tokens(x, 0), "k must be in"),
        (lambda x, r, i: sampling.top_tokens(x, 5), "k must be in"),
        (lambda x, r, i: sampling.token_ranks(x, i), "token_logits must be float32"),
        (lambda x, r, i: sampling.mask_tokens(x, i, jnp.zeros((2, 2), jnp.int32), r > 0), r"bits must be int32 \[2, 1\]"),
        (
            lambda x, r, i: sampling.apply_penalties(x, i, jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 4)), r, r, r, r > 0),
            "output_counts must be uint16",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.zeros((2, 4)), jnp.ones(2), jnp.zeros(2, jnp.int32))
