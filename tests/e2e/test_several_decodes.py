"""Several decodes a dispatch, on the devices: the same tokens and log probabilities, ends found there, nothing compiled late."""

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams

RNG = np.random.default_rng(3)
PROMPTS = [{"prompt_token_ids": [int(token) for token in RNG.integers(3, 320, 1 + 3 * i)]} for i in range(8)]


@pytest.fixture(scope="module")
def one(make_tiny) -> LLM:
    return make_tiny(max_num_seqs=8, async_scheduling=False)


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def many(request, make_tiny) -> LLM:
    return make_tiny(max_num_seqs=8, async_scheduling=request.param, num_decode_steps=5)


def buckets_used(llm: LLM) -> list[str]:
    """Names of the buckets that steps run in from now on."""
    runner, used = llm.engine.engine_core.engine_core.executor.worker.runner, []
    original = type(runner)._run
    runner._run = lambda bucket, vector: used.append(str(bucket)) or original(runner, bucket, vector)
    return used


def run(llm: LLM, params: list[SamplingParams]) -> list[tuple]:
    llm.reset_prefix_cache()
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [(list(out.token_ids), out.finish_reason, out.stop_reason, out.logprobs) for out in outputs]


def test_fewer_dispatches(one, many):
    params = [SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, detokenize=False)] * 8
    expected = run(one, params)
    used = buckets_used(many)
    assert run(many, params) == expected
    # The prompts are computed in two steps; then 20 tokens are still to come, or 19 where the prompt was in the first.
    assert used.count("decode 8 x 5") >= 4
    assert len(used) <= 8


def test_ends_and_log_probabilities(one, many):
    """Every request ends at another place: by one of many stop ids, or by its own limit; and asks for other log probabilities."""
    params = [
        SamplingParams(
            temperature=[0.0, 1.5][i % 2],
            seed=i,
            max_tokens=3 + 4 * i,
            min_tokens=[0, 2][i % 2],
            stop_token_ids=list(range(3 + i, 320, 24)),
            logprobs=[None, 0, 3][i % 3],
            frequency_penalty=[0.0, 0.3][i // 4],
            detokenize=False,
        )
        for i in range(8)
    ]
    expected = run(one, params)
    used = buckets_used(many)
    got = run(many, params)
    assert "decode 8 x 5" in used
    assert {reason for _, reason, _, _ in expected} == {"stop", "length"}
    assert len({len(tokens) for tokens, *_ in expected}) > 4
    for mine, theirs in zip(got, expected, strict=True):
        assert mine[:3] == theirs[:3]
        assert (mine[3] is None) == (theirs[3] is None)
        if theirs[3] is not None:
            assert [list(position) for position in mine[3]] == [list(position) for position in theirs[3]]
            values = [[lp.logprob for lp in position.values()] for position in mine[3]]
            assert np.allclose(np.concatenate(values), [lp.logprob for p in theirs[3] for lp in p.values()], atol=1e-5)
            assert [[lp.rank for lp in p.values()] for p in mine[3]] == [[lp.rank for lp in p.values()] for p in theirs[3]]


def test_aborted_amid_a_dispatch(one, many):
    """Its row and blocks go to others at once, while the devices may still write to them."""
    params = [SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)] * 8
    expected = run(one, params)
    many.reset_prefix_cache()
    engine = many.engine
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"old {i}", prompt, params[0])
    for _ in range(3):
        engine.step()
    engine.abort_request([f"old {i}" for i in range(8)])
    assert run(many, params) == expected
    many.engine.engine_core.engine_core.scheduler.check_integrity()


def test_a_prefix_of_decoded_tokens_is_hit(many):
    params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, detokenize=False)
    many.reset_prefix_cache()
    (first,) = many.generate([PROMPTS[2]], params, use_tqdm=False)
    prompt = PROMPTS[2]["prompt_token_ids"] + list(first.outputs[0].token_ids)
    (again,) = many.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    # 7 + 18 tokens, the last one sampled but not computed, in blocks of 4.
    assert again.num_cached_tokens == 24
    many.reset_prefix_cache()
    (whole,) = many.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert whole.num_cached_tokens == 0
    assert list(whole.outputs[0].token_ids) == list(again.outputs[0].token_ids)


def test_all_log_probabilities_are_refused(make_tiny):
    with pytest.raises(ValueError, match=r"num_decode_steps 2 needs room .* max_logprobs must not be -1"):
        make_tiny(num_decode_steps=2, max_logprobs=-1)


def test_nothing_was_compiled_late(many):
    assert many.collective_rpc("num_compiles_after_warm_up") == [0]
