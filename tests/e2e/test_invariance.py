"""A request's tokens depend on the request alone: not on its neighbours, the chunks of its prompt, the prefix cache, preemption,
the bucket, or what lies in padding and free blocks. Float32, greedy and seeded."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams

RNG = np.random.default_rng(7)
NUM_REQUESTS = 32


def make_params(i: int) -> SamplingParams:
    """Greedy, seeded and with every kind of change to the logits, in turn."""
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": i},
        {"temperature": 0.8, "top_p": 0.9, "seed": i},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "seed": i},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
        {"temperature": 0.7, "seed": i, "logit_bias": {5: 2.0, 6: -3.0}, "min_tokens": 6, "stop_token_ids": [9]},
        {"temperature": 1.0, "seed": i, "allowed_token_ids": list(range(10, 60))},
    ]
    return SamplingParams(max_tokens=6 + i % 11, ignore_eos=True, detokenize=False, **options[i % len(options)])


def make_prompt(i: int) -> list[int]:
    """Half of them share a long beginning."""
    shared = list(range(100, 100 + 21)) if i % 2 else []
    return shared + [int(token) for token in RNG.integers(3, 320, 1 + (i * 5) % 37)]


REQUESTS = [(make_prompt(i), make_params(i)) for i in range(NUM_REQUESTS)]


def run(llm: LLM, which=range(NUM_REQUESTS)) -> list[list[int]]:
    prompts = [{"prompt_token_ids": REQUESTS[i][0]} for i in which]
    outputs = llm.generate(prompts, [REQUESTS[i][1] for i in which], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(
    scope="module", params=[(True, 1), (False, 1), (True, 4), (False, 4)], ids=["async", "sync", "async-x4", "sync-x4"]
)
def make(request, make_tiny):
    """Make engines, with asynchronous scheduling and without, of one token a dispatch and of several."""
    is_async, num_steps = request.param
    return partial(make_tiny, async_scheduling=is_async, num_decode_steps=num_steps)


@pytest.fixture(scope="module")
def alone(make_tiny) -> list[list[int]]:
    """Each request by itself, its prompt in one piece, nothing cached."""
    llm = make_tiny(enable_prefix_caching=False, async_scheduling=False)
    return [run(llm, [i])[0] for i in range(NUM_REQUESTS)]


def runner_of(llm: LLM):
    """The model runner of an engine in this process."""
    return llm.engine.engine_core.engine_core.executor.worker.runner


def num_preemptions(llm: LLM) -> int:
    return next(int(metric.value) for metric in llm.get_metrics() if metric.name.endswith("num_preemptions"))


def test_the_outputs_differ(alone):
    assert len({tuple(tokens) for tokens in alone}) == NUM_REQUESTS
    assert len({token for tokens in alone for token in tokens}) > 60


def test_in_a_batch(make, alone):
    assert run(make(enable_prefix_caching=False)) == alone


@pytest.mark.parametrize("budget", [8, 13, 32])
def test_chunked(make, alone, budget):
    assert run(make(max_num_batched_tokens=budget, max_num_seqs=8)) == alone


def test_with_the_prefix_cached(make, alone):
    llm = make()
    assert run(llm) == alone
    assert run(llm) == alone
    cached = [output.num_cached_tokens for output in llm.generate([{"prompt_token_ids": REQUESTS[1][0]}], use_tqdm=False)]
    assert cached[0] >= 20


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_and_resumed(make, alone, caching):
    llm = make(num_gpu_blocks_override=66, enable_prefix_caching=caching, max_num_seqs=16)
    assert run(llm) == alone
    assert num_preemptions(llm) > 0


def test_in_every_bucket(make, alone):
    llm = make(
        enable_prefix_caching=False,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        cudagraph_capture_sizes=[1, 2, 5],
        compile_sizes=[24, 50],
        background_compilation=False,
    )
    runner, used = runner_of(llm), set()
    original = runner._run
    runner._run = lambda bucket, vector: used.add(bucket) or original(bucket, vector)
    for size in (1, 2, 3, 5, 9, 16):
        for start in range(0, NUM_REQUESTS - size + 1, size):
            which = range(start, start + size)
            assert run(llm, which) == [alone[i] for i in which]
    # Where several decodes go into one dispatch, the buckets of single ones are for the rare step between.
    assert used >= {*(runner.buckets.multi_step or runner.buckets.decode), *runner.buckets.mixed}


def test_garbage_in_padding_and_free_blocks(make, alone):
    llm = make()
    runner = runner_of(llm)
    # What no request has written must not be read: blocks, rows and padding are full of the worst values.
    runner.kv_caches = tuple(jnp.full_like(cache, jnp.nan) for cache in runner.kv_caches)
    filled = jax.tree.map(lambda leaf: jnp.full_like(leaf, 311), runner.state.sampling)
    runner.state = type(runner.state)(
        last_tokens=jnp.full_like(runner.state.last_tokens, 313),
        block_tables=jnp.full_like(runner.state.block_tables, 7),
        end_ids=jnp.full_like(runner.state.end_ids, 9),
        sampling=filled,
    )
    original = runner._run

    def run_with_garbage(bucket, vector):
        num_tokens = int(vector[runner.layout(bucket)._places["query_start_loc"]][-1])
        vector[runner.layout(bucket)._places["token_ids"]][num_tokens:] = RNG.integers(0, 320, bucket.num_tokens - num_tokens)
        return original(bucket, vector)

    runner._run = run_with_garbage
    assert run(llm) == alone
    assert run(llm) == alone


def test_priority_changes_the_order_only(make, alone):
    llm = make(scheduling_policy="priority", num_gpu_blocks_override=66, max_num_seqs=16)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in REQUESTS]
    priority = [i % 3 for i in range(NUM_REQUESTS)]
    outputs = llm.generate(prompts, [params for _, params in REQUESTS], use_tqdm=False, priority=priority)
    assert [list(output.outputs[0].token_ids) for output in outputs] == alone


def test_real_model(smollm2: LLM, golden):
    """One prompt alone, chunked among others, and again with its prefix cached."""
    prompt = {"prompt_token_ids": golden[-1]["prompt_token_ids"]}
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=12, ignore_eos=True),
    ]
    smollm2.reset_prefix_cache()
    first = [smollm2.generate([prompt], p, use_tqdm=False)[0].outputs[0].token_ids for p in params]
    smollm2.reset_prefix_cache()
    others = [{"prompt_token_ids": item["prompt_token_ids"]} for item in golden[:10]]
    for _ in range(2):
        together = smollm2.generate([*others, prompt, prompt], [params[0]] * len(others) + params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in together[-2:]] == first
