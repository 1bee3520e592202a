"""Registers, spills and shared memory of kernels, from what NVIDIA's assembler says of them."""

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KernelResources:
    """What one kernel needs.

    Attributes:
        registers: of a thread.
        spill_bytes: of a thread's registers kept in memory, written and read.
        shared_bytes: shared memory of a block, as far as it is known when compiling.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int


def parse_ptxas(text: str) -> list[KernelResources]:
    """The kernels in the output of `ptxas -v`."""
    found = []
    for part in re.split(r"(?=Compiling entry function)", text):
        name = re.search(r"Compiling entry function '([^']+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        if name is None or registers is None:
            continue
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        shared = re.search(r"(\d+) bytes smem", part)
        found.append(
            KernelResources(
                name.group(1),
                int(registers.group(1)),
                sum(map(int, spills.groups())) if spills else 0,
                int(shared.group(1)) if shared else 0,
            )
        )
    return found


def mosaic_resources(folder: Path) -> list[KernelResources]:
    """Of the Mosaic GPU kernels compiled while `folder` was MOSAIC_GPU_DUMP_TO."""
    found = []
    for listing in sorted(folder.glob("*.ptxas")):
        text = listing.read_text(errors="replace")
        # The listing knows static shared memory alone; what a launch asks for beside it is in the compiler's log.
        log = listing.with_suffix(".mlir-passes.log")
        dynamic = re.search(r"smem_bytes = (\d+)", log.read_text(errors="replace")) if log.exists() else None
        for kernel in parse_ptxas(text):
            shared = kernel.shared_bytes + (int(dynamic.group(1)) if dynamic else 0)
            found.append(KernelResources(kernel.name, kernel.registers, kernel.spill_bytes, shared))
    return found


def ptx_resources(folder: Path) -> list[KernelResources]:
    """Of the kernels that XLA itself wrote, Triton's included: their code in `folder`, put through the assembler."""
    ptxas = find_ptxas()
    if ptxas is None:
        raise RuntimeError("NVIDIA's assembler ptxas was not found: pip install 'jaxllm[aot]'")

    def run(path: Path) -> list[KernelResources]:
        target = re.search(r"\.target (sm_\w+)", path.read_text())
        arch = target.group(1) if target else "sm_90a"
        command = [ptxas, "-v", f"-arch={arch}", "-o", os.devnull, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return parse_ptxas(done.stdout + done.stderr)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # Mosaic's own files have been through the assembler already.
        files = [path for path in sorted(folder.glob("*.ptx")) if not path.with_suffix(".ptxas").exists()]
        return [kernel for kernels in pool.map(run, files) for kernel in kernels]


def find_ptxas() -> str | None:
    """The assembler in NVIDIA's wheels, else on the search path."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    for place in ("cu13/bin/ptxas", "cuda_nvcc/bin/ptxas"):
        if (packages / place).exists():
            return str(packages / place)
    return shutil.which("ptxas")
