"""UniProcExecutor: one worker in this process drives every local device through the mesh."""

import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.executor.abstract import Executor, StepHandle
from jaxllm.worker.worker import Worker

logger = logging.getLogger(__name__)


@contextmanager
def _timed(phase: str) -> Iterator[None]:
    """Log how long a phase of the start took."""
    start = time.perf_counter()
    yield
    logger.info("%s: %.1f s", phase, time.perf_counter() - start)


class UniProcExecutor(Executor):
    """Calls are plain calls; nothing is copied."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._worker: Worker | None = Worker(config)
        # Threads that compile would keep an engine alive that nobody holds any more.
        self._finalizer = weakref.finalize(self, self._worker.give_up_compilation)
        self._finalizer.atexit = False

    @property
    def worker(self) -> Worker:
        """Raises RuntimeError after shutdown."""
        if self._worker is None:
            raise RuntimeError("the executor has been shut down")
        return self._worker

    def initialize(self) -> KVCacheConfig:
        worker = self.worker
        with _timed("devices"):
            worker.init_device()
        with _timed("model"):
            worker.build_model()
        # Reading the weights waits for the disk and for copies, so they are loaded while steps are compiled, which needs their
        # shapes only.
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool, _timed("weights and first programs"):
            loading = pool.submit(worker.load_weights)
            kv_cache_config = worker.determine_available_memory()
            worker.compile_first()
            loading.result()
        with _timed("KV cache"):
            worker.init_kv_cache()
        with _timed("compilation and warm-up"):
            worker.compile_and_warm_up()
        return kv_cache_config

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.start_model(scheduler_output).result()

    def start_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        return self.worker.start_model(scheduler_output)

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """The one worker answers in this thread, so `timeout` can only be None or long enough."""
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]

    def check_health(self) -> None:
        self.worker.check_health()

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._finalizer.detach()
            worker.shutdown()
