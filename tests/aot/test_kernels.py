"""What the Mosaic kernels need of an H200: registers, no spills, shared memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.aot import TARGETS, compile_for_device, devices, lowering_on
from kernels_pallas.aot.kernels import KernelResources
from kernels_pallas.kv_cache_write import write_kv
from kernels_pallas.paged_attention import Call, paged_attention, select_implementation
from kernels_pallas.triton_call import unavailable_reason

pytestmark = pytest.mark.aot
MIB = 2**20
# Of 65536 a core, what a thread may have where two blocks of two warpgroups share it.
REGISTERS_FOR_TWO_BLOCKS = 128


def compile_attention(head_dim, block_size, heads, kv_heads, *, tokens, decode_only, **options):
    """The kernels of a step that writes into a donated cache and attends to it, and the program."""
    mesh = Mesh(np.asarray(devices(TARGETS["h200"], 1)), ("tensor",))
    whole = NamedSharding(mesh, PartitionSpec())

    def shaped(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    rows, blocks = 64, 1024
    q = shaped((tokens, heads, head_dim), jnp.bfloat16)
    kv = shaped((tokens, kv_heads, head_dim), jnp.bfloat16)
    cache = shaped((blocks, 2, kv_heads, block_size, head_dim), jnp.bfloat16)
    slots, tables = shaped((tokens,), jnp.int32), shaped((rows, 4096 // block_size), jnp.int32)
    integers = [tables, shaped((rows,), jnp.int32), shaped((rows + 1,), jnp.int32), shaped((), jnp.int32)]
    if options.pop("sinks", False):
        options["sinks"] = jnp.zeros(heads, jnp.float32)

    def step(cache, q, k, v, slots, *integers):
        cache = write_kv(cache, k, v, slots)
        attended = paged_attention(
            q, cache, *integers, scale=head_dim**-0.5, decode_only=decode_only, implementation="mosaic", **options
        )
        return cache, attended

    with lowering_on(mesh):
        lowered = jax.jit(step, donate_argnums=0).lower(cache, q, kv, kv, slots, *integers)
    program = compile_for_device(lowered, kernels=True)
    cache_bytes = 2 * blocks * 2 * kv_heads * block_size * head_dim
    assert program.memory.alias_size_in_bytes == cache_bytes
    assert program.memory.temp_size_in_bytes < 40 * MIB
    assert program.hlo.copies(cache_bytes // 2) == []
    assert program.thunks.kinds == ["kCommandBuffer"]
    mine: set[KernelResources] = {kernel for kernel in program.kernels if "mosaic" in kernel.name}
    return mine


# (head size, block size, heads, KV heads, registers, options)
DECODES = [
    (128, 32, 32, 8, REGISTERS_FOR_TWO_BLOCKS, {}),
    (64, 16, 9, 3, REGISTERS_FOR_TWO_BLOCKS, {}),
    pytest.param(128, 16, 16, 1, 144, {"sliding_window": 1024}, marks=pytest.mark.slow),
    pytest.param(96, 64, 4, 4, REGISTERS_FOR_TWO_BLOCKS, {"sinks": True}, marks=pytest.mark.slow),
    pytest.param(80, 32, 8, 2, REGISTERS_FOR_TWO_BLOCKS, {}, marks=pytest.mark.slow),
    pytest.param(256, 64, 8, 2, 255, {"logit_soft_cap": 50.0}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("head_dim", "block_size", "heads", "kv_heads", "registers", "options"), DECODES)
def test_decode(head_dim, block_size, heads, kv_heads, registers, options):
    kernels = compile_attention(head_dim, block_size, heads, kv_heads, tokens=64, decode_only=True, **options)
    assert kernels
    for kernel in kernels:
        assert kernel.spill_bytes == 0
        assert kernel.registers <= registers


CHUNKS = [
    (128, 32, 32, 8, {}),
    pytest.param(256, 64, 8, 2, {"sliding_window": 1024, "logit_soft_cap": 50.0}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("head_dim", "block_size", "heads", "kv_heads", "options"), CHUNKS)
def test_mixed(head_dim, block_size, heads, kv_heads, options):
    kernels = compile_attention(head_dim, block_size, heads, kv_heads, tokens=512, decode_only=False, **options)
    assert kernels
    assert all(kernel.spill_bytes == 0 for kernel in kernels)


def test_the_chain_knows_the_device_that_is_compiled_for():
    call = Call(num_heads=8, num_kv_heads=2, head_dim=128, block_size=32, dtype="bfloat16")
    ampere = "reference" if unavailable_reason() else "triton"
    for target, expected in (("h200", "mosaic"), ("h100", "mosaic"), ("a100", ampere), ("b200", "reference")):
        with lowering_on(Mesh(np.asarray(devices(TARGETS[target], 1)), ("tensor",))):
            assert select_implementation("auto", call) == expected
