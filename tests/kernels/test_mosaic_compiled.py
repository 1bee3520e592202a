"""The Mosaic GPU kernels, compiled for the H200: what they need of a core."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.aot import TARGETS, KernelResources, compile_for_device, devices, lowering_on
from kernels_pallas.paged_attention import paged_attention

pytestmark = pytest.mark.aot
KIB = 1024


def compiled(
    decode_only: bool,
    head_dim: int,
    group: int,
    block_size: int,
    window: int | None,
    cap: float | None = None,
    queries: int = 1,
    cache_dtype: jnp.dtype = jnp.bfloat16,
) -> list[KernelResources]:
    """The Mosaic kernels in attention of 64 rows, 8 KV heads."""
    mesh = Mesh(np.asarray(devices(TARGETS["h200"])), ("one",))
    tokens, rows = (64, 64) if decode_only else (512, 64)

    def shape(*sizes: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def attend(scale: jax.Array, *arrays: jax.Array) -> jax.Array:
        options = {"scale": head_dim**-0.5, "sliding_window": window, "logit_soft_cap": cap, "decode_only": decode_only}
        if cache_dtype != jnp.bfloat16:
            options |= {"k_scale": scale, "v_scale": scale}
        return paged_attention(*arrays, **options, max_decode_queries=queries, implementation="mosaic")

    q = shape(tokens, 8 * group, head_dim, dtype=jnp.bfloat16)
    cache = shape(1024, 2, 8, block_size, head_dim, dtype=cache_dtype)
    scale = shape(8, dtype=jnp.float32)
    with lowering_on(mesh):
        lowered = jax.jit(attend).lower(scale, q, cache, shape(rows, 64), shape(rows), shape(rows + 1), shape())
    program = compile_for_device(lowered, kernels=True)
    # No copy of the cache, nor of the half of it that holds keys or values.
    assert program.hlo.copies(1024 * 8 * block_size * head_dim * jnp.dtype(cache_dtype).itemsize) == []
    return [kernel for kernel in program.kernels if "mosaic" in kernel.name]


# (head size, query heads a KV head, block size, window, logit soft cap)
DECODES = [
    (128, 4, 32, None, None),
    (64, 8, 16, None, None),
    (128, 1, 16, 4096, None),
    *(
        pytest.param(head_dim, group, block_size, window, cap, marks=pytest.mark.slow)
        for head_dim, group, block_size in ((64, 1, 64), (80, 16, 16), (96, 4, 16), (128, 16, 16), (128, 8, 32), (128, 1, 64))
        for window, cap in ((None, None), (1024, None), (None, 30.0), (1024, 30.0))
        if (head_dim, group, block_size, window) != (128, 16, 16, 1024)
    ),
]


@pytest.mark.parametrize(("head_dim", "group", "block_size", "window", "cap"), DECODES)
def test_two_decode_blocks_share_a_core(head_dim: int, group: int, block_size: int, window: int | None, cap: float | None):
    [kernel] = compiled(True, head_dim, group, block_size, window, cap)
    assert kernel.spill_bytes == 0
    assert kernel.threads == 256
    # A query tile and two or four stages of K and V, of 64 rows each, and barriers of 8 bytes.
    stages = 4 if head_dim == 64 else 2
    assert kernel.shared_bytes == pytest.approx((1 + 2 * stages) * 64 * head_dim * 2, abs=4 * KIB)
    assert kernel.blocks_per_core(TARGETS["h200"]) == 2


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "window", "queries"),
    [(256, 4, 32, None, 1), (256, 4, 16, 1024, 1), (128, 4, 32, None, 4), (128, 4, 16, 1024, 4), (128, 16, 16, 1024, 1)],
)
@pytest.mark.slow
def test_a_decode_block_alone_on_a_core(head_dim: int, group: int, block_size: int, window: int | None, queries: int):
    """Sums of 256 values a row, positions of 64 rows, or a window with small blocks and many heads leave no registers for two."""
    [kernel] = compiled(True, head_dim, group, block_size, window, queries=queries)
    assert kernel.spill_bytes == 0
    assert kernel.blocks_per_core(TARGETS["h200"]) == 1


@pytest.mark.parametrize(("head_dim", "group", "block_size", "window"), [(128, 4, 32, None), (64, 8, 16, 4096)])
def test_mixed(head_dim: int, group: int, block_size: int, window: int | None):
    kernels = compiled(False, head_dim, group, block_size, window)
    # The decode rows' and the chunks'. Where jax compiles both at a time (0.12 does), one listing may replace the other.
    assert 1 <= len(kernels) <= 2
    assert not any(kernel.spill_bytes for kernel in kernels)
    assert all(kernel.blocks_per_core(TARGETS["h200"]) >= 1 for kernel in kernels)
    # The chunks' kernel has two tiles of queries and two of results, and three stages.
    assert max(kernel.shared_bytes for kernel in kernels) == pytest.approx(10 * 64 * head_dim * 2, abs=4 * KIB)


# (decode only, head size, group, block size, window)
FP8 = [
    (False, 128, 4, 32, None),
    pytest.param(True, 128, 1, 64, 4096, marks=pytest.mark.slow),
    pytest.param(False, 64, 8, 16, 4096, marks=pytest.mark.slow),
    pytest.param(False, 80, 4, 32, None, marks=pytest.mark.slow),
    pytest.param(False, 96, 2, 32, None, marks=pytest.mark.slow),
    pytest.param(False, 256, 4, 64, None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("decode_only", "head_dim", "group", "block_size", "window"), FP8)
def test_fp8_cache(decode_only: bool, head_dim: int, group: int, block_size: int, window: int | None):
    kernels = compiled(decode_only, head_dim, group, block_size, window, cache_dtype=jnp.float8_e4m3fn)
    assert kernels
    assert not any(kernel.spill_bytes for kernel in kernels)
    assert all(kernel.shared_bytes <= 227 * KIB for kernel in kernels)
    if head_dim <= 128:
        assert min(kernel.shared_bytes for kernel in kernels) <= 113 * KIB
