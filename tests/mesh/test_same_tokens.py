"""However many devices share a model, the tokens are those of one device: float32, greedy and seeded, with asynchronous
scheduling, chunked prompts, cached prefixes and preemptions."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from devices import need_devices

from jaxllm import LLM, SamplingParams
from jaxllm.worker.pipeline_runner import PipelineRunner

pytestmark = pytest.mark.multi_gpu

RNG = np.random.default_rng(3)


def make_request(i: int) -> tuple[dict[str, Any], SamplingParams]:
    """Greedy, seeded and with changes to the logits, in turn; half of the prompts share a long beginning."""
    prompt = list(range(100, 121)) * (i % 2) + [int(token) for token in RNG.integers(3, 2500, 1 + (i * 5) % 23)]
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": i},
        {"temperature": 0.8, "top_p": 0.9, "seed": i},
        {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "seed": i, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": {5: 2.0}},
        {"temperature": 0.9, "seed": i, "allowed_token_ids": [7, 40, 500, 2499], "logprobs": 1},
    ]
    params = SamplingParams(max_tokens=5 + i % 9, ignore_eos=True, detokenize=False, **options[i % len(options)])
    return {"prompt_token_ids": prompt}, params


REQUESTS = [make_request(i) for i in range(21)]


def slow(*values: Any) -> Any:
    """Parameters of a test that takes long: compiling an engine does."""
    return pytest.param(*values, marks=pytest.mark.slow)


def logprobs_of(positions: Any) -> list[list[tuple[int, float]]]:
    return [[(token, entry.logprob) for token, entry in (position or {}).items()] for position in positions or ()]


def run(llm: LLM) -> tuple[list[list[int]], list[Any]]:
    """Token ids, and log probabilities of tokens and prompts."""
    prompts, params = zip(*REQUESTS, strict=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, [logprobs_of(output.outputs[0].logprobs) + logprobs_of(output.prompt_logprobs) for output in outputs]


def num_preemptions(llm: LLM) -> int:
    return next(int(metric.value) for metric in llm.get_metrics() if metric.name.endswith("num_preemptions"))


def worker_of(llm: LLM) -> Any:
    return llm.engine.engine_core.engine_core.executor.worker  # type: ignore[attr-defined]


_ONE_DEVICE: list[tuple[list[list[int]], list[Any]]] = []


def on_one_device(make_tiny) -> tuple[list[list[int]], list[Any]]:
    """What one device gives, computed once."""
    if not _ONE_DEVICE:
        llm = make_tiny()
        _ONE_DEVICE.append(run(llm))
        assert num_preemptions(llm) > 0
        tokens = _ONE_DEVICE[0][0]
        assert len({tuple(output) for output in tokens}) == len(tokens)
    return _ONE_DEVICE[0]


def check_same(found: tuple[list[list[int]], list[Any]], expected: tuple[list[list[int]], list[Any]]) -> None:
    assert found[0] == expected[0]
    for mine, theirs in zip(found[1], expected[1], strict=True):
        for position, other in zip(mine, theirs, strict=True):
            assert [token for token, _ in position] == [token for token, _ in other]
            np.testing.assert_allclose([value for _, value in position], [value for _, value in other], atol=1e-4)


@pytest.mark.parametrize("tensor", [slow(2), 3, slow(4), 8])
def test_tensor_parallel(make_tiny, tensor):
    need_devices(tensor)
    expected = on_one_device(make_tiny)
    llm = make_tiny(tensor_parallel_size=tensor)
    check_same(run(llm), expected)
    assert num_preemptions(llm) > 0
    # Once more, with prefixes cached, after the weights were away.
    llm.sleep(level=1)
    llm.wake_up()
    check_same(run(llm), expected)
    assert llm.collective_rpc("num_compiles_after_warm_up") == [0]
    worker = worker_of(llm)
    check_slices(worker, tensor)
    for bucket, program in worker.runner.programs.items():
        check_collectives(program.as_text(), bucket.num_tokens, worker, tensor)


@pytest.mark.parametrize(
    ("pipeline", "tensor", "asynchronous"),
    [slow(2, 1, True), slow(2, 1, False), (2, 2, True), slow(2, 2, False), slow(3, 1, True)],
)
def test_pipeline_parallel(make_tiny, monkeypatch, pipeline, tensor, asynchronous):
    need_devices(pipeline * tensor)
    expected = on_one_device(make_tiny)
    steps_apart = []

    def needed_step(runner: PipelineRunner, *args: Any, find: Any = PipelineRunner._needed_step) -> int:
        needed = find(runner, *args)
        steps_apart.append(runner._num_steps + 1 - needed)
        return needed

    monkeypatch.setattr(PipelineRunner, "_needed_step", needed_step)
    llm = make_tiny(pipeline_parallel_size=pipeline, tensor_parallel_size=tensor, async_scheduling=asynchronous)
    check_same(run(llm), expected)
    assert num_preemptions(llm) > 0
    # Most steps start on tokens that have left the last stage: only at the beginning and at the end do stages wait.
    assert sum(steps < pipeline for steps in steps_apart) < len(steps_apart) / 5, steps_apart
    llm.sleep(level=1)
    llm.wake_up()
    check_same(run(llm), expected)
    assert llm.collective_rpc("num_compiles_after_warm_up") == [0]
    worker = worker_of(llm)
    # Each stage's weights and blocks are on its own devices, and each device holds its share of them.
    for spec, weight in zip(worker.specs, worker.weights, strict=True):
        layer = re.match(r"layers\.(\d+)\.", spec.path)
        index = 0 if spec.path == "embed.table" else pipeline - 1
        if layer is not None:
            index = next(i for i, stage in enumerate(worker.stages) if int(layer[1]) in stage.layers)
        assert weight.sharding.device_set == set(worker.stages[index].mesh.devices.flat), spec.path
        assert weight.addressable_shards[0].data.size * (tensor if any(spec.axes) else 1) == weight.size
    for caches, stage in zip(kv_caches_of(worker.runner), worker.stages, strict=True):
        assert len(caches) == len(stage.layers)
        for cache in caches:
            assert cache.sharding.device_set == set(stage.mesh.devices.flat)
            assert cache.addressable_shards[0].data.size * tensor == cache.size


def kv_caches_of(runner: Any) -> list[tuple[jax.Array, ...]]:
    return [*(stage.kv_caches for stage in runner.early), runner.kv_caches]


def check_slices(worker: Any, tensor: int) -> None:
    """Each device holds its share of every matrix and of every block, and nothing more."""
    for spec, weight in zip(worker.specs, worker.weights, strict=True):
        for shard in weight.addressable_shards:
            assert shard.data.size * (tensor if any(spec.axes) else 1) == weight.size, spec.path
        assert any(spec.axes) == (len(spec.shape) == 2 or "qkv.bias" in spec.path), spec.path
    for cache in worker.runner.kv_caches:
        assert {shard.data.size for shard in cache.addressable_shards} == {cache.size // tensor}
    for array in jax.tree.leaves(worker.runner.state):
        assert array.sharding.is_fully_replicated


def check_collectives(program: str, num_tokens: int, worker: Any, tensor: int) -> None:
    """Two sums over all devices a layer and one for the embedding; logits are never put together on one device."""
    hidden_size, num_layers = (getattr(worker.config.model.decoder, name) for name in ("hidden_size", "num_layers"))
    shapes = re.findall(r"(\w+\[[\d,]*\])\S* (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", program)
    assert shapes
    sums = [shape for shape, kind in shapes if kind == "all-reduce" and shape.endswith(f"[{num_tokens},{hidden_size}]")]
    assert len(sums) == 1 + 2 * num_layers, sums
    vocab_size, num_rows = worker.runner.vocab_size, worker.config.scheduler.max_num_seqs
    for shape, kind in shapes:
        sizes = [int(size) for size in re.findall(r"\d+", shape.partition("[")[2])]
        if kind == "all-to-all":
            # At most from shares of the vocabulary to shares of the rows.
            assert np.prod(sizes, dtype=int) <= -(-num_rows // tensor) * vocab_size, shape
        elif sizes != [num_tokens, hidden_size]:
            # What is gathered for a row: numbers of blocks of the vocabulary, or the tokens of 64 blocks of 32.
            assert np.prod(sizes[1:], dtype=int) < vocab_size, (kind, shape)
