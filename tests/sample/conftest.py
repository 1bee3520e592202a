"""A batch through the device rows and the sampler, as the engine's step does it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sample import sampler, state
from jaxllm.sampling_params import SamplingParams


class Engine:
    """Device rows for requests, and one jitted step: gather, sample, update."""

    def __init__(self, max_num_seqs, vocab_size, max_logprobs=20, logprobs_mode="raw_logprobs"):
        self.vocab_size = vocab_size
        self.state = state.init(max_num_seqs, vocab_size)

        @partial(jax.jit, donate_argnums=0)
        def step(rows, logits, row_ids, positions, valid):
            metadata = state.gather(rows, row_ids)
            output = sampler.sample(logits, metadata, positions, max_logprobs=max_logprobs, logprobs_mode=logprobs_mode)
            return state.update(rows, metadata, positions, output.token_ids, valid), output

        self._step = step

    def add(self, row_id, params, prompt=(0,), outputs=(), seed=0):
        row = state.pack_row(params, [*prompt, *outputs], len(prompt), self.vocab_size, seed)
        self.state = state.write_rows(self.state, {row_id: row})

    def step(self, logits, row_ids, positions, valid=None):
        self.state, output = self._step(
            self.state,
            jnp.asarray(logits, jnp.float32),
            jnp.asarray(row_ids, jnp.int32),
            jnp.asarray(positions, jnp.int32),
            jnp.ones(len(row_ids), bool) if valid is None else jnp.asarray(valid),
        )
        return jax.tree.map(np.asarray, output)


@pytest.fixture(scope="session")
def four_token_engine():
    """Vocabulary of four, one row; shared, so that it compiles once. Each use writes its own row."""
    return Engine(max_num_seqs=1, vocab_size=4)


@pytest.fixture
def sample_four(four_token_engine):
    """sample_four(logits, prompt=…, outputs=…, **parameters) → the token id that follows."""

    def run(logits, prompt=(0,), outputs=(), bad_words=(), stop_ids=(), **parameters):
        params = SamplingParams(**parameters)
        params.bad_words_token_ids = [list(word) for word in bad_words]
        params.all_stop_token_ids |= set(stop_ids)
        four_token_engine.add(0, params, prompt, outputs)
        return four_token_engine.step([logits], [0], [len(prompt) + len(outputs)]).token_ids.item()

    return run


@pytest.fixture(scope="session")
def make_engine():
    return Engine
