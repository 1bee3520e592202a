"""Workers without jax for MultiProcExecutor, whose processes start quickly: every one runs the toy model, and can be broken."""

import os
import signal
import sys
import time
from typing import Any

from toy_engine import ToyExecutor

from jaxllm.config import EngineConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig
from jaxllm.core.output import SchedulerOutput
from jaxllm.executor.abstract import StepHandle
from jaxllm.executor.multiproc import MultiProcExecutor
from jaxllm.worker.place import WorkerPlace


class ToyWorker:
    def __init__(self, config: EngineConfig, place: WorkerPlace) -> None:
        self.place = place
        self.executor = ToyExecutor(config)
        self.log: list[str] = []
        self.fails_in = 0
        self.step_time = 0.0

    def init_device(self) -> None:
        self.log.append("init_device")

    def load_model(self) -> None:
        self.log.append("load_model")

    def determine_available_memory(self) -> KVCacheConfig:
        """A worker of higher rank has less memory."""
        self.config = self.executor.initialize()
        return KVCacheConfig(self.config.num_blocks - self.place.rank, self.config.groups)

    def init_kv_cache(self, num_blocks: int) -> None:
        self.log.append(f"init_kv_cache {num_blocks}")

    def compile_first(self) -> None:
        self.log.append("compile_first")

    def compile_and_warm_up(self) -> None:
        self.log.append("compile_and_warm_up")

    def start_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise MemoryError("no memory left")
        time.sleep(self.step_time)
        return self.executor.start_model(scheduler_output)

    def check_health(self) -> None:
        return

    def shutdown(self) -> None:
        return

    # For collective_rpc.

    def get_log(self) -> list[str]:
        return self.log

    def rank(self) -> int:
        return self.place.rank

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def fail(self, rank: int) -> None:
        if self.place.rank == rank:
            raise ZeroDivisionError("by request")

    def fail_in(self, num_steps: int, rank: int) -> None:
        if self.place.rank == rank:
            self.fails_in = num_steps

    def set_step_time(self, seconds: float) -> None:
        self.step_time = seconds

    def pause(self, rank: int, seconds: float) -> int:
        if self.place.rank == rank:
            time.sleep(seconds)
        return self.place.rank

    def make_unsendable(self) -> Any:
        return object()

    def say_and_exit(self, rank: int) -> None:
        if self.place.rank == rank:
            sys.stderr.write("all is lost\n")
            sys.stderr.flush()
            os.write(1, b"farewell\n")  # a worker's standard output goes there too
            os._exit(7)

    def stop(self, rank: int) -> None:
        if self.place.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)


class RefusingWorker(ToyWorker):
    """Of which the second does not like its model, while the first waits for it."""

    def load_model(self) -> None:
        if self.place.rank == 1:
            raise ValueError("model is too large")
        time.sleep(60)


class ToyMultiProcExecutor(MultiProcExecutor):
    make_worker = staticmethod(ToyWorker)


class RefusingExecutor(MultiProcExecutor):
    make_worker = staticmethod(RefusingWorker)
