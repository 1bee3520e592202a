"""Executor: what the engine core asks of whoever runs the model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxllm.config import EngineConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput


class StepHandle(Protocol):
    """A step that was started."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output. Called once, in the order in which steps were started."""


@dataclass(frozen=True)
class FinishedStep:
    """A step that has run already."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


class Executor(ABC):
    """Runs the workers. Made by the engine core, which then calls `initialize` once, before anything else.

    One caller at a time. After an exception from `execute_model` the device state is not known: the engine core is dead.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @staticmethod
    def get_class(config: EngineConfig) -> "type[Executor]":
        """The executor that the configuration names. Imported here: a front end without an engine core must not import jax."""
        if config.parallel.distributed_executor_backend == "mp":
            from jaxllm.executor.multiproc import MultiProcExecutor

            return MultiProcExecutor
        from jaxllm.executor.uniproc import UniProcExecutor

        return UniProcExecutor

    @abstractmethod
    def initialize(self) -> KVCacheConfig:
        """Find the devices, load the model, size and allocate the KV cache, compile the steps.

        Returns:
            The KV cache that the scheduler may hand out.

        Raises:
            ValueError: if the configuration does not fit the model or the devices.
        """

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. Called also without scheduled tokens, when requests ended: the workers then forget them."""

    def start_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        """Start a step without waiting for it, where the executor can; the next may be started before its result is fetched."""
        return FinishedStep(self.execute_model(scheduler_output))

    @abstractmethod
    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a method of every worker. The engine core itself calls `sleep(level)` and `wake_up(tags)`; see Worker.

        Args:
            timeout: seconds to wait for all answers; None to wait for ever.

        Returns:
            The answers, in the order of the workers' ranks.

        Raises:
            AttributeError: if the workers have no such method.
            TimeoutError: if an answer came too late.
        """

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Have something called, from any thread, when the workers fail while nobody waits for them. Those in this process never
        do so.

        Args:
            callback: gets what the next call would raise.
        """
        return

    def check_health(self) -> None:
        """Raise RuntimeError if a worker is gone. An executor in this process has none that could be."""
        return

    @abstractmethod
    def shutdown(self) -> None:
        """Free devices and end processes. May be called more than once, and after a failure."""
