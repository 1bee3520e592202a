"""Compilation: the persistent cache, many programs at once, and a count of what is compiled when."""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from kernels_pallas.llvm.library import keep_compiled_in

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def enable_persistent_cache(directory: str | None) -> None:
    """Keep every compiled program in `directory`, however small or quick it was; None leaves jax's own setting."""
    keep_compiled_in(directory)
    if directory is None:
        return
    Path(directory).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def forget_programs() -> None:
    """Have jax compile, or load, everything anew: what is in its memory would not come into a new cache directory."""
    jax.clear_caches()


class CompileCounter:
    """Counts the programs that this process compiles, or loads from the persistent cache, from its start on.

    After warm-up nothing may: tests fail on it, production counts it. What is compiled beside the steps, and holds none of them
    up, is `uncounted`.
    """

    def __init__(self) -> None:
        self.count = 0
        self._uncounted_threads: set[int] = set()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _COMPILE_EVENT and threading.get_ident() not in self._uncounted_threads:
            self.count += 1

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count what this thread compiles."""
        thread = threading.get_ident()
        self._uncounted_threads.add(thread)
        try:
            yield
        finally:
            self._uncounted_threads.discard(thread)

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


class BackgroundCompiler:
    """Makes programs beside an engine that serves already, one after the other in threads of low priority.

    Args:
        jobs: a name, and what to do, in this order. One that raises is logged: the engine can do without its program.
    """

    def __init__(self, jobs: Sequence[tuple[str, Callable[[], Any]]], workers: int) -> None:
        self._results: list[Future[None]] = [Future() for _ in jobs]
        self._waiting = deque((*job, result) for job, result in zip(jobs, self._results, strict=True))
        self._threads = [threading.Thread(target=_work, args=(self._waiting,), name=f"compile_{i}") for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Return when all programs are made. Raises what the first that failed has raised."""
        for result in self._results:
            result.result()

    def give_up(self) -> None:
        """Make no further program. Does not wait for one that is being compiled: XLA cannot be stopped."""
        self._waiting.clear()
        for result in self._results:
            result.cancel()

    def close(self) -> None:
        """Make no further program, and wait for one that is being compiled."""
        self.give_up()
        for thread in self._threads:
            thread.join()


def _work(waiting: deque[tuple[str, Callable[[], Any], Future[None]]]) -> None:
    """A thread of a BackgroundCompiler, of which it holds nothing but this. An interpreter that ends waits for what has begun,
    and no longer: a pool of threads would first do all that is waiting."""
    _lower_priority()
    while threading.main_thread().is_alive():
        try:
            name, function, result = waiting.popleft()
        except IndexError:
            return
        if not result.set_running_or_notify_cancel():
            continue
        try:
            function()
        except Exception as error:
            logger.exception("%s could not be compiled; a larger step takes its place", name)
            result.set_exception(error)
        else:
            result.set_result(None)
        del function


def _lower_priority() -> None:
    if sys.platform == "linux":  # where priorities belong to threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
