"""Compiling kernels, and keeping them on disk."""

import ctypes
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.llvm import library
from kernels_pallas.llvm.foreign_call import define_call
from kernels_pallas.llvm.library import keep_compiled_in, register, unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason("float32") is not None, reason=str(unavailable_reason("float32")))

ROOT = Path(__file__).parents[2]


@pytest.fixture
def compiled(monkeypatch):
    """The texts that are compiled from here on."""
    texts, optimized = [], library._optimized

    def recording(text, machine):
        texts.append(text)
        return optimized(text, machine)

    monkeypatch.setattr(library, "_optimized", recording)
    return texts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "_directory", tmp_path / "some" / "where")
    return tmp_path / "some" / "where"


def text_of(number):
    return f"define i64 @call() {{ ret i64 {number} }}"


def compile_and_keep(number, target="some"):
    """What its function gives."""
    compiled = library._compiled(text_of(number), target)
    library._write(library._path_of(target), compiled)
    engine = library._loaded(compiled)
    return ctypes.CFUNCTYPE(ctypes.c_int64)(engine.get_function_address("call"))()


def test_what_was_compiled_is_read_and_not_compiled_again(folder, compiled):
    assert compile_and_keep(5, "five") == 5
    (file,) = folder.iterdir()
    assert (file.name.startswith("five_"), file.suffix) == (True, ".o")
    content = file.read_bytes()
    assert compile_and_keep(5, "five") == 5
    assert compile_and_keep(6, "six") == 6
    assert compiled == [text_of(5), text_of(6)]
    assert file.read_bytes() == content


@pytest.mark.parametrize("damage", ["empty", "truncated", "changed", "of another time"])
def test_a_damaged_file_is_compiled_anew_and_replaced(folder, compiled, damage):
    compile_and_keep(5, "five")
    (file,) = folder.iterdir()
    content = file.read_bytes()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    file.write_bytes({"empty": b"", "truncated": content[:-1], "changed": bytes(changed)}.get(damage, b"x" * 100))
    assert compile_and_keep(5, "five") == 5
    assert len(compiled) == 2
    (file,) = folder.iterdir()
    compile_and_keep(5, "five")
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path, monkeypatch, compiled):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        monkeypatch.setattr(library, "_directory", place)
        assert compile_and_keep(5, "five") == 5
    assert len(compiled) == 3


def test_a_folder_in_the_place_of_the_file_is_no_error(folder, compiled):
    compile_and_keep(5, "five")
    (file,) = folder.iterdir()
    file.unlink()
    (file / "inside").mkdir(parents=True)
    assert compile_and_keep(5, "five") == 5
    assert [path.name for path in folder.iterdir()] == [file.name]


def test_nothing_is_kept_without_a_folder(monkeypatch, tmp_path, compiled):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(library, "_directory", None)
    keep_compiled_in(str(tmp_path / "kept"))
    keep_compiled_in(None)
    compile_and_keep(5, "five")
    compile_and_keep(5, "five")
    assert len(compiled) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_llvm_refuses_says_where(monkeypatch):
    monkeypatch.setattr(library, "_directory", None)
    with pytest.raises(RuntimeError, match=r"parsing error\n.*expected instruction opcode"):
        library._compiled("define void @call() { nonsense }", "nonsense")


def write_constant(module, name, number):
    def write(call, frame, operands, result):
        call.store(call.constant(number, "i32"), result.data)

    define_call(module, name, 0, write)


def test_threads_that_register_a_kernel_at_once_compile_it_once(compiled):
    """Each with a writer of its own, as the first calls of `functools.cache` can give them."""
    start = threading.Barrier(8)

    def register_one(_):
        start.wait()
        return register("constant", lambda module, name: write_constant(module, name, 41))

    with ThreadPoolExecutor(8) as pool:
        targets = set(pool.map(register_one, range(8)))
    assert len(compiled) == 1
    (target,) = targets
    assert target.startswith("jaxllm_constant_")
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((1,), jnp.int32))
    assert jax.jit(lambda: call())().tolist() == [41]


def test_a_folder_that_is_named_later_gets_the_kernel(folder, compiled):
    def write(module, name):
        write_constant(module, name, 42)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_directory", None)
        target = register("constant", write)
    assert not folder.exists()
    assert register("constant", write) == target
    (file,) = folder.iterdir()
    assert file.name.startswith(target)
    assert library._compiled("what is kept already", target) == library._kernels[target][1]
    assert len(compiled) == 1


def test_a_name_depends_on_the_code():
    one, two = (register("constant", lambda module, name, n=n: write_constant(module, name, n)) for n in (1, 2))
    assert one != two


IN_A_PROCESS = """
import sys
import numpy as np
from kernels_pallas.llvm import library, matmul
library.keep_compiled_in(sys.argv[1])
optimized = library._optimized
library._optimized = lambda *arguments: print("compiled") or optimized(*arguments)
weight = matmul.pack(np.arange(12, dtype=np.float32).reshape(3, 4))
print(np.asarray(matmul.packed_matmul(np.eye(3, dtype=np.float32), weight, 4)).tolist())
"""


def test_another_process_compiles_nothing(tmp_path):
    def run():
        command, environment = [sys.executable, "-c", IN_A_PROCESS, str(tmp_path)], {**os.environ, "JAX_PLATFORMS": "cpu"}
        return subprocess.run(
            command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
        ).stdout.splitlines()

    product = str(np.arange(12.0).reshape(3, 4).tolist())
    assert run() == ["compiled", product]
    assert run() == [product]
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    assert run() == ["compiled", product]


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "float8_e4m3fn"])
def test_other_types_are_refused(dtype):
    assert unavailable_reason(dtype) == f"it computes in float32 and bfloat16, not {dtype}"


@pytest.fixture
def fresh_reasons():
    unavailable_reason.cache_clear()
    yield
    unavailable_reason.cache_clear()


@pytest.mark.usefixtures("fresh_reasons")
def test_other_machines_are_refused(monkeypatch):
    import llvmlite.binding as llvm

    features = dict.fromkeys(("avx512f", "avx512dq", "avx512bw", "avx512vl"), True)
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
    assert unavailable_reason("float32") is None
    assert unavailable_reason("bfloat16") == "this processor has no avx512bf16"
    unavailable_reason.cache_clear()
    features["avx512vl"] = False
    assert unavailable_reason("float32") == "this processor has no avx512vl"
    unavailable_reason.cache_clear()
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    assert unavailable_reason("float32") == "llvmlite is not installed"
    unavailable_reason.cache_clear()
    monkeypatch.setattr(library.platform, "machine", lambda: "aarch64")
    assert unavailable_reason("float32") == "it needs Linux on an x86-64 processor, not linux on aarch64"
