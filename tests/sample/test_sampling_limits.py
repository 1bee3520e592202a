"""What is refused because the device rows could not hold it, or the vocabulary has no such token."""

import subprocess
import sys

import pytest

from jaxllm.sample.limits import check_sampling_limits
from jaxllm.sampling_params import SamplingParams


def check(vocab_size=2000, max_logprobs=20, bad_words=(), stop_ids=(), **parameters):
    params = SamplingParams(**parameters)
    params.bad_words_token_ids = [list(word) for word in bad_words]
    params.all_stop_token_ids |= set(stop_ids)
    check_sampling_limits(params, vocab_size, max_logprobs)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"logit_bias": dict.fromkeys(range(1024), 1.0)},
        {"bad_words": [[1]] * 128},
        {"bad_words": [list(range(32))]},
        {"stop_ids": range(128), "min_tokens": 1},
        {"stop_ids": range(500)},
        {"logprobs": 20, "prompt_logprobs": 0},
        {"logprobs": 30, "logprob_token_ids": list(range(30))},
        {"logprobs": -1, "prompt_logprobs": 2000, "max_logprobs": -1},
        {"allowed_token_ids": list(range(2000))},
    ],
)
def test_within(arguments):
    check(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias may hold at most 1024 tokens, got 1025"),
        ({"bad_words": [[1]] * 129}, "bad_words may hold at most 128 token sequences, got 129"),
        ({"bad_words": [[1] * 33]}, "bad_words may hold at most 32 tokens in a word, got 33"),
        ({"bad_words": [[]]}, "bad_words holds a word without tokens"),
        ({"stop_ids": range(129), "min_tokens": 1}, "stop_token_ids may hold at most 128 tokens"),
        ({"logprobs": 21}, "logprobs must be at most 20 .*got 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be at most 20"),
        ({"logprobs": -1}, "logprobs can be -1 only with max_logprobs -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs can be -1 only"),
        ({"logprobs": 2001, "max_logprobs": -1}, "logprobs must be at most 2000"),
        ({"stop_token_ids": [2000]}, "stop_token_ids holds token id 2000, which is not in the vocabulary of 2000"),
        ({"stop_ids": [2000], "min_tokens": 1}, "all_stop_token_ids holds token id 2000"),
        ({"logit_bias": {2000: 1.0}}, "logit_bias holds token id 2000"),
        ({"allowed_token_ids": [1, 2000]}, "allowed_token_ids holds token id 2000"),
        ({"logprob_token_ids": [2000]}, "logprob_token_ids holds token id 2000"),
        ({"prompt_logprob_token_ids": [2000]}, "prompt_logprob_token_ids holds token id 2000"),
        ({"bad_words": [[5, 2000]]}, "bad_words holds token id 2000"),
    ],
)
def test_beyond(arguments, message):
    with pytest.raises(ValueError, match=message):
        check(**arguments)


def test_the_check_imports_no_jax():
    code = "import sys, jaxllm.sample.limits; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
