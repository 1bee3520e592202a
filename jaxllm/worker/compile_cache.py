"""Compilation: the persistent cache, many programs at once, and a count of what is compiled when."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def enable_persistent_cache(directory: str | None) -> None:
    """Keep every compiled program in `directory`, however small or quick it was; None leaves jax's own setting."""
    if directory is None:
        return
    Path(directory).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


class CompileCounter:
    """Counts the programs that this process compiles, or loads from the persistent cache, from its start on.

    After warm-up nothing may: tests fail on it, production counts it.
    """

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)


@contextmanager
def count_compiles() -> Iterator[CompileCounter]:
    """Count the programs compiled inside a `with` block."""
    counter = CompileCounter()
    try:
        yield counter
    finally:
        counter.close()


def compile_all(
    jobs: Sequence[tuple[str, Callable[[], Any]]], progress: bool, workers: int | None = None
) -> list[jax.stages.Compiled]:
    """Compile programs in parallel threads.

    Args:
        jobs: a name for the progress bar, and a function that lowers and compiles one program.
        workers: threads; by default one a core, at most 16.

    Returns:
        What the functions return, in order.
    """
    workers = workers or min(16, os.cpu_count() or 1)
    with (
        ThreadPoolExecutor(workers, thread_name_prefix="compile") as pool,
        tqdm(total=len(jobs), desc="Compiling", unit="program", disable=not progress) as bar,
    ):

        def run(job: tuple[str, Callable[[], Any]]) -> Any:
            name, function = job
            compiled = function()
            bar.set_postfix_str(name, refresh=False)
            bar.update()
            return compiled

        return list(pool.map(run, jobs))
