"""The tiny model with its engine core in another process, and asleep."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.engine.errors import EngineDeadError

ROOT = Path(__file__).parents[2]
PROMPTS = [[5 + i, *range(100, 100 + 3 * i)] for i in range(12)]
PARAMS = [SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, temperature=0.8 * (i % 2), seed=i) for i in range(12)]
# As make_tiny has it.
ENGINE = {
    "cudagraph_capture_sizes": [],
    "compile_sizes": [],
    "block_size": 4,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 1024,
}


def generate(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def worker_of(llm: LLM) -> Any:
    return llm.engine.engine_core.engine_core.executor.worker  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def here(make_tiny) -> LLM:
    """With the engine core in this process."""
    return make_tiny()


@pytest.fixture(scope="module")
def there(make_tiny) -> LLM:
    """With the engine core in another."""
    return make_tiny(multiprocess=True)


def test_another_process_gives_the_same(here: LLM, there: LLM) -> None:
    assert generate(there) == generate(here)
    assert there.engine.engine_core.num_gpu_blocks == here.engine.engine_core.num_gpu_blocks == 1024
    assert there.collective_rpc("num_compiles_after_warm_up") == [0]


def test_logprobs_cross(here: LLM, there: LLM) -> None:
    """Those of tokens, and those of a prompt, which are more than fits in the first frame of a message."""
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=3, detokenize=False, temperature=0)
    (output,), (same,) = (llm.generate([[7, 8]], params, use_tqdm=False) for llm in (here, there))
    assert output.outputs[0].logprobs is not None
    assert [len(entries) for entries in output.outputs[0].logprobs] == [3] * 5
    assert same.outputs == output.outputs
    params = SamplingParams(max_tokens=1, prompt_logprobs=20, detokenize=False)
    (output,), (same,) = (llm.generate([[7, *range(3, 103)]], params, use_tqdm=False) for llm in (here, there))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 101
    assert same.prompt_logprobs == output.prompt_logprobs


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_the_devices_and_wake_up_restores_them(here: LLM, level: int) -> None:
    """The same arrays, nothing compiled, and in between nothing is left on the devices."""
    before = generate(here)
    worker = worker_of(here)
    weights = [np.asarray(weight) for weight in worker.weights]
    arrays = jax.tree.leaves((worker.weights, worker.runner.kv_caches, worker.runner.state))
    num_bytes = worker.device_bytes()
    assert num_bytes == sum(array.nbytes for array in arrays) > 1e6
    here.enqueue([3, 4, 5], SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True, temperature=0))
    here.engine.step()

    num_live = sum(array.nbytes for array in jax.live_arrays())
    here.sleep(level, "keep")
    assert all(array.is_deleted() for array in arrays)
    assert worker.device_bytes() == 0
    assert num_live - sum(array.nbytes for array in jax.live_arrays()) >= num_bytes
    assert bool(worker._host_weights) is (level == 1)
    here.wake_up(["weights"])
    assert worker.device_bytes() == sum(weight.nbytes for weight in weights)
    assert here.is_sleeping()
    here.wake_up(["kv_cache"])
    assert worker.device_bytes() == num_bytes
    assert worker._host_weights == []
    assert not here.is_sleeping()
    for weight, old in zip(worker.weights, weights, strict=True):
        np.testing.assert_array_equal(np.asarray(weight), old)

    (kept,) = here.wait_for_completion(use_tqdm=False)
    (again,) = here.generate(
        [[3, 4, 5]], SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True, temperature=0), use_tqdm=False
    )
    assert kept.outputs[0].token_ids == again.outputs[0].token_ids
    assert generate(here) == before
    assert worker.num_compiles_after_warm_up() == 0
    assert here.reset_prefix_cache()


def test_deeper_sleep(here: LLM) -> None:
    before = generate(here)
    here.sleep(1)
    here.sleep(2)
    assert worker_of(here)._host_weights == []
    here.sleep(1)  # there is nothing left to keep
    here.wake_up()
    assert generate(here) == before


def test_sleep_in_another_process(here: LLM, there: LLM) -> None:
    (num_bytes,) = there.collective_rpc("device_bytes")
    there.sleep(2)
    assert there.collective_rpc("device_bytes") == [0]
    with pytest.raises(RuntimeError, match="asleep"):
        there.generate([[5]], use_tqdm=False)
    there.wake_up()
    assert there.collective_rpc("device_bytes") == [num_bytes]
    assert generate(there) == generate(here)


def test_arguments_reach_the_engine(tiny_model: str) -> None:
    args = EngineArgs(tiny_model, load_format="dummy", max_num_queued_reqs=5, max_num_queued_tokens=6)
    config = args.create_engine_config("server")
    assert (config.max_num_queued_reqs, config.max_num_queued_tokens) == (5, 6)


FRONT_END = """
    import asyncio, json, os, sys
    from jaxllm.engine.async_llm import AsyncLLM
    from jaxllm.engine.engine_args import EngineArgs
    from jaxllm.engine.errors import EngineDeadError
    from jaxllm.sampling_params import SamplingParams

    llm = AsyncLLM.from_engine_args(EngineArgs(**json.loads(sys.argv[1])))

    async def one(i):
        params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, temperature=0)
        async for output in llm.generate([5 + i], params, str(i)):
            last = output
        return last.outputs[0].token_ids

    async def main():
        print(json.dumps(await asyncio.gather(*map(one, range(4)))), flush=True)

        num_outputs = 0
        params = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False)
        async for output in llm.generate([5], params, "r"):
            num_outputs += 1
            if num_outputs == 3:
                os.kill(llm.engine_core.pid, 9)

    try:
        asyncio.run(main())
    except EngineDeadError as error:
        print(json.dumps(str(error)))
    llm.shutdown()
    assert "jax" not in sys.modules and "flax" not in sys.modules, sorted(sys.modules)
"""


def test_front_end_never_imports_jax_and_sees_the_death(here: LLM, tiny_model: str, compiled: str) -> None:
    args = {
        **ENGINE,
        "model": tiny_model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "compilation_cache_dir": compiled,
        "use_tqdm_on_load": False,
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FRONT_END), json.dumps(args)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, temperature=0)
    outputs = here.generate([[5 + i] for i in range(4)], params, use_tqdm=False)
    tokens, death = map(json.loads, done.stdout.splitlines())
    assert tokens == [output.outputs[0].token_ids for output in outputs]
    assert death == "the engine core's process was killed by SIGKILL"


def test_end_while_asleep(there: LLM) -> None:
    there.sleep(1)
    there.shutdown()
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        there.generate([[5]], use_tqdm=False)
