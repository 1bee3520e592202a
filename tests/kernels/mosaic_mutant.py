"""Runs a small batch through the Mosaic kernels with one line of one of them taken out: python mosaic_mutant.py MODULE LINE.

Ends with 0 if nothing was noticed, with 3 if the interpreter or the result says that something is wrong.
"""

import importlib
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from attention_spec import attention_spec, fp8_case, make_case

PACKAGE = "kernels_pallas.paged_attention"
# In the order in which they import each other.
MODULES = ("kernel_mosaic", "kernel_mosaic_fp8", "kernel_mosaic_decode", "kernel_mosaic_prefill", "mosaic")
ROOT = Path(__file__).parents[2]
WORDS = ("plgpu.barrier_wait(", "plgpu.barrier_arrive(", "plgpu.commit_smem(", "plgpu.wait_smem_to_gmem(")


def source(name: str) -> list[str]:
    return (ROOT / "kernels_pallas" / "paged_attention" / f"{name}.py").read_text().splitlines()


def synchronisations() -> list[tuple[str, int]]:
    """(module, line from 0) of every barrier, fence and wait."""
    return [
        (name, line)
        for name in MODULES
        for line, text in enumerate(source(name))
        if text.strip().startswith(WORDS) and text.strip().endswith(")")
    ]


def take_out(mutated: str, line: int) -> None:
    for name in MODULES:
        lines = source(name)
        if name == mutated:
            lines[line] = lines[line][: len(lines[line]) - len(lines[line].lstrip())] + "pass"
        module = importlib.import_module(f"{PACKAGE}.{name}")
        exec(compile("\n".join(lines), module.__file__, "exec"), vars(module))


def main(mutated: str, line: int) -> int:
    from test_mosaic import race_detection, run

    if mutated != "none":
        take_out(mutated, line)
    # Races are told of the last kernel alone, which is the decode kernel in a batch of decodes only.
    decode_only = mutated in ("kernel_mosaic_decode", "kernel_mosaic_fp8")
    rows = [(330, 1), (70, 1)] if decode_only else [(330, 1), (330, 40)]
    shape = {"heads": 4, "kv_heads": 1, "head_dim": 128, "block_size": 32, "pages": 12}
    rng, scales = np.random.default_rng(0), {}
    if mutated == "kernel_mosaic_fp8":
        case = fp8_case(rng, rows, dtype=ml_dtypes.bfloat16, **shape)
        plain, scales = case.plain(), case.scales()
    else:
        case = plain = make_case(rng, rows, dtype=ml_dtypes.bfloat16, **shape)
    sinks = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    try:
        with race_detection():
            out = run(case, decode_only=decode_only, sinks=sinks, **scales)
    except Exception as error:  # any report of the interpreter is what is looked for
        print(f"reported: {type(error).__name__}: {error}"[:500])
        return 3
    wrong = np.abs(out - attention_spec(plain, scale=128**-0.5, sinks=sinks)).max()
    print(f"largest error {wrong}")
    return 0 if wrong < (0.05 if scales else 0.02) else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
