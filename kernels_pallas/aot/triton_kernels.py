"""Triton kernels in a compiled program: jax-triton puts their code into the program's own text."""

import os
import re
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kernels_pallas.aot.kernels import KernelResources, find_ptxas, parse_ptxas

_CALL = re.compile(r'\btriton_kernel_call_ffi\b.*?\bopaque = "((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2})|\\(.)", re.DOTALL)
# Fields of jaxlib's messages: TritonAnyKernelCall, TritonKernelCall in it, and in that TritonKernel.
_CALL_FIELD, _KERNEL, _NAME, _SHARED_BYTES, _PTX = 1, 1, 1, 3, 4


def triton_resources(program_text: str) -> list[KernelResources]:
    """Of each different Triton kernel in a program, put through NVIDIA's assembler.

    Args:
        program_text: optimized HLO or, before compilation, StableHLO.

    Raises:
        RuntimeError: if there are such kernels and no assembler.
        subprocess.CalledProcessError: if the assembler refuses one.
    """
    kernels = _kernels(program_text)
    ptxas = find_ptxas()
    if kernels and ptxas is None:
        raise RuntimeError("NVIDIA's assembler ptxas was not found: pip install 'jaxllm[aot]'")

    def read(kernel: dict[int, Any]) -> KernelResources:
        code = kernel[_PTX].decode()
        arch = re.search(r"\.target (sm_\w+)", code).group(1)
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(code)
            file.flush()
            command = [ptxas, "-v", f"-arch={arch}", "-o", os.devnull, file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        [found] = parse_ptxas(done.stdout + done.stderr)
        return KernelResources(kernel[_NAME].decode(), found.registers, found.spill_bytes, kernel.get(_SHARED_BYTES, 0))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sorted(pool.map(read, kernels), key=lambda kernel: kernel.name)


def triton_code(program_text: str) -> list[tuple[str, str]]:
    """Name and code, in PTX, of each different Triton kernel in a program; the argument as above."""
    return sorted((kernel[_NAME].decode(), kernel[_PTX].decode()) for kernel in _kernels(program_text))


def _kernels(program_text: str) -> list[dict[int, Any]]:
    """The fields of each different TritonKernel."""
    calls = {_unescape(match.group(1)) for match in _CALL.finditer(program_text)}
    return [_fields(_fields(_fields(zlib.decompress(call))[_CALL_FIELD])[_KERNEL]) for call in calls]


def _unescape(text: str) -> bytes:
    """The bytes of a string in HLO text."""
    plain = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}

    def replace(match: re.Match[bytes]) -> bytes:
        if match.group(1):
            return bytes.fromhex(match.group(1).decode())
        return plain.get(match.group(2), match.group(2))

    return _ESCAPE.sub(replace, text.encode("latin-1"))


def _fields(message: bytes) -> dict[int, Any]:
    """The fields of a protocol-buffers message by number; of repeated ones the last."""
    return dict(_read_fields(message))


def _read_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        else:
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            yield number, message[at : at + size]
            at += size
