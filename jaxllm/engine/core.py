"""EngineCore: the scheduler and the executor, and the step that joins them."""

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.core.request import Request, RequestStatus
from jaxllm.core.scheduler import Scheduler
from jaxllm.core.types import EngineCoreOutputs, EngineCoreRequest
from jaxllm.engine.errors import EngineDeadError
from jaxllm.executor.abstract import Executor


class EngineCore:
    """Runs requests, step by step. All methods but `queue_aborts` belong to the thread that steps.

    Args:
        executor_class: made here, and asked for the KV cache that the scheduler hands out.
        log_stats: whether outputs carry SchedulerStats.

    Raises:
        ValueError: if the model or its KV cache does not fit; the executor has been shut down then.

    Attributes:
        failure: what killed the engine core; None while it lives.
    """

    def __init__(self, config: EngineConfig, executor_class: type[Executor], log_stats: bool) -> None:
        self.config = config
        self.log_stats = log_stats
        self.failure: BaseException | None = None
        self.queued_aborts: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self.executor = executor_class(config)
        try:
            self.kv_cache_config = self.executor.initialize()
            self.scheduler = Scheduler(config.scheduler, config.cache, self.kv_cache_config)
        except BaseException:
            self.executor.shutdown()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: if its id is in use.
            EngineDeadError: if the engine core has failed.
        """
        self.check_alive()
        self.scheduler.add_request(
            Request.from_engine_core_request(request, self.scheduler.block_hasher), timestamp=time.monotonic()
        )

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests between two steps. They give no more output; unknown ids are ignored, since they have ended."""
        if self.failure is None:
            self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def queue_aborts(self, request_ids: Sequence[str]) -> None:
        """Like `abort_requests`, from any thread at any time, also while a step runs: its output is then dropped."""
        self.queued_aborts.put(list(request_ids))

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Schedule, execute, update.

        Returns:
            Outputs of each front end; empty if there was nothing to do.

        Raises:
            EngineDeadError: if the step failed, or an earlier one did. What the device holds is then not known.
        """
        self.check_alive()
        if not self.scheduler.has_requests():
            return {}
        with self._failure_is_final():
            scheduler_output = self.scheduler.schedule(time.monotonic())
            model_runner_output = self.executor.execute_model(scheduler_output)
            return self._update(scheduler_output, model_runner_output)

    def _update(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        # Before the outputs are looked at, so that an aborted request gives none.
        while not self.queued_aborts.empty():
            self.abort_requests(self.queued_aborts.get())
        now = time.monotonic()
        outputs = self.scheduler.update_from_output(scheduler_output, model_runner_output, now)
        if self.log_stats:
            if not outputs:
                outputs[0] = EngineCoreOutputs(timestamp=now)
            # One front end counts for all.
            next(iter(outputs.values())).scheduler_stats = self.scheduler.make_stats()
        return outputs

    def check_alive(self) -> None:
        """Raise EngineDeadError if a step has failed."""
        if self.failure is not None:
            raise EngineDeadError(f"the engine core cannot go on: {self.failure!r}") from self.failure

    @contextmanager
    def _failure_is_final(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.failure = error
            if not isinstance(error, Exception):
                raise  # an interrupt amid a step: the step is lost, but the caller must see the interrupt
            self.check_alive()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks.

        Args:
            reset_running_requests: preempt running requests first; they are computed again.

        Returns:
            Whether it was done: not while blocks are in use.
        """
        self.check_alive()
        return self.scheduler.reset_prefix_cache(reset_running_requests, time.monotonic())

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, between two steps; see Executor.collective_rpc."""
        self.check_alive()
        return self.executor.collective_rpc(method, args, kwargs, timeout)

    def check_health(self) -> None:
        """Raise EngineDeadError if a step has failed, RuntimeError if a worker is gone."""
        self.check_alive()
        self.executor.check_health()

    def shutdown(self) -> None:
        """Free the devices. May be called more than once; nothing else may be called after it."""
        if self.failure is None:
            self.failure = EngineDeadError("it was shut down")
        self.executor.shutdown()
