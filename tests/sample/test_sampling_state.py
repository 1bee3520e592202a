"""The device rows: what is packed, written, gathered and updated."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.sample import sampler, state
from jaxllm.sampling_params import SamplingParams

gather = jax.jit(state.gather)
update = jax.jit(state.update, donate_argnums=0)
PENALTY = {"frequency_penalty": 0.5}


def packed(prompt=(0,), outputs=(), vocab_size=40, bad_words=(), stop_ids=(), **parameters):
    params = SamplingParams(**parameters)
    params.bad_words_token_ids = [list(word) for word in bad_words]
    params.all_stop_token_ids |= set(stop_ids)
    return state.pack_row(params, [*prompt, *outputs], len(prompt), vocab_size, seed=0)


def noted(rows, row_ids, positions, token_ids, valid=None):
    """The state after one update."""
    row_ids = jnp.asarray(row_ids, jnp.int32)
    valid = jnp.ones(len(row_ids), bool) if valid is None else jnp.asarray(valid)
    return update(rows, gather(rows, row_ids), jnp.asarray(positions), jnp.asarray(token_ids), valid)


def test_a_row_comes_back_as_it_was_written():
    rows = state.write_rows(
        state.init(3, 40),
        {
            2: packed(
                prompt=[1, 2, 3],
                temperature=0.5,
                top_p=0.25,
                top_k=7,
                min_p=0.125,
                repetition_penalty=1.5,
                frequency_penalty=-0.5,
                presence_penalty=2,
                seed=-2,
                min_tokens=4,
                stop_ids=[5, 6],
                logit_bias={1: 1.0},
                allowed_token_ids=[3, 39],
                bad_words=[[1, 2], [3]],
                logprobs=2,
                logprob_token_ids=[8, 9],
            )
        },
    )
    got = gather(rows, jnp.asarray([2]))
    assert {name: getattr(got, name).item() for name in state.ROW.names} == {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "frequency_penalty": -0.5,
        "presence_penalty": 2.0,
        "seed_high": 2**32 - 1,
        "seed_low": 2**32 - 2,
        "num_prompt_tokens": 3,
        "min_tokens": 4,
        "num_stop_ids": 2,
        "num_bias": 1,
        "num_bad_words": 2,
        "num_allowed": 2,
        "num_logprobs": 2,
        "num_logprob_ids": 2,
    }
    assert got.top_p.dtype == jnp.float32
    assert got.seed_low.dtype == jnp.uint32
    assert got.in_use.item()
    assert rows.stop_ids[2, :2].tolist() == [5, 6]
    assert (rows.bias_ids[2, 0].item(), rows.bias_values[2, 0].item()) == (1, 1.0)
    assert rows.allowed_bits[2].tolist() == [8, 128]
    assert rows.bad_words[2, :2, :3].tolist() == [[2, 1, -1], [3, -1, -1]]
    assert rows.prompt_bits[2].tolist() == [0b1110, 0]
    assert rows.logprob_ids[2, :2].tolist() == [8, 9]
    assert rows.logprob_ids[0].tolist() == [0] * 128


def test_padding_is_a_greedy_row_that_uses_nothing():
    rows = state.write_rows(state.init(2, 40), {i: packed(top_p=0.5, logit_bias={1: 2.0}, logprobs=1) for i in range(2)})
    got = gather(rows, jnp.asarray([-1, 0, 2, 10**6]))
    assert got.in_use.tolist() == [False, True, False, False]
    for name in state.ROW.names:
        neutral = 1.0 if name in ("top_p", "repetition_penalty") else -1 if name == "num_logprobs" else 0
        assert getattr(got, name)[jnp.asarray([0, 2, 3])].tolist() == [neutral] * 3


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.5},
        {"temperature": 0},
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.1},
        {"seed": 1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1, "stop_ids": [3]},
        {"logprobs": 0},
        {"logprob_token_ids": [1]},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1]},
        {"bad_words": [[1]]},
    ],
)
def test_every_parameter_changes_the_row(parameters):
    assert (packed(**parameters).scalars != packed().scalars).any()


def test_a_plain_request_sends_scalars_only():
    row = packed(top_p=0.9, top_k=50, min_p=0.1, seed=3, logprobs=5, min_tokens=3, prompt=range(30), outputs=[1, 2])
    assert row.tables == {}
    assert row.scalars.nbytes == 68


def test_no_limit_is_written_as_zero():
    column = state.ROW.names.index("top_k")
    for top_k in (-1, 0, 40, 10**12):
        assert packed(top_k=top_k).scalars[column] == 0
    assert packed(logprobs=-1).scalars[state.ROW.names.index("num_logprobs")] == 40


def test_requests_without_a_seed_take_the_one_given():
    own = state.pack_row(SamplingParams(seed=5), [0], 1, 40, seed=9)
    given = state.pack_row(SamplingParams(), [0], 1, 40, seed=5)
    assert (own.scalars == given.scalars).all()


def test_default_seed_is_fixed():
    assert state.default_seed(0, "7") == 16839738451538044384
    assert len({state.default_seed(engine, request) for engine in (0, 1) for request in ("1", "2", "11")}) == 6


def test_many_rows_in_one_call():
    rows = state.write_rows(
        state.init(100, 40), {i: packed(prompt=[0] * (i + 1), min_tokens=1, stop_ids=[i % 40]) for i in range(99)}
    )
    got = gather(rows, jnp.arange(100))
    assert got.num_prompt_tokens.tolist() == [*range(1, 100), 0]
    assert rows.stop_ids[:, 0].tolist() == [*(i % 40 for i in range(99)), 0]
    for wrong in (-1, 100):
        with pytest.raises(ValueError, match=r"row_id must be in \[0, 100\)"):
            state.write_rows(rows, {wrong: packed()})


def test_nothing_compiles_after_warm_up():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    rows = state.warm_up(state.init(7, 40))
    jax.block_until_ready(rows)
    assert compiled
    before = jax.tree.map(np.asarray, rows)
    compiled.clear()
    everything = {"logit_bias": {1: 1.0}, "allowed_token_ids": [1], "logprob_token_ids": [1], "min_tokens": 1, **PENALTY}
    rows = state.write_rows(rows, {i: packed(bad_words=[[1]], stop_ids=[1], outputs=[1], **everything) for i in range(5)})
    assert compiled == []
    for old, fresh in zip(jax.tree.leaves(before), jax.tree.leaves(state.init(7, 40)), strict=True):
        np.testing.assert_array_equal(old, fresh)


def test_bytes():
    rows = state.init(5, 1000)
    assert state.num_bytes(5, 1000) == sum(array.nbytes for array in jax.tree.leaves(rows))
    assert state.num_bytes(256, 49152) < 36e6
    assert state.num_bytes(1024, 128256) < 323e6


def test_update_counts_and_remembers():
    rows = state.write_rows(state.init(4, 40), {0: packed(**PENALTY), 2: packed(prompt=[1, 2], **PENALTY), 3: packed()})
    # Batch rows: request 2, padding, request 0 in a partial prefill, request 3 without penalties.
    rows = noted(rows, [2, 9, 0, 3], [2, 5, 1, 1], [39, 7, 8, 9], [True, True, False, True])
    rows = noted(rows, [2], [3], [39])
    assert {(r, t): c for (r, t), c in np.ndenumerate(rows.output_counts) if c} == {(2, 39): 2}
    assert rows.recent[2, :3].tolist() == [39, 39, 0]
    assert rows.recent[3, 0].item() == 9
    assert not rows.recent[:2].any()


def test_counts_stop_at_their_largest():
    rows = state.write_rows(state.init(1, 4), {0: packed(vocab_size=4, **PENALTY, outputs=[3] * 65534)})
    for _ in range(3):
        rows = noted(rows, [0], [70000], [3])
    assert rows.output_counts[0].tolist() == [0, 0, 0, 65535]
    assert packed(vocab_size=4, **PENALTY, outputs=[3] * 70000).tables["output_counts"].tolist() == [0, 0, 0, 65535]


@settings(max_examples=25, deadline=None)
@given(outputs=st.lists(st.integers(0, 39), max_size=70), split=st.integers(0, 70))
def test_a_resumed_request_is_as_if_never_interrupted(outputs, split):
    split = min(split, len(outputs))
    arguments = {"prompt": [1, 2, 3], "bad_words": [[1]], **PENALTY}
    rows = state.write_rows(state.init(2, 40), {0: packed(**arguments), 1: packed(outputs=outputs[:split], **arguments)})
    for index, token in enumerate(outputs):
        rows = noted(rows, [0, 1], [3 + index] * 2, [token] * 2, [True, index >= split])
    np.testing.assert_array_equal(rows.output_counts[0], np.bincount(outputs, minlength=40))
    np.testing.assert_array_equal(rows.output_counts[1], rows.output_counts[0])
    np.testing.assert_array_equal(rows.recent[1], rows.recent[0])
    np.testing.assert_array_equal(rows.prompt_bits[1], rows.prompt_bits[0])


def test_a_step_changes_the_rows_in_place():
    """Donated arrays come back as the same memory, and no table is copied for the branches that read it."""
    rows = jax.eval_shape(partial(state.init, 64, 4096))
    batch = jax.ShapeDtypeStruct((4,), jnp.int32)
    logits = jax.ShapeDtypeStruct((4, 4096), jnp.float32)

    def step(rows, logits, row_ids, positions):
        metadata = state.gather(rows, row_ids)
        output = sampler.sample(logits, metadata, positions, max_logprobs=5, logprobs_mode="raw_logprobs")
        return state.update(rows, metadata, positions, output.token_ids, row_ids >= 0), output

    memory = jax.jit(step, donate_argnums=0).lower(rows, logits, batch, batch).compile().memory_analysis()
    assert memory.alias_size_in_bytes == state.num_bytes(64, 4096)
    assert memory.temp_size_in_bytes < rows.output_counts.size * rows.output_counts.dtype.itemsize
