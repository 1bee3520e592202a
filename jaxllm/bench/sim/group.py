"""Engines that are simulated together: in this process, or in one of their own."""

import gc
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jaxllm.bench.sim.engine import EngineSpec, SimEngine, StepTime
from jaxllm.bench.sim.request import SimRequest
from jaxllm.bench.sim.workload import Workload

# Bins of gaps between tokens: each is half a percent wider than the one before it.
GAP_BINS = math.log(1.005)


@dataclass
class EngineTotals:
    """What one engine has done, over all its lives."""

    finished: int = 0
    steps: int = 0
    busy_time: float = 0.0
    preemptions: int = 0
    queries: int = 0
    hits: int = 0
    peak_usage: float = 0.0

    def add(self, engine: SimEngine) -> None:
        stats = engine.scheduler.make_stats()
        self.steps += engine.num_steps
        self.busy_time += engine.busy_time
        num_blocks = engine.scheduler.kv_cache_manager.block_pool.num_blocks - 1
        self.peak_usage = max(self.peak_usage, 1 - engine.min_free_blocks / num_blocks)
        self.preemptions += stats.num_preemptions
        self.queries += stats.prefix_cache_stats.queries
        self.hits += stats.prefix_cache_stats.hits


@dataclass
class GroupResult:
    """What a group has recorded.

    Attributes:
        first_times, last_times: float64 [requests], seconds; -1 of requests that have not ended here.
        gaps: bin → tokens that came so long after the one before them; bin b covers exp(b · GAP_BINS) seconds and the next half
            percent.
        gap_sum, gap_square_sum: of all these gaps, seconds.
        engines: totals by engine.
    """

    first_times: np.ndarray
    last_times: np.ndarray
    gaps: dict[int, int] = field(default_factory=dict)
    gap_sum: float = 0.0
    gap_square_sum: float = 0.0
    engines: dict[int, EngineTotals] = field(default_factory=dict)


class EngineGroup:
    """Some of the engines of a simulation.

    Args:
        engines: their numbers.
        request_time: seconds between a request's arrival at the front end and at its engine.
    """

    def __init__(
        self,
        engines: Sequence[int],
        spec: EngineSpec,
        step_time: StepTime,
        workload: Workload,
        request_time: float,
        num_front_ends: int = 1,
        fast: bool = True,
    ) -> None:
        self._spec, self._step_time, self._workload, self._fast = spec, step_time, workload, fast
        self._request_time = request_time
        self._size = spec.cache.block_size
        self._times = workload.times.tolist()
        self._prompt_lens, self._output_lens = workload.prompt_lens.tolist(), workload.output_lens.tolist()
        count = len(workload)
        self.result = GroupResult(np.full(count, -1.0), np.full(count, -1.0))
        self._log = _Log(self.result, num_front_ends)
        self._engines: dict[int, SimEngine] = {engine: self._new_engine(0.0) for engine in engines}
        self.result.engines = {engine: EngineTotals() for engine in engines}
        self._order = list(engines)

    def _new_engine(self, now: float) -> SimEngine:
        return SimEngine(self._spec, self._step_time, self._log, fast=self._fast, now=now)

    def advance(self, until: float, engines: Sequence[int], requests: Sequence[int], now: float = 0.0) -> np.ndarray:
        """Give requests to engines, then let all engines run until a moment.

        Args:
            engines, requests: which engine gets which request, in the order of arrival.
            now: when those that arrived earlier, and failed elsewhere, are sent.

        Returns:
            int64 [2 + front ends, engines of the group]: waiting, running, and those of each front end that have ended since
            the last call.
        """
        for engine, request in zip(engines, requests, strict=True):
            sim = self._engines[engine]
            sim.add(max(now, self._times[request]) + self._request_time, self._new_request(sim, request))
        log = self._log
        counts = np.zeros((2 + len(log.num_finished), len(self._order)), np.int64)
        for column, number in enumerate(self._order):
            sim = self._engines.get(number)
            if sim is None:
                continue
            sim.run_until(until)
            counts[0, column], counts[1, column] = sim.waiting, sim.running
            if log.any_finished:
                counts[2:, column] = log.num_finished
                self.result.engines[number].finished += sum(log.num_finished)
                log.reset()
        return counts

    def _new_request(self, engine: SimEngine, index: int) -> SimRequest:
        workload, size = self._workload, self._size
        cached = engine.block_hasher is not None
        return SimRequest(
            index,
            self._prompt_lens[index],
            self._output_lens[index],
            workload.prompt_hashes(index, size) if cached else (),
            workload.output_hash(index, size),
            engine.block_hasher,
            self._times[index],
        )

    def kill(self, engine: int) -> tuple[list[int], list[int]]:
        """End an engine. Gives its requests that had not begun to answer, and those that had."""
        sim = self._engines.pop(engine)
        self.result.engines[engine].add(sim)
        unfinished = sorted(sim.unfinished(), key=lambda request: request.index)
        return (
            [request.index for request in unfinished if request.first_time < 0],
            [request.index for request in unfinished if request.first_time >= 0],
        )

    def restart(self, engine: int, now: float) -> None:
        """Start an engine that was killed, with an empty cache."""
        self._engines[engine] = self._new_engine(now)

    def finish(self) -> GroupResult:
        """The records, once the group is done."""
        for number, sim in self._engines.items():
            self.result.engines[number].add(sim)
        return self.result


class _Log:
    """Puts what engines tell of their tokens into a GroupResult."""

    def __init__(self, result: GroupResult, num_front_ends: int) -> None:
        self._result = result
        self.num_finished = [0] * num_front_ends
        self.any_finished = False

    def reset(self) -> None:
        """Begin to count ended requests anew."""
        self.num_finished = [0] * len(self.num_finished)
        self.any_finished = False

    def gap(self, seconds: float, count: int) -> None:
        result = self._result
        index = int(math.log(seconds) / GAP_BINS // 1)
        result.gaps[index] = result.gaps.get(index, 0) + count
        result.gap_sum += seconds * count
        result.gap_square_sum += seconds * seconds * count

    def finished(self, request: SimRequest) -> None:
        self.num_finished[request.index % len(self.num_finished)] += 1
        self.any_finished = True
        self._result.first_times[request.index] = request.first_time
        self._result.last_times[request.index] = request.token_time


class ProcessGroup:
    """An EngineGroup in a process of its own: calls are sent with `send` and answered, in order, by `receive`.

    Raises:
        RuntimeError: from `receive`, if the process has died.
    """

    def __init__(self, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, args), daemon=True)
        self._process.start()
        other.close()

    def send(self, method: str, *args: Any) -> None:
        self._connection.send((method, args))

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a process of the simulation has died with exit code {self._process.exitcode}") from None

    def close(self) -> None:
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


class LocalGroup:
    """The same without a process."""

    def __init__(self, *args: Any) -> None:
        self._group = EngineGroup(*args)
        self._answers: list[Any] = []

    def send(self, method: str, *args: Any) -> None:
        self._answers.append(getattr(self._group, method)(*args))

    def receive(self) -> Any:
        return self._answers.pop(0)

    def close(self) -> None:
        """Nothing to end."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Without the garbage collector: there are millions of blocks to look through, and nothing here leaves cycles behind."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _serve(connection: Connection, args: tuple[Any, ...]) -> None:
    with no_collections():
        group = EngineGroup(*args)
        try:
            while True:
                method, values = connection.recv()
                connection.send(getattr(group, method)(*values))
        except (EOFError, KeyboardInterrupt):
            return
