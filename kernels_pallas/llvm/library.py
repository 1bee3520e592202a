"""Compiles kernels for the processor that is here, keeps what was compiled on disk, and tells XLA of them."""

import functools
import hashlib
import importlib.util
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from kernels_pallas.llvm.code import Module
from kernels_pallas.llvm.foreign_call import capsule

_NEEDED = ("avx512f", "avx512dq", "avx512bw", "avx512vl")
_lock = threading.Lock()
_kernels: dict[str, tuple[Any, bytes]] = {}  # that are registered, by target: what holds them, and their machine code
_directory: Path | None = None
_offered: set[tuple[str, Path | None]] = set()  # kernels, and the folders that were to keep them


def keep_compiled_in(directory: str | None) -> None:
    """Where compiled kernels are kept between runs; None: nowhere."""
    global _directory
    _directory = None if directory is None else Path(directory)


@functools.cache
def unavailable_reason(dtype: str) -> str | None:
    """Why no kernel for numbers of this type can be compiled for this machine's processor; None if one can."""
    if dtype not in ("float32", "bfloat16"):
        return f"it computes in float32 and bfloat16, not {dtype}"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it needs Linux on an x86-64 processor, not {sys.platform} on {platform.machine()}"
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    for feature in (*_NEEDED, *(("avx512bf16",) if dtype == "bfloat16" else ())):
        if not features.get(feature):
            return f"this processor has no {feature}"
    return None


def register(name: str, write: Callable[[Module, str], None]) -> str:
    """Compile a kernel, if this process has not yet, and tell XLA of it.

    Args:
        name: of the kernel, for people.
        write: writes into a module the function that XLA calls, under the name that it is given.

    Returns:
        The name to call it by. It depends on the kernel's code, so a program never finds another one under it.
    """
    with _lock:
        target, compiled = _register(name, write)
        # A folder that was named since then lacks it.
        if (target, _directory) not in _offered:
            _offered.add((target, _directory))
            _write(_path_of(target), compiled)
        return target


@functools.cache
def _register(name: str, write: Callable[[Module, str], None]) -> tuple[str, bytes]:
    """The name to call it by, and its machine code."""
    module = Module()
    write(module, "call")
    text = str(module)
    target = f"jaxllm_{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    # XLA takes a name once, and threads that begin together can come with two writers of the same text.
    if target not in _kernels:
        compiled = _compiled(text, target)
        engine = _loaded(compiled)
        jax.ffi.register_ffi_target(target, capsule(engine.get_function_address("call")), platform="cpu")
        _kernels[target] = engine, compiled
    return target, _kernels[target][1]


def _compiled(text: str, target: str) -> bytes:
    """Machine code, that of an earlier run if it was kept."""
    compiled = _read(_path_of(target))
    if compiled is None:
        machine = _machine()
        compiled = machine.emit_object(_optimized(text, machine))
    return compiled


def _loaded(compiled: bytes) -> Any:
    """An engine, which holds the code as long as it lives."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(compiled))
    engine.finalize_object()
    return engine


def _processor() -> tuple[str, str, str]:
    """What code is compiled for: system, processor, features."""
    import llvmlite.binding as llvm

    # LLVM avoids the widest registers on some processors, for the clock's sake; here everything is in them.
    features = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), features


def _machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple, cpu, features = _processor()
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True, codemodel="jitdefault")


def _path_of(target: str) -> Path | None:
    """Where a kernel's machine code is kept; None for nowhere."""
    if _directory is None:
        return None
    import llvmlite

    # How this module has it optimized counts too.
    facts = (*_processor(), llvmlite.__version__, Path(__file__).read_text())
    kind = hashlib.sha256(" ".join(facts).encode()).hexdigest()[:16]
    return _directory / f"{target}_{kind}.o"


def _optimized(text: str, machine: Any) -> Any:
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(text)
    module.verify()
    # The code has its vectors already.
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def _read(path: Path | None) -> bytes | None:
    """What was kept; None if nothing was, or not all of it can be read. Ends in a digest of the rest."""
    try:
        content = path.read_bytes() if path is not None else b""
    except OSError:
        return None
    code, digest = content[:-32], content[-32:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(path: Path | None, code: bytes) -> None:
    """Keep it for the next time, whole or not at all. A folder that cannot be written to is not worth an error."""
    if path is None or _read(path) == code:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            whole.write_bytes(code + hashlib.sha256(code).digest())
            os.replace(whole, path)
    except OSError:
        return
