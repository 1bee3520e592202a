"""EngineProcess: the process of an engine core."""

from collections.abc import Mapping

from jaxllm.executor.child_process import ChildMain, ChildProcess, wait_for_parent

__all__ = ["EngineProcess", "wait_for_parent"]


class EngineProcess(ChildProcess):
    """
    Args:
        main, name, environment: as for ChildProcess.
    """

    def __init__(self, main: ChildMain, name: str = "engine-core", environment: Mapping[str, str] | None = None) -> None:
        super().__init__(main, name, environment)
