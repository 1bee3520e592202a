"""MultiProcExecutor: a process for each worker. Together they are one jax, whose mesh spans the devices of all of them.

engine core                                  workers
SchedulerOutput → one queue, read by all  →  each starts the same step
ModelRunnerOutput                         ←  the first of the last stage answers
"""

import dataclasses
import logging
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.executor.abstract import Executor, StepHandle
from jaxllm.executor.nodes import NodesGroup, local_places
from jaxllm.executor.wire import Kind, Message, WorkerFailure, decode_message, encode_message
from jaxllm.executor.worker_group import WorkerGoneError, WorkerGroup
from jaxllm.executor.worker_main import MakeWorker, make_worker

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 10.0
# A worker that has lost another says so at about the time at which the other's end is seen.
_BLAME_S = 1.0
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class _Step:
    """A step that the workers have been told to start."""

    executor: "MultiProcExecutor"
    number: int

    def result(self) -> ModelRunnerOutput:
        return self.executor.finish_step(self.number)


class MultiProcExecutor(Executor):
    """Above it nobody can tell that the workers are processes, but by `collective_rpc`, which has one answer of each.

    A worker that ends or hangs is the end: every method but `shutdown` raises WorkerGoneError with its name, from then on.
    """

    make_worker: MakeWorker = staticmethod(make_worker)

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._group: WorkerGroup | None = None
        self._is_ready = False
        self._number = 0
        self._abandoned: set[int] = set()  # calls whose time was over

    @property
    def group(self) -> WorkerGroup:
        """Raises RuntimeError before `initialize` and after `shutdown`."""
        if self._group is None:
            raise RuntimeError("the executor has been shut down")
        return self._group

    @property
    def worker_pids(self) -> list[int]:
        """Of this machine's, in the order of their ranks."""
        return self.group.pids

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        self.group.on_failure = callback
        if self.group.failure is not None:
            callback(self.group.failure)

    def initialize(self) -> KVCacheConfig:
        parallel = self.config.parallel
        if parallel.node_rank > 0:
            raise ValueError(f"node_rank is {parallel.node_rank}: the engine runs on node 0, the other machines run workers only")
        if parallel.nnodes > 1:
            self._group = NodesGroup(self.make_worker, self.config)
        else:
            coordinator = f"127.0.0.1:{_free_port()}" if parallel.num_workers > 1 else ""
            places = local_places(parallel, coordinator)
            self._group = WorkerGroup(self.make_worker, self.config, places, parallel.worker_hang_timeout)
        # An executor that is forgotten ends its workers; so does the end of this process, however it comes.
        weakref.finalize(self, self._group.end).atexit = False
        self._call_timed("devices", "init_device")
        self._call_timed("weights", "load_model")
        configs: list[KVCacheConfig] = self._call_timed("memory", "determine_available_memory")
        # The block tables are the same for all, so the worker with the least memory decides.
        num_blocks = min(config.num_blocks for config in configs)
        self._call_timed("KV cache", "init_kv_cache", num_blocks)
        # All of it before anything runs: nobody then waits for devices whose process is still compiling.
        self._call_timed("compilation", "compile_first")
        self._call_timed("warm-up", "compile_and_warm_up")
        self.group.start_serving()
        self._is_ready = True
        return dataclasses.replace(configs[0], num_blocks=num_blocks)

    def _call_timed(self, phase: str, method: str, *args: Any) -> list[Any]:
        start = time.perf_counter()
        results = self.collective_rpc(method, args)
        logger.info("%s: %.1f s", phase, time.perf_counter() - start)
        return results

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.start_model(scheduler_output).result()

    def start_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        return _Step(self, self._tell(Kind.START, scheduler_output))

    def finish_step(self, number: int) -> ModelRunnerOutput:
        """Of a step that was started: wait for it."""
        rank = self.config.parallel.output_rank
        self._tell(Kind.FINISH, number=number)
        try:
            answer = self._wait(number, [rank], self.config.parallel.execute_model_timeout)[0]
        except TimeoutError:
            raise WorkerGoneError(
                f"a step has taken more than {self.config.parallel.execute_model_timeout:g} s (execute_model_timeout); "
                f"{self.group.name(rank)} has not answered"
            ) from None
        if answer.kind is Kind.FAILURE:
            self._raise_step_failure(rank, answer.body)
        return answer.body

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """
        Raises:
            TypeError: if an argument or a result cannot be sent to another process.
        """
        number = self._tell(Kind.CALL, (method, tuple(args), dict(kwargs or {})))
        try:
            answers = self._wait(number, range(self.group.num_workers), timeout)
        except TimeoutError:
            self._abandoned.add(number)
            raise
        for answer in answers:
            if answer.kind is Kind.FAILURE:
                raise answer.body.to_exception()
        return [answer.body for answer in answers]

    def _tell(self, kind: Kind, body: Any = None, number: int | None = None) -> int:
        if number is None:
            self._number += 1
            number = self._number
        self.group.tell(encode_message(Message(kind, number, body)), self.config.parallel.execute_model_timeout)
        return number

    def _wait(self, number: int, workers: Sequence[int], timeout: float | None) -> list[Message]:
        """The answers of these workers; of a call that has failed, those that came until then.

        Raises:
            WorkerGoneError: if a worker has ended or hangs.
            RuntimeError: if a step has failed, naming the worker.
            TimeoutError: if an answer came too late.
        """
        answers: dict[int, Message] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        while missing := [worker for worker in workers if worker not in answers]:
            left = _LONGEST_WAIT_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                if any(answer.kind is Kind.FAILURE for answer in answers.values()):
                    break
                raise TimeoutError(f"no answer from {', '.join(map(self.group.name, missing))} within {timeout:g} s")
            for worker, frames in self.group.hear(left):
                message = decode_message(frames)
                is_failure = message.kind is Kind.FAILURE
                if message.number == number and worker in workers:
                    answers[worker] = message
                    if is_failure and deadline is None:
                        # The others may wait for this one, for ever.
                        deadline = time.monotonic() + _BLAME_S
                elif is_failure and message.number not in self._abandoned:
                    self._raise_step_failure(worker, message.body)
        return [answers[worker] for worker in workers if worker in answers]

    def _raise_step_failure(self, worker: int, failure: WorkerFailure) -> None:
        self.group.wait_for_death(_BLAME_S if self.group.num_workers > 1 else 0.0)
        raise RuntimeError(f"{self.group.name(worker)}: {failure}")

    def check_health(self) -> None:
        """Ask every worker's devices. Raises RuntimeError if one does not answer within 10 s."""
        try:
            self.collective_rpc("check_health", timeout=HEALTH_TIMEOUT_S)
        except TimeoutError as error:
            raise RuntimeError(str(error)) from None

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.end(at_once=not self._is_ready)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
