"""EngineProcess: the process of an engine core."""

from collections.abc import Mapping, Sequence

from jaxllm.executor.child_process import ChildMain, ChildProcess, wait_for_parent

__all__ = ["EngineProcess", "wait_for_parent"]


class EngineProcess(ChildProcess):
    """
    Args:
        main, name, environment, pass_fds: as for ChildProcess.
    """

    def __init__(
        self,
        main: ChildMain,
        name: str = "engine-core",
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        super().__init__(main, name, environment, pass_fds)
