"""The parts of `jaxllm.bench.gpu` that run the engine: whole steps, and tokens from end to end."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.engine_args import EngineArgs
from jaxllm.worker.buckets import Bucket
from jaxllm.worker.worker import Worker

if TYPE_CHECKING:
    from jaxllm.bench.gpu import Run

# Llama 3.1 8B, and a model of the same kind that a CPU runs in no time.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
TINY = {
    **LLAMA_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODEL = "smollm2-135m-instruct"
PROMPTS = ("The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at")


def measure_steps(run: "Run", rows: list[dict[str, Any]]) -> None:
    """Decode steps of a Llama 8B with random weights: time, host time, and the share of what reading memory alone would take."""
    sizes, context = ((4,), 64) if run.smoke else ((1, 32, 128, 256), 1024)
    with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY if run.smoke else LLAMA_8B))
        args = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2 * context,
            max_num_seqs=sizes[-1],
            max_num_batched_tokens=sizes[-1],
            cudagraph_capture_sizes=sizes,
            num_gpu_blocks_override=2 + sizes[-1] * (context // 32 + 1),
            compilation_cache_dir="",
            use_tqdm_on_load=False,
        )
        config = args.create_engine_config()
    worker = Worker(config)
    try:
        worker.init_device()
        worker.load_model()
        worker.determine_available_memory()
        worker.init_kv_cache()
        for bucket in worker.runner.buckets.decode:
            run.check_time()
            rows.append(_measure_step(worker, bucket, context, run))
    finally:
        worker.shutdown()


def _measure_step(worker: Worker, bucket: Bucket, context: int, run: "Run") -> dict[str, Any]:
    runner = worker.runner
    start = time.perf_counter()
    runner.compile(bucket)
    compile_seconds = time.perf_counter() - start
    tables = np.zeros(runner.state.block_tables.shape, np.int32)
    width = context // worker.config.cache.block_size + 1
    for row in range(bucket.num_rows):
        tables[:, row, :width] = 1 + row * width + np.arange(width)
    runner.state = dataclasses.replace(runner.state, block_tables=jax.device_put(jnp.asarray(tables), runner.replicated))
    vector, fields = runner.layout(bucket).empty()
    request = np.arange(bucket.num_rows)
    fields["counts"][:] = bucket.num_rows
    fields["rows"][:] = fields["sampled_rows"][:] = fields["last_token_index"][:] = request
    fields["query_start_loc"][:] = np.arange(bucket.num_rows + 1)
    fields["seq_lens"][:] = context
    for _ in range(3):  # the first run picks algorithms, the next records the command buffer
        output = runner._run(bucket, vector)
    jax.block_until_ready(output.sampled.token_ids)
    num_steps = 3 if run.smoke else 50
    host = 0.0
    start = time.perf_counter()
    for _ in range(num_steps):
        before = time.perf_counter()
        output = runner._run(bucket, vector)
        host += time.perf_counter() - before
    jax.block_until_ready(output.sampled.token_ids)
    seconds = (time.perf_counter() - start) / num_steps
    embedding = worker.graph.specs[0]
    read = sum(weight.nbytes for weight in worker.weights) - np.prod(embedding.shape) * worker.weights[0].dtype.itemsize
    config = worker.kv_cache_config
    read += bucket.num_rows * context * config.block_bytes // worker.config.cache.block_size
    bound = read / run.device["copy"]
    return {
        "rows": bucket.num_rows,
        "context": context,
        "ms": 1e3 * seconds,
        "tokens_per_s": bucket.num_rows / seconds,
        "host_us": 1e6 * host / num_steps,
        "memory_bound_ms": 1e3 * bound,
        "percent_of_memory_bound": 100 * bound / seconds,
        "compile_s": compile_seconds,
    }


_GENERATE = """
import json, sys
from jaxllm import LLM, SamplingParams
if __name__ == "__main__":
    model, prompts, most = json.loads(sys.argv[1])
    llm = LLM(model, dtype="float32", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64,
              cudagraph_capture_sizes=[4], compile_sizes=[64],  # two programs to compile
              kv_cache_memory_bytes=2**26, use_tqdm_on_load=False)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=most, ignore_eos=True), use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def check_engine(run: "Run", rows: list[dict[str, Any]]) -> None:
    """Greedy tokens of a real model in float32, on the device and on the CPU: they should be the same."""
    from jaxllm.weights.source import resolve_model

    try:
        resolve_model(MODEL)
    except ValueError as error:
        rows.append({"skipped": str(error)})
        return
    arguments = json.dumps([MODEL, PROMPTS, 4 if run.smoke else 32])
    expected = _generate(arguments, "cpu")
    found = expected if run.smoke else _generate(arguments, jax.default_backend().replace("gpu", "cuda"))
    for prompt, on_cpu, on_device in zip(PROMPTS, expected, found, strict=True):
        pairs = enumerate(zip(on_cpu, on_device, strict=True))
        differs = next((i for i, (a, b) in pairs if a != b), None)
        rows.append({"prompt": prompt, "tokens": len(on_device), "first_difference": differs})
    if any(row["first_difference"] is not None for row in rows):
        raise AssertionError("greedy tokens differ from the CPU's; a tie in the logits may do that, a fault does too")


def _generate(arguments: str, platform: str) -> list[list[int]]:
    # This process holds part of the memory.
    env = {**os.environ, "JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE, arguments], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"generating on {platform} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
