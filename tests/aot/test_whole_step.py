"""What must hold of every step that the engine compiles, read from the compiled step itself."""

import pytest
from aot_workers import bucket_of, make_worker

from jaxllm.plan.abstract_worker import AbstractWorker
from jaxllm.worker.row_state import state_bytes
from kernels_pallas.aot import Program

pytestmark = pytest.mark.aot
MIB = 2**20


def check_step(worker: AbstractWorker, program: Program, num_rows: int) -> None:
    """What holds of every step, whatever its bucket and however many devices share it."""
    devices = len(worker.devices)
    config = worker.kv_cache_config
    kv_bytes = config.num_blocks * config.block_bytes // devices
    rows_bytes = state_bytes(worker.runner.abstract_state())
    memory = program.memory
    # The cache and the rows are updated in place: each donated byte is a byte of a result.
    assert memory.alias_size_in_bytes == kv_bytes + rows_bytes
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 64 * MIB
    # The largest activations are the logits. A sampler that changes them holds a few of them at a time.
    logits = 4 * num_rows * worker.config.model.decoder.vocab_size // devices
    assert memory.temp_size_in_bytes < 100 * MIB + 5 * logits
    # No array of the cache and no weight is copied; the smallest weight matrix is k's and v's share of a layer.
    array = kv_bytes // config.num_arrays
    matrices = [weight for weight in worker.weights if len(weight.shape) > 1]
    smallest = min(2 * w.shape[0] * w.shape[1] // devices for w in matrices)
    copied = [copy for copy in program.hlo.copies(min(array, smallest)) if not copy.shape.startswith("f32[")]
    assert copied == []
    assert program.hlo.host_calls == []


def test_decode_step_of_llama_8b():
    worker = make_worker("llama-3.1-8b", num_layers=2)
    program = worker.program(bucket_of(worker, 64, decode=True))
    check_step(worker, program, num_rows=64)
    assert program.hlo.collectives == []
    assert program.thunks.kinds == ["kCommandBuffer"]
