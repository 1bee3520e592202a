"""A random workload after warm-up: nothing compiles, no block leaks, every request ends."""

import gc
import weakref

import numpy as np

from jaxllm import LLM, SamplingParams
from jaxllm.worker.compile_cache import count_compiles

NUM_REQUESTS = 200
VOCAB = 320


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Any mix of all options."""

    def maybe(value, chance=0.25):
        return value if rng.random() < chance else None

    def ids(most):
        return [int(token) for token in rng.integers(0, VOCAB, rng.integers(1, most))]

    max_tokens = int(rng.integers(1, 24))
    logprob_token_ids = maybe(ids(9))
    prompt_logprob_token_ids = maybe(ids(9), 0.1)
    given = {
        "temperature": 0.0 if rng.random() < 0.3 else float(rng.uniform(0.1, 2.0)),
        "top_p": maybe(float(rng.uniform(0.05, 1.0))),
        "top_k": maybe(int(rng.integers(1, 50))),
        "min_p": maybe(float(rng.uniform(0, 0.5))),
        "presence_penalty": maybe(float(rng.uniform(-2, 2))),
        "frequency_penalty": maybe(float(rng.uniform(-2, 2))),
        "repetition_penalty": maybe(float(rng.uniform(0.5, 2))),
        "seed": maybe(int(rng.integers(0, 1 << 40))),
        "max_tokens": max_tokens,
        "min_tokens": maybe(int(rng.integers(0, max_tokens + 1))),
        "stop_token_ids": maybe(ids(9)),
        "ignore_eos": maybe(True),
        "logprobs": None if logprob_token_ids else maybe(int(rng.integers(0, 21))),
        "logprob_token_ids": logprob_token_ids,
        "prompt_logprobs": None if prompt_logprob_token_ids else maybe(int(rng.integers(0, 21)), 0.1),
        "prompt_logprob_token_ids": prompt_logprob_token_ids,
        "logit_bias": maybe({token: float(rng.uniform(-100, 100)) for token in ids(9)}),
        "allowed_token_ids": maybe(ids(40)),
        "flat_logprobs": maybe(True),
        "repetition_detection": maybe({"max_pattern_size": 4, "min_count": 3}),
        "detokenize": False,
    }
    if given["temperature"] > 0 and rng.random() < 0.2:
        given["n"] = 3
    return SamplingParams.from_optional(**given)


def test_nothing_compiles_and_every_block_comes_back(make_tiny):
    llm: LLM = make_tiny(num_gpu_blocks_override=90, max_num_seqs=16, scheduling_policy="priority")
    engine = llm.engine
    core = engine.engine_core.engine_core
    rng = np.random.default_rng(11)
    added, finished, aborted = set(), set(), set()
    with count_compiles() as compiles:
        while len(finished) + len(aborted) < NUM_REQUESTS:
            if len(added) < NUM_REQUESTS and rng.random() < 0.6:
                request_id = f"r{len(added)}"
                shared = list(range(50, 70)) if rng.random() < 0.5 else []
                prompt = shared + [int(token) for token in rng.integers(0, VOCAB, rng.integers(1, 60))]
                salt = "salt" if rng.random() < 0.1 else None
                engine.add_request(
                    request_id,
                    {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})},
                    random_params(rng),
                    priority=int(rng.integers(0, 3)),
                )
                added.add(request_id)
            live = sorted(added - finished - aborted)
            if live and rng.random() < 0.08:
                victim = live[int(rng.integers(len(live)))]
                engine.abort_request([victim])
                aborted.add(victim)
            for output in engine.step():
                assert output.request_id not in aborted
                if output.finished:
                    finished.add(output.request_id)
            core.scheduler.check_integrity()
    assert compiles.count == 0
    assert core.executor.collective_rpc("num_compiles_after_warm_up") == [0]
    assert len(finished) > 150
    assert len(aborted) > 5
    assert not engine.has_unfinished_requests()
    stats = core.scheduler.make_stats()
    assert stats.kv_cache_usage == 0.0
    assert core.reset_prefix_cache()
    preemptions = next(int(metric.value) for metric in llm.get_metrics() if metric.name.endswith("num_preemptions"))
    assert preemptions > 0


def test_an_engine_let_go_gives_its_memory_back(tiny_model, compiled):
    """Without waiting for the garbage collector: an engine holds gigabytes, so it must not be part of a reference cycle."""
    llm = LLM(
        tiny_model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        compilation_cache_dir=compiled,
        use_tqdm_on_load=False,
    )
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
    worker = weakref.ref(llm.engine.engine_core.engine_core.executor.worker)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert worker() is None
    finally:
        gc.enable()
