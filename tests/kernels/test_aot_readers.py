"""The readers of compiled programs, on short texts whose answers are plain."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.aot import TARGETS, Hlo, Thunks, compile_for_device, devices, lowering_on
from kernels_pallas.aot.hlo import shape_bytes
from kernels_pallas.aot.kernels import KernelResources, mosaic_resources, parse_ptxas

# With these jax keeps every program. None stands for a folder.
CACHE_SETTINGS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_min_compile_time_secs": 0,
}

PROGRAM = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_transpose (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %inner = bf16[4,8]{1,0} transpose(%p), dimensions={1,0}
  ROOT %out = bf16[8,4]{1,0} transpose(%inner), dimensions={1,0}, metadata={op_name="jit(step)/outer"}
}

%rare (x: (f32[16])) -> f32[64] {
  %x = (f32[16]{0}) parameter(0)
  %part = f32[16]{0} get-tuple-element(%x), index=0
  ROOT %whole = f32[64]{0} all-gather(%part), dimensions={0}, metadata={op_name="jit(step)/logprobs"}
}

%usual (y: (f32[16])) -> f32[64] {
  %y = (f32[16]{0}) parameter(0)
  %piece = f32[16]{0} get-tuple-element(%y), index=0
  ROOT %call = f32[64]{0} custom-call(%piece), custom_call_target="xla_ffi_python_gpu_callback", api_version=API_VERSION_FFI
}

ENTRY %main (w: bf16[8,4], z: f32[16], which: s32[]) -> f32[64] {
  %w = bf16[8,4]{1,0} parameter(0)
  %z = f32[16]{0} parameter(1)
  %which = s32[] parameter(2)
  %fusion = bf16[8,4]{1,0} fusion(%w), kind=kLoop, calls=%fused_transpose
  %copied = bf16[8,4]{0,1} copy(%w)
  %started = (f32[16]{0}, f32[16]{0}) all-reduce-start(%z), to_apply=%add, metadata={op_name="jit(step)/out"}
  %done = f32[16]{0} all-reduce-done(%started)
  %kernel = f32[16]{0} custom-call(%done), custom_call_target="mosaic_gpu_v2"
  %arguments = (f32[16]{0}) tuple(%kernel)
  ROOT %choice = f32[64]{0} conditional(%which, %arguments, %arguments), branch_computations={%rare, %usual}
}
"""


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("bf16[8,4]{1,0}", 64),
        ("f32[]", 4),
        ("(s32[3]{0}, pred[5]{0})", 17),
        ("f8e4m3fn[10]{0}", 10),
        ("u4[6]{0}", 3),
        ("token[]", 0),
    ],
)
def test_bytes_of_a_shape(shape: str, expected: int):
    assert shape_bytes(shape) == expected


def test_collectives_say_whether_they_always_run():
    found = [(c.kind, c.num_bytes, c.always, c.origin) for c in Hlo(PROGRAM).collectives]
    assert sorted(found) == [
        ("all-gather", 256, False, "jit(step)/logprobs"),
        ("all-reduce", 128, True, "jit(step)/out"),
    ]


def test_copies_are_those_that_are_stored():
    copies = Hlo(PROGRAM).copies(64)
    # Not the transposition in the middle of the fusion, which goes nowhere.
    assert sorted((copy.shape, copy.origin) for copy in copies) == [
        ("bf16[8,4]{0,1}", "copied"),
        ("bf16[8,4]{1,0}", "jit(step)/outer"),
    ]
    assert Hlo(PROGRAM).copies(65) == []


def test_calls_of_the_host():
    hlo = Hlo(PROGRAM)
    assert hlo.custom_calls == {"mosaic_gpu_v2": 1, "xla_ffi_python_gpu_callback": 1}
    assert hlo.host_calls == ["xla_ffi_python_gpu_callback"]


def test_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="no entry"):
        Hlo("HloModule nothing\n")


def test_thunks():
    inside = "000: kCommandBuffer [source | sink] \n    001: kCustomKernel [source] fusion\n    002: kWhile [prev]\n"
    assert Thunks(inside).kinds == ["kCommandBuffer"]
    assert Thunks(inside).num_kernels == 1
    assert not Thunks(inside).waits_for_device
    outside = "000: kCommandBuffer [source] \n    001: kCustomKernel [source] fusion\n003: kConditional [prev]\n  true_branch:\n"
    assert Thunks(outside).kinds == ["kCommandBuffer", "kConditional"]
    assert Thunks(outside).waits_for_device


PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode' for 'sm_90a'
ptxas info    : Function properties for decode
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 128 registers, used 6 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'merge' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers
"""


def test_what_the_assembler_says(tmp_path: Path):
    assert parse_ptxas(PTXAS) == [KernelResources("decode", 128, 40, 1024), KernelResources("merge", 24, 0, 0)]
    assert mosaic_resources(tmp_path) == []
    (tmp_path / "kernel_0.ptxas").write_text(PTXAS)
    launch = "%7 = gpu.launch async [%5] blocks(%a, %b, %c) in (%d = %c8, %e = %c97, %f = %c1) threads(%g, %h, %i) in "
    launch += "(%j = %c256, %k = %c1, %l = %c1) dynamic_shared_memory_size %c84040_i32 {"
    earlier = launch.replace("%c256", "%threads").replace("%c84040_i32", "%bytes")
    (tmp_path / "kernel_0.mlir-passes.log").write_text(f"module @kernel {{\n  {earlier}\n  {launch}\n")
    kernels = mosaic_resources(tmp_path)
    assert [(kernel.shared_bytes, kernel.threads) for kernel in kernels] == [(1024 + 84040, 256), (84040, 256)]


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks"),
    [
        (128, 84041, 256, 2),  # 2 * 256 * 128 registers are all that there are
        (129, 84041, 256, 1),  # 136 a thread, for they come by eights
        (96, 84041, 256, 2),  # registers for 2.7 blocks
        (64, 113 * 1024, 256, 2),
        (64, 113 * 1024 + 1, 256, 1),  # 228 KiB less one a block
        (64, 227 * 1024 + 1, 256, 0),
        (32, 1024, 384, 5),  # of 2048 threads
        (168, 1024, 384, 1),
    ],
)
def test_blocks_that_share_a_core(registers: int, shared: int, threads: int, blocks: int):
    assert KernelResources("", registers, 0, shared, threads).blocks_per_core(TARGETS["h200"]) == blocks


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_description_names_its_device(name: str):
    target = TARGETS[name]
    text = target.description()
    assert target.device_kind in text
    assert text.count("{") == text.count("}")
    assert ("ACCELERATED_FEATURES" in text) == (target.compute_capability[0] >= 9)


@pytest.mark.aot
def test_programs_are_not_kept_and_can_be_compiled_again(tmp_path):
    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    try:
        for name, value in CACHE_SETTINGS.items():
            jax.config.update(name, str(tmp_path) if value is None else value)
        mesh = Mesh(np.asarray(devices(TARGETS["h200"])), ("one",))
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        for _ in range(2):
            with lowering_on(mesh):
                assert compile_for_device(jax.jit(lambda x: x @ x + 1).lower(x)).seconds > 0
        assert list(tmp_path.iterdir()) == []
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()
