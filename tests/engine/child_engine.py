"""Executors for engine cores in processes of their own, which import them from here. `collective_rpc` tells them what to do."""

import os
import time
from collections.abc import Callable
from typing import Any

from toy_engine import ToyExecutor, make_config

from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.llm_engine import LLMEngine

# Longer than anything here should take, and short enough that a fault is seen soon.
PATIENCE_S = 20.0


class ChildExecutor(ToyExecutor):
    """A ToyExecutor that can be slowed down and broken."""

    step_time = 0.0
    is_failing = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if self.step_time:
            time.sleep(self.step_time)
        if self.is_failing:
            raise MemoryError("device")
        return super().execute_model(scheduler_output)

    def set_step_time(self, seconds: float, *, timeout: float | None) -> None:
        self.step_time = seconds

    def fail_next_step(self, *, timeout: float | None) -> None:
        self.is_failing = True

    def num_rows(self, *, timeout: float | None) -> int:
        return len(self.rows)

    def device_state(self, *, timeout: float | None) -> tuple[set[str], int]:
        return self.asleep, self.sleep_level

    def echo(self, *args: Any, timeout: float | None, **kwargs: Any) -> Any:
        return args, kwargs

    def make_unsendable(self, *, timeout: float | None) -> Any:
        return object()

    def fail(self, *, timeout: float | None) -> None:
        raise ZeroDivisionError("by request")

    def exit(self, code: int, *, timeout: float | None) -> None:
        os._exit(code)


class RefusingExecutor(ToyExecutor):
    def initialize(self) -> KVCacheConfig:
        raise ValueError("gpu_memory_utilization is too small")


class BrokenExecutor(ToyExecutor):
    def initialize(self) -> KVCacheConfig:
        raise OSError("no device")


class DyingExecutor(ToyExecutor):
    def initialize(self) -> KVCacheConfig:
        os._exit(7)


class SlowStartExecutor(ToyExecutor):
    def initialize(self) -> KVCacheConfig:
        time.sleep(60)
        return super().initialize()


def make_child_engine(tokenizer: Any = None, **config: Any) -> LLMEngine:
    return LLMEngine(make_config(**config), tokenizer, ChildExecutor, multiprocess=True)


def make_async_llm(tokenizer: Any = None, **config: Any) -> AsyncLLM:
    return AsyncLLM(make_config(**config), tokenizer, ChildExecutor)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between open and read
        return False
