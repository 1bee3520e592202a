"""EngineCoreClient: how a front end reaches an engine core, wherever it runs. For one in another process: mp_client.py."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.core.types import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from jaxllm.engine.core import EngineCore, PauseMode
from jaxllm.executor.abstract import Executor


class EngineCoreClient(ABC):
    """The calls of a synchronous front end. Every method raises EngineDeadError once the engine core has failed, but
    `abort_requests`, which then has nothing to do, and `shutdown`.
    """

    @property
    @abstractmethod
    def num_gpu_blocks(self) -> int:
        """Blocks of the KV cache, the null block included."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """The outputs of the next step; without any if it had none for this front end."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises ValueError if its id is in use."""

    @abstractmethod
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored."""

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; see EngineCore.reset_prefix_cache."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; see Executor.collective_rpc."""

    @abstractmethod
    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Take no more steps until `resume`; see EngineCore.pause. Returns when it is done."""

    @abstractmethod
    def resume(self) -> None:
        """End a pause."""

    @abstractmethod
    def is_paused(self) -> bool:
        """Whether no steps are taken: paused or asleep."""

    @abstractmethod
    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give the devices' memory back until `wake_up`; see EngineCore.sleep. Returns when it is done."""

    @abstractmethod
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`; see EngineCore.wake_up."""

    @abstractmethod
    def is_sleeping(self) -> bool:
        """Whether anything is asleep."""

    @abstractmethod
    def get_stats(self) -> SchedulerStats:
        """The requests and the KV cache now."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError if a step has failed, RuntimeError if a worker is gone."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine core. May be called more than once."""


class InprocClient(EngineCoreClient):
    """An engine core in this process, which steps when its output is asked for."""

    def __init__(self, config: EngineConfig, executor_class: type[Executor], log_stats: bool) -> None:
        self.engine_core = EngineCore(config, executor_class, log_stats)

    @property
    def num_gpu_blocks(self) -> int:
        return self.engine_core.kv_cache_config.num_blocks

    def get_output(self) -> EngineCoreOutputs:
        outputs = self.engine_core.take_undelivered() or self.engine_core.step()
        return outputs.get(0) or EngineCoreOutputs()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.engine_core.check_alive()
        self.engine_core.add_request(self.engine_core.make_request(request))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.engine_core.abort_requests(request_ids)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self.engine_core.reset_prefix_cache(reset_running_requests)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Raises ValueError for "wait" with unfinished requests: nobody would step meanwhile."""
        self._check_can_wait(mode)
        self.engine_core.pause(mode, clear_cache).result()

    def resume(self) -> None:
        self.engine_core.resume()

    def is_paused(self) -> bool:
        return self.engine_core.is_paused()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Raises ValueError for "wait" with unfinished requests: nobody would step meanwhile."""
        self._check_can_wait(mode)
        self.engine_core.sleep(level, mode).result()

    def _check_can_wait(self, mode: PauseMode) -> None:
        if mode == "wait" and self.engine_core.scheduler.has_unfinished_requests():
            raise ValueError("mode 'wait' needs an engine core in a process of its own, while there are unfinished requests")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.engine_core.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.engine_core.is_sleeping()

    def get_stats(self) -> SchedulerStats:
        return self.engine_core.get_stats()

    def check_health(self) -> None:
        self.engine_core.check_health()

    def shutdown(self) -> None:
        self.engine_core.shutdown()
