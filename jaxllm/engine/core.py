"""EngineCore: the scheduler and the executor, and the step that joins them."""

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

from jaxllm.config import EngineConfig
from jaxllm.core.async_scheduler import AsyncScheduler
from jaxllm.core.kv_events import KVEventLog, KVEvents
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.core.request import Request, RequestStatus
from jaxllm.core.scheduler import Scheduler
from jaxllm.core.types import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, SchedulerStats, StepStats
from jaxllm.engine.errors import EngineDeadError
from jaxllm.engine.pace import DecodePace
from jaxllm.executor.abstract import Executor, StepHandle
from jaxllm.trace import open_trace

PauseMode = Literal["abort", "wait", "keep"]
# What `sleep` puts to sleep and `wake_up` wakes.
DEVICE_TAGS = ("weights", "kv_cache")
SLEEP_TAGS = (*DEVICE_TAGS, "scheduling")


class EngineCore:
    """Runs requests, step by step. All methods but `make_request` and `queue_aborts` belong to the thread that steps.

    It can be paused: it then steps no more, and takes requests that run once it is resumed. Asleep it is paused too, and the
    devices' memory is given back.

    Args:
        executor_class: made here, and asked for the KV cache that the scheduler hands out.
        log_stats: whether outputs carry SchedulerStats.

    Raises:
        ValueError: if the model or its KV cache does not fit; the executor has been shut down then.

    Attributes:
        failure: what killed the engine core; None while it lives.
        asleep: which of SLEEP_TAGS are.
    """

    def __init__(self, config: EngineConfig, executor_class: type[Executor], log_stats: bool) -> None:
        self.config = config
        self.log_stats = log_stats
        self.failure: BaseException | None = None
        self._paused = False
        self.asleep: set[str] = set()
        self.queued_aborts: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        # Steps that were started and not read yet, the oldest first, with when that was and the seconds that scheduling took.
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle, float, float]] = deque()
        # One for each stage of the pipeline; and one that waits for the first stage, so that it never waits for the host.
        self._max_in_flight = config.parallel.pipeline_parallel_size + config.scheduler.async_scheduling
        self._undelivered: dict[int, EngineCoreOutputs] = {}
        # While it drains before a pause: what is to be done at the end, and the requests that came since.
        self._drain_actions: list[tuple[Callable[[], None], Future[None]]] = []
        self._held: list[Request] = []
        self.executor = executor_class(config)
        try:
            self.kv_cache_config = self.executor.initialize()
            scheduler_class = AsyncScheduler if config.scheduler.async_scheduling else Scheduler
            self.scheduler = scheduler_class(config.scheduler, config.cache, self.kv_cache_config)
            self._pace: DecodePace | None = None
            if config.scheduler.num_decode_steps > 1 and config.scheduler.max_itl is not None:
                self._pace = DecodePace(config.scheduler.max_itl, config.scheduler.num_decode_steps)
                self.scheduler.max_decode_steps = self._pace.num_steps
            self._kv_events = KVEventLog() if config.parallel.data_parallel_routing == "prefix" else None
            self.scheduler.kv_cache_manager.block_pool.events = self._kv_events
        except BaseException:
            self.executor.shutdown()
            raise
        self._trace = open_trace(config.profile_dir, "engine core")

    def make_request(self, request: EngineCoreRequest) -> Request:
        """What `add_request` takes. From any thread: hashing a long prompt takes a while.

        Raises:
            ValueError: as Request.from_engine_core_request.
        """
        return Request.from_engine_core_request(request, self.scheduler.block_hasher)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: if its id is in use.
            EngineDeadError: if the engine core has failed.
        """
        self.check_alive()
        if self._drain_actions:
            self._held.append(request)
        else:
            self.scheduler.add_request(request, timestamp=time.monotonic())

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests between two steps. They give no more output; unknown ids are ignored, since they have ended."""
        if self.failure is not None:
            return
        for request in [request for request in self._held if request.request_id in request_ids]:
            self._held.remove(request)
            self._tell_ended(request)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def queue_aborts(self, request_ids: Sequence[str]) -> None:
        """Like `abort_requests`, from any thread at any time, also while a step runs: its output is then dropped."""
        self.queued_aborts.put(list(request_ids))

    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return not self._paused and (self.scheduler.has_requests() or bool(self._in_flight))

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Schedule, execute, update.

        With asynchronous scheduling a step is started before the one before it is read, so that the devices have their next work
        while the host is busy with what came of the last.

        Returns:
            Outputs of each front end; empty if there was nothing to do, or nothing to read yet.

        Raises:
            EngineDeadError: if the step failed, or an earlier one did. What the device holds is then not known.
        """
        self.check_alive()
        if not self.has_work():
            return {}
        with self._failure_is_final():
            started = self._start_step()
            outputs = {}
            if not started or len(self._in_flight) == self._max_in_flight:
                outputs = self._finish_step()
            if self._drain_actions and not self.scheduler.has_unfinished_requests():
                self._end_drain()
            return outputs

    def _start_step(self) -> bool:
        """Schedule and start the next step; False if there is none."""
        if not self.scheduler.has_requests():
            return False
        start = time.monotonic()
        scheduler_output = self.scheduler.schedule(start)
        scheduled = time.monotonic()
        self._in_flight.append((scheduler_output, self.executor.start_model(scheduler_output), scheduled, scheduled - start))
        if self._trace is not None:
            self._trace.span("schedule", start, scheduled, tokens=scheduler_output.total_num_scheduled_tokens)
            self._trace.span("dispatch", scheduled, time.monotonic())
        return True

    def _finish_step(self, with_stats: bool = True) -> dict[int, EngineCoreOutputs]:
        """Wait for the oldest step in flight and take in its output."""
        scheduler_output, handle, started, schedule_time = self._in_flight.popleft()
        start = time.monotonic()
        model_runner_output = handle.result()
        waited = time.monotonic()
        if self._pace is not None:
            self._keep_pace(self._pace, scheduler_output, model_runner_output, started, waited)
        # Before the outputs are looked at, so that an aborted request gives none.
        while not self.queued_aborts.empty():
            self.abort_requests(self.queued_aborts.get())
        now = time.monotonic()
        outputs = self.scheduler.update_from_output(scheduler_output, model_runner_output, now)
        if self._trace is not None:
            self._trace.span("wait", start, waited)
            self._trace.span("update", waited, time.monotonic())
        if self.log_stats and with_stats:
            if not outputs:
                outputs[0] = EngineCoreOutputs(timestamp=now)
            # One front end counts for all.
            stats = next(iter(outputs.values())).scheduler_stats = self.scheduler.make_stats()
            if (worker := model_runner_output.stats) is not None:
                stats.step = StepStats(
                    schedule_time,
                    worker.dispatch_time,
                    worker.wait_time,
                    time.monotonic() - now,
                    worker.num_padding_tokens,
                    worker.num_compiles,
                    worker.num_tokens,
                )
        return outputs

    def _keep_pace(
        self, pace: DecodePace, scheduled: SchedulerOutput, output: ModelRunnerOutput, started: float, ended: float
    ) -> None:
        """Let the next steps decode as many tokens as fit in the time between two outputs. A step with prompts says nothing."""
        num_steps = max(map(len, output.sampled_token_ids), default=0)
        if num_steps and (scheduled.num_decode_steps > 1 or scheduled.total_num_scheduled_tokens == len(output.req_ids)):
            pace.observe(started, ended, num_steps)
            self.scheduler.max_decode_steps = pace.num_steps

    def _finish_all_steps(self) -> None:
        """Let no step be in flight; what comes of them is delivered by `take_undelivered`, statistics with the next step."""
        while self._in_flight:
            with self._failure_is_final():
                outputs = self._finish_step(with_stats=False)
            for client_index, late in outputs.items():
                outputs_of, finished_requests = self._undelivered_of(client_index, late.timestamp)
                outputs_of += late.outputs
                finished_requests |= late.finished_requests or set()

    def fail(self, error: BaseException) -> None:
        """The executor cannot go on, of which no step has told yet."""
        if self.failure is None:
            self.failure = error

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

    def take_undelivered(self) -> dict[int, EngineCoreOutputs]:
        """Outputs of each front end that no step made: of requests that the engine core itself has aborted."""
        undelivered, self._undelivered = self._undelivered, {}
        return undelivered

    def take_kv_events(self) -> KVEvents | None:
        """What the prefix cache has gained and lost since the last time; None if nothing, or nobody wants to know."""
        return None if self._kv_events is None else self._kv_events.take()

    def abort_all(self) -> None:
        """End every request with the reason "abort", of which the front ends are told; see `take_undelivered`."""
        held, self._held = self._held, []
        for request in (*self.scheduler.requests.values(), *held):
            self._tell_ended(request, EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT))
        self.scheduler.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED)

    def abort_front_end(self, client_index: int) -> None:
        """End every request of a front end that is gone."""
        requests = (*self.scheduler.requests.values(), *self._held)
        self.abort_requests([request.request_id for request in requests if request.client_index == client_index])

    def _tell_ended(self, request: Request, output: EngineCoreOutput | None = None) -> None:
        """Let the front end know, with `take_undelivered`, that a request has ended."""
        outputs, finished_requests = self._undelivered_of(request.client_index, time.monotonic())
        finished_requests.add(request.request_id)
        if output is not None:
            outputs.append(output)

    def _undelivered_of(self, client_index: int, timestamp: float) -> tuple[list[EngineCoreOutput], set[str]]:
        """Outputs and ended requests that the front end gets with `take_undelivered`, to add to."""
        outputs = self._undelivered.setdefault(client_index, EngineCoreOutputs(timestamp=timestamp, finished_requests=set()))
        assert outputs.finished_requests is not None
        return outputs.outputs, outputs.finished_requests

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[None]:
        """Take no more steps. Requests that come from now on wait until `resume`.

        Args:
            mode: what happens to the requests that there are: "abort" ends them, "wait" runs them to their end first, "keep"
                leaves them as they are, to go on after `resume`.
            clear_cache: forget all cached blocks; under "keep" running requests are then computed again.

        Returns:
            Done when the engine core is paused: at once, but for "wait", where it takes further steps.

        Raises:
            ValueError: if there is no such mode.
        """
        self.check_alive()
        self._check_mode(mode)
        if not isinstance(clear_cache, bool):
            raise ValueError(f"clear_cache must be True or False, got {clear_cache!r}")
        return self._when_paused(mode, self._clear_cache if clear_cache else lambda: None)

    @staticmethod
    def _check_mode(mode: str) -> None:
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(PauseMode))}, got {mode!r}")

    def _when_paused(self, mode: PauseMode, action: Callable[[], None]) -> Future[None]:
        """Pause, then do `action`; the Future says when, and what it raised."""
        done: Future[None] = Future()
        if mode == "wait" and not self._paused and self.scheduler.has_unfinished_requests():
            self._drain_actions.append((action, done))
            return done
        if mode == "abort":
            self.abort_all()
        self._drain_actions.append((action, done))
        self._end_drain()
        return done

    def _end_drain(self) -> None:
        """Be paused, queue what was held, and do what was to be done then."""
        self._finish_all_steps()
        self._paused = True
        actions, self._drain_actions = self._drain_actions, []
        self._queue_held()
        for action, done in actions:
            try:
                action()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _queue_held(self) -> None:
        held, self._held = self._held, []
        for request in held:
            self.scheduler.add_request(request, timestamp=time.monotonic())

    def _clear_cache(self) -> None:
        self.scheduler.reset_prefix_cache(True, time.monotonic())

    def resume(self) -> None:
        """End a pause, or the draining before it.

        Raises:
            ValueError: if the engine core is asleep.
        """
        self.check_alive()
        if self.asleep & set(DEVICE_TAGS):
            raise ValueError(f"the engine is asleep ({', '.join(sorted(self.asleep))}): wake_up, not resume, ends that")
        for _, done in self._drain_actions:
            done.set_exception(RuntimeError("the engine was resumed before its requests had ended"))
        self._drain_actions = []
        self._queue_held()
        self._paused = False
        self.asleep = set()

    def is_paused(self) -> bool:
        """Whether it takes no steps; not yet while it drains."""
        return self._paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[None]:
        """Pause, and give the devices' memory back.

        Args:
            level: 0 only pauses. 1 moves the weights to host memory and drops the KV cache. 2 drops both; `wake_up` loads the
                weights again.
            mode: as for `pause`. Under "keep" and levels 1 and 2, running requests are computed again.

        Returns:
            Done when the engine core sleeps.

        Raises:
            ValueError: if there is no such level or mode.
        """
        self.check_alive()
        if isinstance(level, bool) or level not in (0, 1, 2):
            raise ValueError(f"level must be 0, 1 or 2, got {level!r}")
        self._check_mode(mode)
        return self._when_paused(mode, partial(self._fall_asleep, level))

    def _fall_asleep(self, level: int) -> None:
        self.asleep.add("scheduling")
        if level == 0:
            return
        self._clear_cache()
        with self._failure_is_final():
            self.executor.collective_rpc("sleep", (level,))
        self.asleep |= set(DEVICE_TAGS)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`. Steps are taken again once everything is awake.

        Args:
            tags: what to wake: of "weights", "kv_cache" and "scheduling"; None for all.

        Raises:
            ValueError: if there is no such tag.
        """
        self.check_alive()
        if isinstance(tags, str) or not set(tags or ()) <= set(SLEEP_TAGS):
            raise ValueError(f"tags must be a list of {', '.join(SLEEP_TAGS)}, got {tags!r}")
        waking = self.asleep & set(SLEEP_TAGS if tags is None else tags)
        if not waking:
            return
        if device_tags := sorted(waking & set(DEVICE_TAGS)):
            with self._failure_is_final():
                self.executor.collective_rpc("wake_up", (device_tags,))
        self.asleep -= set(device_tags)
        if not self.asleep & set(DEVICE_TAGS):
            self.resume()

    def is_sleeping(self) -> bool:
        """Whether anything is asleep."""
        return bool(self.asleep)

    def get_stats(self) -> SchedulerStats:
        """The requests and the KV cache now. Counts since the last step's statistics stay with these."""
        self.check_alive()
        return SchedulerStats(
            num_running_reqs=len(self.scheduler.running),
            num_waiting_reqs=len(self.scheduler.waiting) + len(self._held),
            kv_cache_usage=self.scheduler.kv_cache_manager.usage,
        )

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
        self._finish_all_steps()
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
        if self._trace is not None:
            self._trace.close()
