"""EngineCoreClient: how a front end reaches an engine core, wherever it runs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.core.types import EngineCoreOutputs, EngineCoreRequest
from jaxllm.engine.core import EngineCore
from jaxllm.executor.abstract import Executor


class EngineCoreClient(ABC):
    """The calls of a synchronous front end. Every method raises EngineDeadError once the engine core has failed, but
    `abort_requests`, which then has nothing to do, and `shutdown`.
    """

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
    def check_health(self) -> None:
        """Raise EngineDeadError if a step has failed, RuntimeError if a worker is gone."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine core. May be called more than once."""


class InprocClient(EngineCoreClient):
    """An engine core in this process, which steps when its output is asked for."""

    def __init__(self, config: EngineConfig, executor_class: type[Executor], log_stats: bool) -> None:
        self.engine_core = EngineCore(config, executor_class, log_stats)

    def get_output(self) -> EngineCoreOutputs:
        return self.engine_core.step().get(0) or EngineCoreOutputs()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.engine_core.add_request(request)

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

    def check_health(self) -> None:
        self.engine_core.check_health()

    def shutdown(self) -> None:
        self.engine_core.shutdown()
