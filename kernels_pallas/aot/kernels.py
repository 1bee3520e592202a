"""Registers, spills and shared memory of kernels, from what NVIDIA's assembler says of them."""

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from kernels_pallas.aot.targets import Target

# A launch in Mosaic's module: the threads of a block along x, which is all of them, and its dynamic shared memory.
_LAUNCH = re.compile(r"gpu\.launch .* threads\(.*\) in \(\S+ = %c(\d+),.*dynamic_shared_memory_size %c(\d+)_i32")


@dataclass(frozen=True)
class KernelResources:
    """What one kernel needs.

    Attributes:
        registers: of a thread.
        spill_bytes: of a thread's registers kept in memory, written and read.
        shared_bytes: shared memory of a block; of kernels that XLA wrote without what a launch asks for beside the static part.
        threads: of a block; None where the launch is not known.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int | None = None

    def blocks_per_core(self, target: Target) -> int:
        """Blocks that share a core of a GPU at a time, by registers, shared memory and threads; 0 if one is too large.

        Registers are dealt out to warps of 32 threads, 8 a thread at a time, and each block takes another KiB of shared memory
        (CUDA C++ Programming Guide, the tables of compute capabilities 8 to 10).
        """
        assert self.threads is not None, f"the launch of {self.name} is not known"
        registers = -(-self.registers // 8) * 8
        warps = -(-self.threads // 32)
        return min(
            65536 // (registers * 32 * warps),
            target.shared_memory_per_core // (self.shared_bytes + 1024)
            if self.shared_bytes <= target.shared_memory_per_block
            else 0,
            2048 // self.threads,
        )


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
        # The listing knows static shared memory alone; what a launch asks for beside it is in the module that was compiled, of
        # which the log has a copy after each pass: the first to have the sizes as constants will do.
        with listing.with_suffix(".mlir-passes.log").open(errors="replace") as log:
            threads, dynamic = next(launch.groups() for line in log if (launch := _LAUNCH.search(line)))
        for kernel in parse_ptxas(text):
            found.append(replace(kernel, shared_bytes=kernel.shared_bytes + int(dynamic), threads=int(threads)))
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
