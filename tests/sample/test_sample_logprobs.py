"""Log probabilities: the modes, the columns, and what each request gets of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.core.output import LogprobsLists
from jaxllm.sample import logprobs
from jaxllm.sampling_params import SamplingParams

PROBABILITIES = np.array([0.1, 0.4, 0.2, 0.3])
LOGITS = (np.log(PROBABILITIES) + 5.0).astype(np.float32)
LOG = np.log(PROBABILITIES)


@pytest.fixture(scope="module", params=["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def mode_engine(request, make_engine):
    return request.param, make_engine(max_num_seqs=2, vocab_size=4, max_logprobs=3, logprobs_mode=request.param)


def test_greedy_row_in_each_mode(mode_engine):
    """Token 1's logit is halved by the penalty, to 2.04: token 3, at 3.80, is taken."""
    mode, engine = mode_engine
    engine.add(0, SamplingParams(temperature=0, repetition_penalty=2.0, logprobs=3), [1])
    got = engine.step([LOGITS], [0], [1])
    assert got.token_ids.tolist() == [3]
    shown = LOGITS.astype(np.float64).copy()
    if mode.startswith("processed"):
        shown[1] /= 2
    order = np.argsort(-shown)
    if mode.endswith("logprobs"):
        shown -= np.log(np.exp(shown).sum())
    assert got.logprobs.token_ids.tolist() == [[3, *order[:3]]]
    np.testing.assert_allclose(got.logprobs.logprobs[0], shown[[3, *order[:3]]], rtol=1e-5)
    assert got.logprobs.ranks.tolist() == [1 if mode.startswith("processed") else 2]


def test_random_row_in_each_mode(mode_engine):
    """At temperature 0.5 with top_k 2 the choice is between tokens 1 and 3, as 16 to 9."""
    mode, engine = mode_engine
    engine.add(0, SamplingParams(temperature=0.5, top_k=2, logprobs=3), [0])
    got = engine.step([LOGITS], [0], [1])
    token = got.token_ids.item()
    assert token in (1, 3)
    expected = {
        "raw_logprobs": LOG,
        "processed_logprobs": [-np.inf, np.log(16 / 25), -np.inf, np.log(9 / 25)],
        "raw_logits": LOGITS,
        "processed_logits": [-np.inf, 2 * LOGITS[1], -np.inf, 2 * LOGITS[3]],
    }[mode]
    assert got.logprobs.token_ids[0, :3].tolist() == [token, 1, 3]
    np.testing.assert_allclose(got.logprobs.logprobs[0, :3], np.asarray(expected)[[token, 1, 3]], rtol=1e-5)
    assert got.logprobs.ranks.item() == (1 if token == 1 else 2)


def test_nobody_asks_and_one_asks(mode_engine):
    _, engine = mode_engine
    engine.add(0, SamplingParams(temperature=0), [0])
    engine.add(1, SamplingParams(temperature=0, logprobs=0), [0])
    quiet = engine.step([LOGITS], [0], [1]).logprobs
    assert not any(array.any() for array in jax.tree.leaves(quiet))
    assert engine.step([LOGITS], [1], [1]).logprobs.ranks.tolist() == [1]


def test_named_tokens(make_engine):
    engine = make_engine(max_num_seqs=2, vocab_size=4, max_logprobs=0)
    params = SamplingParams(temperature=0, logprob_token_ids=[2, 0])
    engine.add(0, params, [0])
    engine.add(1, SamplingParams(temperature=0, logprobs=0), [0])
    got = engine.step([LOGITS, LOGITS], [0, 1], [1, 1])
    assert got.logprobs.extra.shape == (2, 128)
    lists = logprobs.sampled_logprobs(got.logprobs, 0, params)
    assert lists.token_ids.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(lists.logprobs, [LOG[[1, 2, 0]]], rtol=1e-5)
    assert lists.ranks.tolist() == [1]


def test_whole_vocabulary(make_engine):
    engine = make_engine(max_num_seqs=1, vocab_size=4, max_logprobs=-1)
    params = SamplingParams(temperature=0, logprobs=-1)
    engine.add(0, params, [0])
    lists = logprobs.sampled_logprobs(engine.step([LOGITS], [0], [1]).logprobs, 0, params)
    assert lists.token_ids.tolist() == [[1, 1, 3, 2, 0]]
    np.testing.assert_allclose(lists.logprobs, [LOG[[1, 1, 3, 2, 0]]], rtol=1e-5)


@pytest.mark.parametrize(("max_logprobs", "vocab_size", "columns"), [(20, 100, 20), (20, 4, 4), (0, 4, 0), (-1, 7, 7)])
def test_num_columns(max_logprobs, vocab_size, columns):
    assert logprobs.num_columns(max_logprobs, vocab_size) == columns


prompt_logprobs = jax.jit(logprobs.prompt_logprobs, static_argnums=(2, 3))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_prompt_logprobs(mode):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 50)).astype(np.float32)
    targets = np.array([7, 0, 49], np.int32)
    got = jax.tree.map(np.asarray, prompt_logprobs(logits, targets, 4, mode))
    values = logits.astype(np.float64)
    if mode.endswith("logprobs"):
        values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    order = np.argsort(-values, axis=1)
    ids = np.concatenate([targets[:, None], order[:, :4]], axis=1)
    np.testing.assert_array_equal(got.token_ids, ids)
    np.testing.assert_allclose(got.logprobs, np.take_along_axis(values, ids, axis=1), rtol=1e-4, atol=1e-5)
    own = np.take_along_axis(values, targets[:, None], axis=1)
    np.testing.assert_array_equal(got.ranks, 1 + (values > own).sum(axis=1))
    assert not got.extra.any()


def test_prompt_logprobs_of_named_tokens():
    named = np.zeros(128, np.int32)
    named[:2] = [3, 0]
    got = prompt_logprobs(np.tile(LOGITS, (2, 1)), np.array([1, 2], np.int32), 0, "raw_logprobs", jnp.asarray(named))
    lists = logprobs.to_lists(jax.tree.map(np.asarray, got), slice(0, 2), 0, [3, 0])
    assert lists.token_ids.tolist() == [[1, 3, 0], [2, 3, 0]]
    np.testing.assert_allclose(lists.logprobs, [LOG[[1, 3, 0]], LOG[[2, 3, 0]]], rtol=1e-5)
    assert lists.ranks.tolist() == [1, 3]


def arrays():
    return logprobs.LogprobsArrays(
        token_ids=np.array([[5, 1, 2], [6, 3, 4]], np.int32),
        logprobs=np.array([[-5, -1, -2], [-6, -3, -4]], np.float32),
        ranks=np.array([9, 8], np.int32),
        extra=np.zeros((2, 128), np.float32),
    )


def test_a_request_gets_the_columns_it_asked_for():
    assert logprobs.sampled_logprobs(arrays(), 1, SamplingParams()) is None
    none, one, both = (logprobs.sampled_logprobs(arrays(), 1, SamplingParams(logprobs=k)) for k in (0, 1, 2))
    assert [lists.token_ids.tolist() for lists in (none, one, both)] == [[[6]], [[6, 3]], [[6, 3, 4]]]
    assert (one.logprobs.tolist(), one.ranks.tolist()) == ([[-6, -3]], [8])
    with pytest.raises(ValueError, match="num_best must be at most 2, got 3"):
        logprobs.to_lists(arrays(), slice(0, 1), 3)


def test_concatenate_fills_up():
    joined = logprobs.concatenate([logprobs.to_lists(arrays(), slice(0, 2), k) for k in (0, 2)])
    assert isinstance(joined, LogprobsLists)
    assert joined.token_ids.tolist() == [[5, -1, -1], [6, -1, -1], [5, 1, 2], [6, 3, 4]]
    assert joined.logprobs.tolist() == [[-5, -np.inf, -np.inf], [-6, -np.inf, -np.inf], [-5, -1, -2], [-6, -3, -4]]
    assert joined.ranks.tolist() == [9, 8, 9, 8]
    assert (joined.token_ids.dtype, joined.logprobs.dtype, joined.ranks.dtype) == (np.int32, np.float32, np.int32)
