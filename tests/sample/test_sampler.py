"""The sampler: every parameter on a vocabulary of four by hand, then what holds whatever the parameters are."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxllm.sampling_params import SamplingParams

GREEDY = {"temperature": 0}
LOGITS = [1.0, 3.0, 2.0, -1.0]


# The greedy choice shows what each parameter does to the logits.


def test_greedy(sample_four):
    assert sample_four(LOGITS, **GREEDY) == 1
    assert sample_four([1.0, 2.0, 2.0, 0.0], **GREEDY) == 1
    assert sample_four([-np.inf, -np.inf, -5.0, -np.inf], **GREEDY) == 2


@pytest.mark.parametrize(("allowed", "token"), [([0, 3], 0), ([3], 3), ([2, 3, 0], 2), ([0, 1, 2, 3], 1)])
def test_allowed_token_ids(sample_four, allowed, token):
    assert sample_four(LOGITS, allowed_token_ids=allowed, **GREEDY) == token


@pytest.mark.parametrize(
    ("bias", "token"), [({0: 1.9}, 1), ({0: 2.1}, 0), ({1: -2.5}, 2), ({3: 100, 0: 50}, 3), ({1: -1.5, 2: -1}, 1)]
)
def test_logit_bias(sample_four, bias, token):
    assert sample_four(LOGITS, logit_bias=bias, **GREEDY) == token


def test_logit_bias_brings_back_nothing_that_is_not_allowed(sample_four):
    assert sample_four(LOGITS, allowed_token_ids=[0, 3], logit_bias={1: 100.0}, **GREEDY) == 0


@pytest.mark.parametrize(("num_outputs", "token"), [(0, 2), (1, 2), (2, 1), (5, 1)])
def test_min_tokens(sample_four, num_outputs, token):
    """Token 1 ends the output; the third token is the first that may."""
    assert sample_four(LOGITS, outputs=[0] * num_outputs, min_tokens=2, stop_token_ids=[1], **GREEDY) == token


def test_min_tokens_holds_back_eos_and_beats_logit_bias(sample_four):
    assert sample_four(LOGITS, min_tokens=2, stop_ids=[2], stop_token_ids=[1], **GREEDY) == 0
    assert sample_four(LOGITS, min_tokens=2, stop_token_ids=[1], logit_bias={1: 100.0}, **GREEDY) == 2


def test_min_tokens_gives_way_where_nothing_would_be_left(sample_four):
    assert sample_four(LOGITS, allowed_token_ids=[0, 3], min_tokens=2, stop_token_ids=[0, 3], **GREEDY) == 0


@pytest.mark.parametrize(
    ("prompt", "outputs", "penalty", "token"),
    [
        ([3], [], 2.0, 1),
        ([1], [], 1.4, 1),  # 3 / 1.4 > 2
        ([1], [], 1.6, 2),  # 3 / 1.6 < 2
        ([3], [1], 1.6, 2),
        ([1, 1, 1], [1], 1.4, 1),  # how often does not matter
        ([1], [2], 1.6, 1),  # 3 / 1.6 > 2 / 1.6 > 1
        ([1, 2], [], 4.0, 0),  # 3 / 4 < 1
        ([3], [0], 0.3, 0),  # 1 / 0.3 > 3
    ],
)
def test_repetition_penalty(sample_four, prompt, outputs, penalty, token):
    assert sample_four(LOGITS, prompt=prompt, outputs=outputs, repetition_penalty=penalty, **GREEDY) == token


def test_repetition_penalty_multiplies_negative_logits(sample_four):
    assert sample_four([-2.0, -1.0, -5.0, -5.0], prompt=[1], repetition_penalty=1.9, **GREEDY) == 1
    assert sample_four([-2.0, -1.0, -5.0, -5.0], prompt=[1], repetition_penalty=2.1, **GREEDY) == 0


@pytest.mark.parametrize(
    ("prompt", "outputs", "penalty", "token"),
    [
        ([1, 1, 1], [], 2.0, 1),  # the prompt does not count
        ([0], [1], 0.9, 1),
        ([0], [1, 1], 0.6, 2),  # 3 - 1.2 < 2
        ([0], [1, 2, 1], 0.6, 1),  # 3 - 1.2 > 2 - 0.6
        ([0], [0], -1.9, 1),
        ([0], [0, 0], -1.5, 0),  # 1 + 3 > 3
    ],
)
def test_frequency_penalty(sample_four, prompt, outputs, penalty, token):
    assert sample_four(LOGITS, prompt=prompt, outputs=outputs, frequency_penalty=penalty, **GREEDY) == token


@pytest.mark.parametrize(
    ("prompt", "outputs", "penalty", "token"),
    [
        ([1], [], 2.0, 1),
        ([0], [1], 0.9, 1),
        ([0], [1], 1.1, 2),
        ([0], [1, 1, 1], 0.9, 1),
        ([0], [1, 2], 1.5, 1),
        ([0], [0, 3], -1.9, 1),
    ],
)
def test_presence_penalty(sample_four, prompt, outputs, penalty, token):
    assert sample_four(LOGITS, prompt=prompt, outputs=outputs, presence_penalty=penalty, **GREEDY) == token


def test_repetition_comes_before_the_other_penalties(sample_four):
    # Token 1: 3 / 1.2 - 0.4 = 2.1. The other way round it would be 2.6 / 1.2 = 2.17; 2.13 of token 2 lies between.
    assert sample_four([0, 3.0, 2.13, 0], outputs=[1], repetition_penalty=1.2, frequency_penalty=0.4, **GREEDY) == 2


def test_logit_bias_comes_before_penalties(sample_four):
    # Token 0: (1 + 3) / 1.25 = 3.2 > 3. The other way round it would be 3.8, above token 1's 3.5.
    assert sample_four([1.0, 3.5, 0, 0], prompt=[0], logit_bias={0: 3.0}, repetition_penalty=1.25, **GREEDY) == 1


@pytest.mark.parametrize(
    ("outputs", "words", "token"),
    [
        ([], [[1]], 2),
        ([], [[1], [2]], 0),
        ([], [[0, 1]], 1),
        ([0], [[0, 1]], 2),
        ([0, 2], [[0, 1]], 1),
        ([2, 0], [[2, 0, 1]], 2),
        ([0], [[2, 0, 1]], 1),
        ([2, 0, 3], [[2, 0, 1], [0, 3, 2], [3, 1]], 0),
        ([0] * 40, [[0] * 31 + [1]], 2),
        ([0] * 31, [[0] * 31 + [1]], 2),
        ([0] * 30, [[0] * 31 + [1]], 1),
        ([3] + [0] * 30, [[0] * 31 + [1]], 1),
        ([], [[0], [1], [2], [3]], 1),  # nothing would be left
    ],
)
def test_bad_words(sample_four, outputs, words, token):
    """The prompt ends with 0, which is no part of the output."""
    assert sample_four(LOGITS, prompt=[0, 0], outputs=outputs, bad_words=words, **GREEDY) == token


# What the random choice can take shows top-k, top-p, min-p and temperature.

FOUR = np.log(np.array([0.1, 0.4, 0.2, 0.3]))


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 0.69}, {1, 3}),
        ({"top_p": 0.71}, {1, 2, 3}),
        ({"min_p": 0.51}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"temperature": 2.0, "top_p": 0.62}, {1, 2, 3}),  # as 1 : 2 : 1.41 : 1.73
        ({"temperature": 0.5, "top_p": 0.6}, {1, 3}),  # as 1 : 16 : 4 : 9
        ({"temperature": 0.01}, {1}),
        ({"top_k": 2, "top_p": 0.56}, {1}),
        ({"top_k": 2, "logit_bias": {0: 1.5}}, {0, 1}),
        ({"allowed_token_ids": [0, 2]}, {0, 2}),
        ({"presence_penalty": 2.0, "top_k": 2}, {2, 3}),  # token 1 is in the output
        ({"bad_words": [[1]], "top_p": 0.4}, {3}),  # 0.3 of 0.6
    ],
)
def test_what_can_be_drawn(four_token_batch, parameters, tokens):
    assert set(four_token_batch(FOUR, parameters, outputs=[1])) == tokens


@pytest.fixture(scope="module")
def batch_engine(make_engine):
    return make_engine(max_num_seqs=200, vocab_size=4)


@pytest.fixture
def four_token_batch(batch_engine):
    """200 requests that differ in their seed only → their tokens."""

    def run(logits, parameters, outputs):
        parameters = dict(parameters)
        words = parameters.pop("bad_words", [])
        params = SamplingParams(**parameters)
        params.bad_words_token_ids = words
        for row in range(200):
            batch_engine.add(row, params, [0], outputs, seed=row)
        return batch_engine.step(np.tile(logits, (200, 1)), range(200), [1 + len(outputs)] * 200).token_ids.tolist()

    return run


# The distribution


@pytest.mark.parametrize("parameters", [{"temperature": 0.8}, {"top_k": 3, "temperature": 1.5}, {"top_p": 0.8, "min_p": 0.3}])
def test_tokens_follow_the_distribution(batch_engine, parameters):
    """100 positions of 200 seeds: always the same draws, so the same result whenever it runs."""
    probabilities = np.array([0.1, 0.3, 0.25, 0.35])
    weights = probabilities ** (1 / parameters.get("temperature", 1.0))
    if "top_k" in parameters:
        weights[0] = 0
    if "top_p" in parameters:
        weights[0] = 0  # min_p drops 0.1 beside 0.35; 0.35 + 0.3 is 72 % of the rest, so 0.25 stays
    params = SamplingParams(**parameters)
    for row in range(200):
        batch_engine.add(row, params, seed=1000 + row)
    logits = np.tile(np.log(probabilities), (200, 1))
    tokens = np.stack([batch_engine.step(logits, range(200), [p] * 200).token_ids for p in range(1, 101)])
    expected = weights / weights.sum() * tokens.size
    observed = np.bincount(tokens.ravel(), minlength=4)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < stats.chi2.ppf(0.999, possible.sum() - 1)
    # Neighbouring positions of a request and neighbouring seeds are independent: equal as often as chance has it.
    same = (weights / weights.sum()) @ (weights / weights.sum())
    for a, b in ((tokens[1:], tokens[:-1]), (tokens[:, 1:], tokens[:, :-1])):
        assert abs((a == b).mean() - same) < 4 * np.sqrt(same * (1 - same) / a.size)


# A request's tokens depend on nothing but the request.

MIX = [
    {},
    {"temperature": 0},
    {"top_k": 5, "seed": 3},
    {"top_p": 0.9, "temperature": 1.3},
    {"min_p": 0.1, "seed": -7},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2},
    {"logit_bias": {3: 2.0, 17: -5.0}},
    {"allowed_token_ids": [1, 2, 3, 30, 35]},
    {"min_tokens": 4, "stop_token_ids": [2, 9]},
    {"logprobs": 3, "top_p": 0.5},
    {"temperature": 0, "logprob_token_ids": [4, 5]},
    {"bad_words": [[1], [2, 3]]},
]


def make_params(parameters):
    parameters = dict(parameters)
    words = parameters.pop("bad_words", [])
    params = SamplingParams(**parameters)
    params.bad_words_token_ids = words
    return params


def model(history):
    """Logits that depend on all of a request's tokens."""
    return np.random.default_rng(history).normal(size=40).astype(np.float32) * 2


def generate(engine, requests, steps, rng=None, num_padding=0):
    """Run requests together; with `rng`, each step takes some of them, in any order, with garbage in padding rows between."""
    requests = {name: list(tokens) for name, tokens in requests.items()}
    goal = {name: len(tokens) + steps for name, tokens in requests.items()}
    while unfinished := [name for name in requests if len(requests[name]) < goal[name]]:
        chosen = unfinished
        if rng is not None:
            chosen = list(rng.permutation(unfinished))[: rng.integers(1, len(unfinished) + 1)]
        size = len(requests) + num_padding
        places = sorted(rng.permutation(size)[: len(chosen)]) if rng is not None else range(len(chosen))
        logits = np.full((size, 40), np.nan, np.float32)
        row_ids = np.full(size, 10**6)
        positions = np.full(size, 77)
        for place, name in zip(places, chosen, strict=True):
            logits[place], row_ids[place], positions[place] = model(requests[name]), name, len(requests[name])
        valid = row_ids < 10**6
        output = engine.step(logits, row_ids, positions, valid)
        assert ((output.token_ids >= 0) & (output.token_ids < 40)).all()
        for place, name in zip(places, chosen, strict=True):
            assert np.isfinite(output.logprobs.logprobs[place]).all()
            requests[name].append(output.token_ids[place].item())
    return requests


@pytest.fixture(scope="module")
def alone(make_engine):
    """What each request of MIX says when nobody else is there."""
    engine, said = make_engine(max_num_seqs=1, vocab_size=40), []
    for number, parameters in enumerate(MIX):
        engine.add(0, make_params(parameters), [1, 2, number], seed=number)
        said.append(generate(engine, {0: [1, 2, number]}, 12)[0])
    return said


@pytest.fixture(scope="module")
def crowd(make_engine):
    return make_engine(max_num_seqs=16, vocab_size=40)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_tokens_do_not_depend_on_neighbours_rows_or_padding(alone, crowd, seed):
    """All requests at once in rows that others have used, some of them resumed half way, in steps of any composition."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(16)[: len(MIX)].tolist()
    start = rng.integers(0, 12, len(MIX))
    requests = {}
    for number, (row, parameters) in enumerate(zip(rows, MIX, strict=True)):
        said = alone[number]
        requests[row] = said[: 3 + start[number]]
        crowd.add(row, make_params(parameters), said[:3], requests[row][3:], seed=number)
    for number, (row, tokens) in enumerate(generate(crowd, requests, 12, rng, num_padding=5).items()):
        assert rows[number] == row
        shared = len(alone[number])
        assert tokens[:shared] == alone[number]


def test_seeds_matter_and_repeat(batch_engine):
    for row in range(200):
        batch_engine.add(row, SamplingParams(seed=row % 50))
    said = np.stack([batch_engine.step(np.zeros((200, 4)), range(200), [p] * 200).token_ids for p in range(1, 21)])
    np.testing.assert_array_equal(said[:, :50], said[:, 50:100])
    assert len(set(map(tuple, said.T.tolist()))) == 50


def test_a_partial_prefill_changes_nothing(four_token_engine):
    engine = four_token_engine
    engine.add(0, SamplingParams(temperature=0, presence_penalty=2.0), [0, 0, 0])
    engine.step([LOGITS], [0], [2], [False])
    assert engine.step([LOGITS], [0], [3]).token_ids.item() == 1
    assert engine.step([LOGITS], [0], [4]).token_ids.item() == 2


def test_nothing_recompiles(crowd):
    """Requests of every kind come and go; the step and the writes have been compiled once."""
    compiled = []
    everything = {name: value for parameters in MIX for name, value in parameters.items() if name != "logprobs"}
    crowd.add(0, make_params({**everything, "temperature": 1.0}), [1], [2])
    size = len(MIX) + 5
    crowd.step(np.zeros((size, 40)), [0] * size, [5] * size)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    rng = np.random.default_rng(0)
    for step in range(40):
        crowd.add(step % 16, make_params(MIX[step % len(MIX)]), [1, 2], [3] * (step % 3), seed=step)
        crowd.step(rng.normal(size=(size, 40)), rng.permutation(size), rng.integers(2, 9, size))
    assert compiled == []


SHARDED = """
import jax, numpy as np
from functools import partial
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxllm.sample import sampler, state
from jaxllm.sampling_params import SamplingParams

V, wide = 12288, []
mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
logits = np.random.default_rng(0).normal(size=(6, V)).astype(np.float32) * 3
params = [
    SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=7, logprobs=3), SamplingParams(top_p=0.999),
    SamplingParams(repetition_penalty=1.2, min_p=0.01), SamplingParams(logit_bias={5: 9.0}, allowed_token_ids=[5, 9000]),
]

def run(rows_on, logits_on):
    rows = state.init(6, V, rows_on)
    rows = state.write_rows(rows, {i: state.pack_row(p, [1, 2], 2, V, seed=i) for i, p in enumerate(params)})

    @partial(jax.jit, donate_argnums=0)
    def step(rows, logits, row_ids, positions):
        metadata = state.gather(rows, row_ids)
        output = sampler.sample(logits, metadata, positions, max_logprobs=5, logprobs_mode="raw_logprobs")
        return state.update(rows, metadata, positions, output.token_ids, row_ids >= 0), output

    batch = (jax.device_put(logits, logits_on), np.arange(6, dtype=np.int32), np.full(6, 2, np.int32))
    compiled = step.lower(rows, *batch).compile()
    return jax.tree.leaves(compiled(rows, *batch)[1]), compiled.as_text()

whole, _ = run(None, None)
parts, text = run(NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "tp")))
for a, b in zip(whole, parts, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
gathered = [line.split("=")[1].split()[0] for line in text.splitlines() if " all-gather(" in line]
print(gathered)
assert gathered and not any(f",{V}]" in shape for shape in gathered), gathered
"""


def test_logits_sharded_over_the_vocabulary():
    """The same tokens on four devices, and the logits are never gathered."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SHARDED], cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
