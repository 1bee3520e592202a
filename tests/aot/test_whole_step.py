"""What must hold of every step that the engine compiles, read from the compiled step itself."""

import time
from collections import Counter

import pytest
from aot_workers import bucket_of, make_worker

from jaxllm.config import CacheDType
from jaxllm.plan.abstract_worker import AbstractWorker
from jaxllm.worker.buckets import Bucket
from jaxllm.worker.row_state import state_bytes
from kernels_pallas.aot import Program
from kernels_pallas.triton_call import unavailable_reason

pytestmark = pytest.mark.aot
MIB = 2**20


def check_step(worker: AbstractWorker, program: Program, bucket: Bucket) -> None:
    """What holds of every step, whatever its bucket and however many devices share it."""
    devices = len(worker.devices)
    config = worker.kv_cache_config
    kv_bytes = config.num_blocks * config.block_bytes // devices
    rows_bytes = state_bytes(worker.runner.abstract_state())
    memory = program.memory
    # The cache and the rows are updated in place: each donated byte is a byte of a result.
    assert memory.alias_size_in_bytes == kv_bytes + rows_bytes
    # Beyond that come tokens and log probabilities and, for a prompt's, the hidden states.
    hidden = 0 if bucket.decode_only else 2 * bucket.num_tokens * worker.config.model.decoder.hidden_size
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < hidden + MIB
    # A sampler that changes the logits holds a few of them at a time. Of the layers, one at a time holds its activations: the
    # feed-forward's columns before and after the gate, and four times the hidden state (before and after, queries and results).
    decoder = worker.config.model.decoder
    logits = 4 * bucket.num_rows * decoder.vocab_size // devices
    layer = 2 * bucket.num_tokens * (3 * decoder.intermediate_size // devices + 4 * decoder.hidden_size)
    assert memory.temp_size_in_bytes < 100 * MIB + max(5 * logits, layer)
    # No array of the cache and no weight is copied; the smallest weight matrix is k's and v's share of a layer.
    array = kv_bytes // config.num_arrays
    matrices = [weight for weight in worker.weights if len(weight.shape) > 1]
    smallest = min(2 * w.shape[0] * w.shape[1] // devices for w in matrices)
    copied = [copy for copy in program.hlo.copies(min(array, smallest)) if not copy.shape.startswith("f32[")]
    assert copied == []
    assert program.hlo.host_calls == []


def test_decode_step_of_llama_8b():
    worker = make_worker("llama-3.1-8b", num_layers=2)
    bucket = bucket_of(worker, 64, decode=True)
    program = worker.program(bucket)
    check_step(worker, program, bucket)
    assert program.hlo.collectives == []
    assert program.thunks.kinds == ["kCommandBuffer"]


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
@pytest.mark.parametrize(
    ("model", "size", "decode", "kv_cache_dtype"),
    [
        ("llama-3.1-8b", 1, True, "auto"),
        pytest.param("llama-3.1-8b", 1, False, "auto", marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", 1, True, "fp8", marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", 1, False, "fp8", marks=pytest.mark.slow),
        pytest.param("llama-3.3-70b", 4, True, "auto", marks=pytest.mark.slow),
        pytest.param("llama-3.3-70b", 4, False, "auto", marks=pytest.mark.slow),
        pytest.param("llama-3.3-70b", 4, False, "fp8", marks=pytest.mark.slow),
    ],
)
def test_step_on_an_a100(model: str, size: int, decode: bool, kv_cache_dtype: CacheDType):
    """By Triton's kernels."""
    layers = 1 if size == 1 else 2
    options = {"tensor_parallel_size": size, "num_layers": layers, "kv_cache_dtype": kv_cache_dtype}
    worker = make_worker(model, target="a100", attention_backend="auto", **options)
    assert worker.config.attention_backend == "triton"
    bucket = bucket_of(worker, 64 if decode else 512, decode=decode)
    program = worker.program(bucket)
    check_step(worker, program, bucket)
    kinds = Counter(collective.kind for collective in program.hlo.collectives)
    if size == 1:
        assert not kinds
        assert program.thunks.kinds == ["kCommandBuffer"]
    else:
        assert kinds == {"all-reduce": 2 * layers + 1, "all-to-all": 1, "all-gather": 1}
        assert not program.thunks.waits_for_device


def test_decode_step_of_llama_70b_on_four_devices():
    worker = make_worker("llama-3.3-70b", tensor_parallel_size=4, num_layers=2)
    bucket = bucket_of(worker, 64, decode=True)
    program = worker.program(bucket)
    check_step(worker, program, bucket)
    # Two a layer and the embedding's. The logits change hands once, and the results: nothing else, in no branch either.
    assert Counter(collective.kind for collective in program.hlo.collectives) == {
        "all-reduce": 2 * 2 + 1,
        "all-to-all": 1,
        "all-gather": 1,
    }
    assert not program.thunks.waits_for_device
    assert program.memory.temp_size_in_bytes < 100 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "decode"), [(64, True), (2048, False)])
@pytest.mark.parametrize("tensor_parallel_size", [1, 4])
def test_steps_with_an_fp8_cache(num_tokens: int, decode: bool, tensor_parallel_size: int):
    options = {"tensor_parallel_size": tensor_parallel_size, "num_layers": 2, "attention_backend": "auto"}
    worker = make_worker("llama-3.1-8b", kv_cache_dtype="fp8", **options)
    plain = make_worker("llama-3.1-8b", **options)
    assert worker.kv_cache_config.block_bytes * 2 == plain.kv_cache_config.block_bytes
    assert worker.config.attention_backend == "mosaic"
    bucket = bucket_of(worker, num_tokens, decode=decode)
    program = worker.program(bucket)
    check_step(worker, program, bucket)
    kinds = Counter(collective.kind for collective in program.hlo.collectives)
    assert kinds["all-reduce"] == (0 if tensor_parallel_size == 1 else 2 * 2 + 1)


@pytest.mark.parametrize(
    ("model", "tensor_parallel_size"), [("llama-3.1-8b", 1), ("qwen3-8b", 1), ("llama-3.3-70b", 4), ("llama-3.3-70b", 8)]
)
@pytest.mark.parametrize(("num_tokens", "decode"), [(64, True), (256, True), (2048, False), (8192, False)])
@pytest.mark.slow
def test_every_step_in_full_depth(model: str, tensor_parallel_size: int, num_tokens: int, decode: bool):
    worker = make_worker(model, tensor_parallel_size=tensor_parallel_size)
    start = time.process_time()
    bucket = bucket_of(worker, num_tokens, decode=decode)
    program = worker.program(bucket)
    # The processor's time, so that a busy machine does not fail it; spread over two cores this is the 20 s that a step may take.
    # Eighty layers for eight devices take twice that.
    assert time.process_time() - start < (40 if tensor_parallel_size == 1 else 80)
    check_step(worker, program, bucket)
    num_layers = worker.config.model.decoder.num_layers
    kinds = Counter(collective.kind for collective in program.hlo.collectives)
    if tensor_parallel_size == 1:
        assert not kinds
        assert program.thunks.kinds == ["kCommandBuffer"]
    else:
        assert kinds == {"all-reduce": 2 * num_layers + 1, "all-to-all": 1, "all-gather": 1}
        assert not program.thunks.waits_for_device
