"""What the Triton kernels need of an A100, an L40S and an H200: registers, no spills, shared memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.aot import TARGETS, compile_for_device, devices, lowering_on
from kernels_pallas.aot.triton_kernels import triton_code, triton_resources
from kernels_pallas.kv_cache_write import write_kv
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.triton_call import unavailable_reason

pytestmark = [pytest.mark.aot, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]
NUM_BLOCKS = 1024
L40S = dataclasses.replace(
    TARGETS["a100"],
    name="l40s",
    device_kind="NVIDIA L40S",
    compute_capability=(8, 9),
    num_cores=142,
    lanes_per_core=128,
    shared_memory_per_core=100 * 1024,
    shared_memory_per_block=99 * 1024,
)
FP8 = jnp.float8_e4m3fn
DEVICES = {"a100": TARGETS["a100"], "l40s": L40S, "h200": TARGETS["h200"]}


def lower_attention(target, shape, *, decode_only, dtype=jnp.bfloat16, cache_dtype=None, sinks=False, **options):
    """A step that writes into a donated cache and attends to it, lowered; `shape` as block size, heads, KV heads, head size."""
    block_size, heads, kv_heads, head_dim = shape
    mesh = Mesh(np.asarray(devices(DEVICES[target], 1)), ("tensor",))

    def shaped(*sizes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    rows, tokens = 64, 64 if decode_only else 512
    scales = {} if cache_dtype != FP8 else {name: shaped(kv_heads, dtype=jnp.float32) for name in ("k_scale", "v_scale")}

    def step(cache, scales, q, k, v, slots, *integers):
        cache = write_kv(cache, k, v, slots, **scales)
        return cache, paged_attention(
            q,
            cache,
            *integers,
            scale=head_dim**-0.5,
            decode_only=decode_only,
            implementation="triton",
            sinks=jnp.zeros(heads, jnp.float32) if sinks else None,
            **scales,
            **options,
        )

    kv = shaped(tokens, kv_heads, head_dim, dtype=dtype)
    cache = shaped(NUM_BLOCKS, 2, kv_heads, block_size, head_dim, dtype=cache_dtype or dtype)
    integers = (shaped(rows, 4096 // block_size), shaped(rows), shaped(rows + 1), shaped())
    with lowering_on(mesh):
        step = jax.jit(step, donate_argnums=0)
        return step.lower(cache, scales, shaped(tokens, heads, head_dim, dtype=dtype), kv, kv, shaped(tokens), *integers)


# device, (block size, heads, KV heads, head size), options
CASES = [
    ("l40s", (16, 9, 3, 64), {}),
    ("h200", (16, 16, 2, 128), {}),
    ("a100", (32, 32, 8, 128), {"cache_dtype": FP8}),
    ("l40s", (32, 32, 8, 128), {"cache_dtype": FP8}),
    *(
        pytest.param(target, shape, options, marks=pytest.mark.slow)
        for target in DEVICES
        for shape, options in [
            ((32, 32, 8, 128), {}),
            ((64, 64, 8, 128), {"sliding_window": 1024}),
            ((16, 64, 8, 64), {"sliding_window": 128, "sinks": True}),
            ((16, 16, 8, 256), {"logit_soft_cap": 50.0, "sliding_window": 4096}),
            ((32, 8, 2, 80), {}),
            ((32, 8, 2, 80), {"dtype": jnp.float32, "sliding_window": 500, "logit_soft_cap": 30.0, "sinks": True}),
            ((16, 8, 2, 192), {"sliding_window": 500}),
            ((16, 8, 2, 48), {"dtype": jnp.float32}),
            ((32, 8, 2, 64), {"dtype": jnp.float32, "sliding_window": 100}),
            ((32, 32, 8, 128), {"dtype": jnp.float32}),
            ((32, 16, 2, 256), {"dtype": jnp.float32, "logit_soft_cap": 30.0, "sinks": True}),
            ((32, 16, 1, 96), {"sinks": True}),
            ((32, 32, 8, 128), {"max_decode_queries": 8}),
            ((32, 16, 1, 256), {"max_decode_queries": 8}),
            ((32, 32, 8, 128), {"dtype": jnp.float16, "logit_soft_cap": 30.0}),
            ((64, 64, 8, 128), {"cache_dtype": FP8, "sliding_window": 1024}),
            ((16, 64, 8, 64), {"cache_dtype": FP8, "sliding_window": 128, "sinks": True}),
            ((16, 16, 8, 256), {"cache_dtype": FP8, "logit_soft_cap": 50.0, "sliding_window": 4096}),
            ((32, 8, 2, 80), {"cache_dtype": FP8}),
            ((16, 8, 2, 192), {"cache_dtype": FP8, "sliding_window": 500}),
            ((16, 8, 2, 48), {"cache_dtype": FP8, "dtype": jnp.float32}),
            ((32, 8, 2, 128), {"cache_dtype": FP8, "dtype": jnp.float32, "sliding_window": 500, "sinks": True}),
            ((32, 32, 8, 128), {"cache_dtype": FP8, "dtype": jnp.float32}),
            ((32, 32, 8, 128), {"cache_dtype": FP8, "dtype": jnp.float16, "logit_soft_cap": 30.0}),
            ((32, 32, 8, 128), {"cache_dtype": FP8, "max_decode_queries": 8}),
            ((32, 16, 1, 256), {"cache_dtype": FP8, "max_decode_queries": 8}),
        ]
    ),
]


@pytest.mark.parametrize(("target", "shape", "options"), CASES)
def test_no_register_is_spilled(target, shape, options):
    kernels = triton_resources(lower_attention(target, shape, decode_only=False, **options).as_text())
    assert [kernel.name for kernel in kernels] == ["decode_kernel", "merge_kernel", "prefill_kernel"]
    for kernel in kernels:
        assert kernel.spill_bytes == 0
        assert kernel.shared_bytes <= DEVICES[target].shared_memory_per_block


@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, FP8])
def test_two_decode_blocks_share_a_core(cache_dtype):
    lowered = lower_attention("a100", (32, 32, 8, 128), decode_only=True, cache_dtype=cache_dtype)
    decode, _ = triton_resources(lowered.as_text())
    # Two tiles of K and two of V, so that one is on its way while the other is worked on. A block costs a KiB of its own.
    tile = 64 * 128 * jnp.dtype(cache_dtype).itemsize
    # 8-bit tiles are widened into places of their own.
    widened = 2 * 64 * 128 * 2 if cache_dtype == FP8 else 0
    assert decode.shared_bytes >= 4 * tile + widened
    assert 2 * (decode.shared_bytes + 1024) <= TARGETS["a100"].shared_memory_per_core
    assert 2 * 128 * decode.registers <= 65536


def test_a_prefill_block_widens_each_number_once():
    """And not each of its 8 warps all of them. A thread converts its share of a tile of K and of V, in the code of two loops."""
    lowered = lower_attention("l40s", (32, 32, 8, 128), decode_only=False, cache_dtype=FP8)
    [code] = [code for name, code in triton_code(lowered.as_text()) if name == "prefill_kernel"]
    assert code.count("cvt.f32.f16") == 2 * (2 * 32 * 128) // 256


@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, FP8])
def test_the_cache_is_updated_in_place(cache_dtype):
    lowered = lower_attention("a100", (32, 32, 8, 128), decode_only=False, cache_dtype=cache_dtype)
    program = compile_for_device(lowered, kernels=True)
    assert {kernel.name for kernel in program.kernels} >= {"decode_kernel", "merge_kernel", "prefill_kernel"}
    cache_bytes = NUM_BLOCKS * 2 * 8 * 32 * 128 * jnp.dtype(cache_dtype).itemsize
    assert program.memory.alias_size_in_bytes == cache_bytes
    assert program.hlo.copies(512 * 32 * 128 * 2) == []
    # Nor does anything else make a second one of it, as looking at its bits might.
    assert program.memory.temp_size_in_bytes < cache_bytes / 4
    assert program.thunks.kinds == ["kCommandBuffer"]
