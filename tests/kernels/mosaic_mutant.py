"""The Mosaic kernels with one line of synchronisation taken out, in the interpreter on a small batch each."""

import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from attention_spec import attention_spec, fp8_case, make_case

from kernels_pallas import compat
from kernels_pallas.paged_attention.reference import Options

PACKAGE = "kernels_pallas.paged_attention"
SHARED = "kernel_mosaic"
# "fp8" is the decode kernel with the producer of 8-bit caches.
KERNELS = ("decode", "prefill", "fp8")
WORDS = ("plgpu.barrier_wait(", "plgpu.barrier_arrive(", "plgpu.commit_smem(", "plgpu.wait_smem_to_gmem(")
# For so long all threads must have slept, for they do so for moments too.
HANG_SECONDS = 1.0


@dataclass(frozen=True)
class Mutant:
    """A kernel without the statement on one line, or with it under a condition.

    Attributes:
        line: from 0; None for none.
        only_if: when the statement is still executed.
    """

    kernel: str
    module: str = SHARED
    line: int | None = None
    only_if: str = ""

    def __str__(self) -> str:
        if self.line is None:
            return f"{self.kernel}-whole"
        text = source(self.module)[self.line].strip()
        return f"{self.kernel}-{self.line + 1}-{text}" + (f"-only-if-{self.only_if}" if self.only_if else "")


def source(module: str) -> list[str]:
    return Path(importlib.import_module(f"{PACKAGE}.{module}").__file__ or "").read_text().splitlines()


def mutants(kernel: str) -> list[Mutant]:
    """One for each barrier, fence and wait that a kernel goes through."""
    found = []
    # What the kernel of 8-bit caches shares with the decode kernel counts there.
    for module in (f"{SHARED}_fp8",) if kernel == "fp8" else (SHARED, f"{SHARED}_{kernel}"):
        for line, text in enumerate(source(module)):
            if text.strip().startswith(WORDS):
                assert text.rstrip().endswith(")"), f"a synchronisation must be a line of its own: {text}"
                found.append(Mutant(kernel, module, line))
                # One line for the places of K and those of V: each is needed.
                if "free.at[slot]" in text and "barrier_wait" in text:
                    found += [Mutant(kernel, module, line, "plane == 0"), Mutant(kernel, module, line, "plane == 1")]
    return found


@contextmanager
def mutated(mutant: Mutant) -> Iterator[ModuleType]:
    """The kernel's module, made anew with that line changed; what is imported otherwise stays as it is."""
    # In the order in which they import each other.
    own = ("fp8", "decode") if mutant.kernel == "fp8" else (mutant.kernel,)
    names = [f"{PACKAGE}.{SHARED}", *(f"{PACKAGE}.{SHARED}_{name}" for name in own)]
    before = {name: importlib.import_module(name) for name in names}
    try:
        for name in names:
            lines = source(name.rpartition(".")[2])
            if mutant.line is not None and name.endswith(f".{mutant.module}"):
                text = lines[mutant.line]
                indent = text[: len(text) - len(text.lstrip())]
                lines[mutant.line] = indent + (f"if {mutant.only_if}: {text.strip()}" if mutant.only_if else "pass")
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            exec(compile("\n".join(lines), spec.origin, "exec"), vars(module))
        yield sys.modules[names[-1]]
    finally:
        sys.modules.update(before)


def others_run() -> bool:
    """Whether a thread of this process other than the calling one runs or could, given a processor."""
    own = threading.get_native_id()
    for task in Path("/proc/self/task").iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended
            continue
        if state != "S" and int(task.name) != own:
            return True
    return False


class Watch:
    """Ends an interpreted kernel that races, or whose threads all wait; `report` says which."""

    def __init__(self) -> None:
        self.report = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        seen, since = None, time.monotonic()
        while not self.report and not self._over.wait(0.05):
            so_far = compat.interpreted_so_far()
            if so_far is None or so_far != seen or others_run():
                seen, since = so_far, time.monotonic()
            elif time.monotonic() - since > HANG_SECONDS:
                self.report = "hang"
            if so_far is not None and compat.races_found():
                self.report = "race"
        if self.report:
            compat.abort_interpreter(self.report)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()


def report_on(mutant: Mutant) -> str:
    """What is noticed: "race", "hang", "error" for another report of the interpreter, "values", or "" for nothing."""
    run = {"decode": run_decode, "prefill": run_prefill, "fp8": run_fp8}[mutant.kernel]
    with mutated(mutant) as module, Watch() as watch:
        try:
            wrong = run(module)
        except Exception as error:  # any report of the interpreter is what is looked for
            print(f"{type(error).__name__}: {error}"[-500:])
            wrong = None
        else:
            if not watch.report and compat.races_found():
                watch.report = "race"
        finally:
            compat.reset_interpreter()
    if watch.report:
        return watch.report
    if wrong is None:
        return "error"
    return "" if wrong < 0.02 else "values"


SHAPE = {"kv_heads": 1, "head_dim": 64, "block_size": 32, "dtype": ml_dtypes.bfloat16}
SCALE = SHAPE["head_dim"] ** -0.5


def run_fp8(module: ModuleType) -> float:
    """The same with a cache of 8-bit numbers."""
    return run_decode(module, is_fp8=True)


def run_decode(module: ModuleType, *, is_fp8: bool = False) -> float:
    """Two rows of four queries, an item each: one ends inside a tile, one with it; the window cuts the last tile of both.

    Returns the largest error.
    """
    window, queries = 200, 4
    make = fp8_case if is_fp8 else make_case
    case = make(np.random.default_rng(0), [(330, queries), (320, queries)], heads=1, pages=12, **SHAPE)
    plain, scales = (case.plain(), case.scales()) if is_fp8 else (case, {})
    q, cache, tables, lens, _, _ = case.arrays()
    work = jnp.asarray([[0, 1, 6, queries], [1, 1, 5, queries]], jnp.int32)

    def attend(*arrays: jax.Array) -> jax.Array:
        return module.decode_parts(
            *arrays,
            group=1,
            single_query=False,
            tile=64,
            stages=2,
            raw_tiles=3 if is_fp8 else 0,
            k_scale=scales.get("k_scale"),
            options=Options(SCALE, window, None),
            interpret=compat.interpreter(detect_races=True),
        )[0]

    rows = jnp.pad(q.reshape(2, 1, queries, -1), ((0, 0), (0, 0), (0, 8 - queries), (0, 0)))
    parts = np.asarray(jax.block_until_ready(jax.jit(attend)(rows, cache, tables, lens, work)), np.float64)
    expected = attention_spec(plain, scale=SCALE, sliding_window=window).reshape(2, queries, -1)
    # The decode kernel leaves the scale of the values to its caller.
    return float(np.abs(parts[:, 0, :queries] * np.asarray(scales.get("v_scale", 1.0)) - expected).max())


def run_prefill(module: ModuleType) -> float:
    """A chunk whose last tile is ragged, for two warpgroups of which the second has some of its queries. With sinks."""
    group = 4
    case = make_case(np.random.default_rng(0), [(330, 24)], heads=group, pages=12, **SHAPE)
    q, cache, tables, lens, starts, _ = case.arrays()
    sinks = np.arange(group, dtype=np.float32)

    def attend(*arrays: jax.Array) -> jax.Array:
        return module.prefill_rows(
            *arrays,
            jnp.asarray([[0, 0]], jnp.int32),
            jnp.asarray(sinks[None]),
            group=group,
            queries_per_warpgroup=16,
            consumers=2,
            tile=64,
            stages=2,
            raw_tiles=0,
            scales=None,
            options=Options(SCALE, None, None),
            interpret=compat.interpreter(detect_races=True),
        )

    rows = jnp.pad(q.reshape(1, -1, SHAPE["head_dim"]), ((0, 0), (0, 64), (0, 0)))
    out = np.asarray(jax.block_until_ready(jax.jit(attend)(rows, cache, tables, lens, starts)), np.float64)
    return float(np.abs(out[0, : 24 * group].reshape(24, group, -1) - attention_spec(case, scale=SCALE, sinks=sinks)).max())
