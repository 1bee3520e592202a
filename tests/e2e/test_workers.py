"""The tiny model and the real one with workers in processes of their own, which are one jax."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.engine.errors import EngineDeadError

ROOT = Path(__file__).parents[2]
SHARED = [*range(40, 60)]
PROMPTS = [[*SHARED, *range(100, 100 + 3 * i)] if i % 2 else [5 + i, *range(100, 100 + 4 * i)] for i in range(14)]
PARAMS = [
    SamplingParams(max_tokens=16, ignore_eos=True, detokenize=False, temperature=0.8 * (i % 2), seed=i)
    for i in range(len(PROMPTS))
]
# So few blocks that requests are preempted; budget and prompts are such that some prompts come in chunks.
FEW_BLOCKS = {"num_gpu_blocks_override": 60, "max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 16}


def generate(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def executor_of(llm: LLM) -> Any:
    return llm.engine.engine_core.engine_core.executor  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def here(make_tiny) -> LLM:
    """The engine in this process, with blocks enough and without surprises."""
    return make_tiny(enable_prefix_caching=False, async_scheduling=False)


@pytest.fixture(scope="module")
def expected(here: LLM) -> list[list[int]]:
    return generate(here)


@pytest.fixture(scope="module")
def two(make_tiny) -> LLM:
    """Two workers that share every layer."""
    return make_tiny(distributed_executor_backend="mp", tensor_parallel_size=2, worker_hang_timeout=60.0, **FEW_BLOCKS)


def test_one_worker(make_tiny, expected):
    llm = make_tiny(distributed_executor_backend="mp", worker_hang_timeout=60.0)
    assert generate(llm) == generate(llm) == expected
    assert llm.collective_rpc("num_compiles_after_warm_up") == [0]
    check_health(llm)


def test_two_workers(two: LLM, expected):
    """In float32 the same tokens, whatever the number of devices: asynchronous, with cached prefixes and preemptions."""
    assert generate(two) == expected
    assert generate(two) == expected  # with what is cached now
    assert two.collective_rpc("num_compiles_after_warm_up") == [0, 0]
    check_health(two)


def test_log_probabilities_of_a_prompt(here: LLM, two: LLM):
    """They are computed by all devices together, when the step is read."""
    params = SamplingParams(max_tokens=4, prompt_logprobs=3, logprobs=3, ignore_eos=True, detokenize=False, temperature=0)
    (output,), (same,) = (llm.generate([PROMPTS[5]], params, use_tqdm=False) for llm in (here, two))
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    assert output.prompt_logprobs is not None
    assert same.prompt_logprobs is not None
    for one, other in zip(output.prompt_logprobs[1:], same.prompt_logprobs[1:], strict=True):
        assert {token: entry.logprob for token, entry in one.items()} == pytest.approx(
            {token: entry.logprob for token, entry in other.items()}, abs=1e-5
        )


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(two: LLM, expected, level: int):
    """Each worker keeps or loads its own part of the weights."""
    num_bytes = two.collective_rpc("device_bytes")
    assert len(num_bytes) == 2
    two.sleep(level)
    assert two.collective_rpc("device_bytes") == [0, 0]
    two.wake_up()
    assert two.collective_rpc("device_bytes") == num_bytes
    assert generate(two) == expected


def test_a_worker_that_is_killed_ends_the_engine(two: LLM):
    """The last one here: amid exchanges with the other worker, which loses its partner and may say so."""
    executor = executor_of(two)
    pid = executor.worker_pids[1]
    for i, prompt in enumerate(PROMPTS):
        two.engine.add_request(f"kill-{i}", {"prompt_token_ids": prompt}, PARAMS[i])
    two.engine.step()
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"worker 1 \(pid {pid}\) was killed by SIGKILL"):
        run(two)
    assert time.monotonic() - start < 10


def run(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def check_health(llm: LLM) -> None:
    llm.engine.engine_core.check_health()


@pytest.mark.slow
def test_two_machines(make_tiny, tiny_model: str, compiled: str, expected: list[list[int]]):
    """The second one is a process that runs workers only."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = min(sock.getsockname()[1], 65533)
    limits = {"block_size": 4, "cudagraph_capture_sizes": [], "compile_sizes": [], "load_format": "dummy"}
    machines = {"nnodes": 2, "tensor_parallel_size": 2, "master_port": port, "worker_hang_timeout": 60.0}
    args = {**limits, **FEW_BLOCKS, **machines, "compilation_cache_dir": compiled, "use_tqdm_on_load": False}
    config = EngineArgs(tiny_model, node_rank=1, **args).create_engine_config()
    code = "import pickle, sys; from jaxllm.executor.nodes import run_node; run_node(pickle.loads(bytes.fromhex(sys.argv[1])))"
    command = [sys.executable, "-c", code, pickle.dumps(config).hex()]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        try:
            llm = make_tiny(**FEW_BLOCKS, **machines)
            assert len(llm.collective_rpc("device_bytes")) == 2
            assert generate(llm) == generate(llm) == expected
            llm.shutdown()
            assert process.wait(10) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_several_devices_a_worker(make_tiny, expected: list[list[int]]):
    two_each = {"distributed_executor_backend": "mp", "tensor_parallel_size": 4, "devices_per_worker": 2}
    llm = make_tiny(**FEW_BLOCKS, **two_each, worker_hang_timeout=60.0)
    assert generate(llm) == expected


@pytest.mark.slow
def test_the_real_model(golden, compiled: str):
    """Two workers give the recorded tokens."""
    assert jax.default_backend() == "cpu"
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with LLM(
        "smollm2-135m-instruct",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        cudagraph_capture_sizes=[4],
        compile_sizes=[64],
        compilation_cache_dir=compiled,
        use_tqdm_on_load=False,
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
        worker_hang_timeout=60.0,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": item["prompt_token_ids"]} for item in golden], params, use_tqdm=False)
    for item, output in zip(golden, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == item["output_token_ids"], item["prompt"]
