"""RayEngineProcess: an engine core as a Ray actor, on whichever node of the cluster has room for it.

It stands where an EngineProcess stands. Ray decides where the actor runs, within a placement group that holds the devices of one
engine together; requests and outputs pass over TCP between the front end and the actor, not through Ray. An actor belongs to the
front end's process and ends with it.
"""

import importlib.util
import logging
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_args import detect_platform
from jaxllm.engine.errors import EngineStartError

if TYPE_CHECKING:
    from jaxllm.engine.core_proc import EngineCoreMain

logger = logging.getLogger(__name__)

# For a node to have room for an engine: others may be about to leave it.
PLACEMENT_TIMEOUT_S = 60.0


class RayPlacement:
    """Where engine cores are started: the Ray cluster that RAY_ADDRESS names, or one of this machine alone.

    Raises:
        ValueError: if ray is not installed.

    Attributes:
        host: an address of this machine that the other nodes reach.
    """

    def __init__(self, config: EngineConfig) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ValueError("data_parallel_backend 'ray' needs ray, which is not installed: pip install 'jaxllm[ray]'")
        import ray

        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level=logging.WARNING)
        self.host: str = ray.util.get_node_ip_address()
        size = config.parallel.num_devices
        if detect_platform() == "cuda":
            self.resources, self.environment = {"CPU": 1.0, "GPU": float(size)}, {}
        else:
            # XLA:CPU makes as many threads as NPROC says.
            num_cores = int(os.environ.get("NPROC", "1"))
            self.resources, self.environment = {"CPU": float(num_cores)}, {"NPROC": str(num_cores)}

    def start(self, main: "EngineCoreMain", name: str) -> "RayEngineProcess":
        """Start an engine core. It may still wait for room when this returns."""
        return RayEngineProcess(main, name, self.resources, self.environment)


def _make_actor_class() -> Any:
    """Sent by value: a node needs to import nothing before it knows from where."""

    class EngineActor:
        def describe(self) -> tuple[str, int]:
            import ray

            return ray.get_runtime_context().get_node_id(), os.getpid()

        def run(self, path: list[str], environment: dict[str, str], payload: bytes) -> int:
            """The engine core's life. Its exit code."""
            os.environ.update(environment)
            sys.path.extend(entry for entry in path if entry not in sys.path)
            try:
                pickle.loads(payload).run_core()
            except SystemExit as end:
                return int(end.code or 0)
            return 0

    return EngineActor


class RayEngineProcess:
    """Starts `main` in an actor. `fileno` becomes readable when the actor has ended, however it did.

    Args:
        main: its `run_core` is called; can be pickled, and its modules can be imported on every node.
        name: for lists of actors.
        resources: of the placement group.
        environment: variables to set.
    """

    def __init__(self, main: "EngineCoreMain", name: str, resources: Mapping[str, float], environment: Mapping[str, str]) -> None:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._remove_placement_group = ray, remove_placement_group
        self._resources = dict(resources)
        self._ended = threading.Event()
        self._how = "has not ended"
        self._closing = False
        self._link, self._other_end = socket.socketpair()
        self._group = placement_group([self._resources], strategy="STRICT_PACK", name=f"jaxllm-{name}")
        actor_class = ray.remote(_make_actor_class())
        self._actor = actor_class.options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group),
        ).remote()
        self._description = self._actor.describe.remote()
        self._life = self._actor.run.remote(sys.path, dict(environment), pickle.dumps(main))
        self._watcher = threading.Thread(target=self._watch, daemon=True, name=f"ray-{name}")
        self._watcher.start()

    def _watch(self) -> None:
        ray = self._ray
        deadline = time.monotonic() + PLACEMENT_TIMEOUT_S
        try:
            while not self._group.wait(1):
                if self._closing:
                    raise EngineStartError("was ended before a node had room for it")
                if time.monotonic() > deadline:
                    raise EngineStartError(f"found no node with {self._resources} free in {PLACEMENT_TIMEOUT_S:.0f} s")
            code = ray.get(self._life)
            self._how = f"ended with exit code {code}"
        except EngineStartError as error:
            self._how = str(error)
        except Exception as error:  # whatever ends an actor, or takes it away with its node
            self._how = f"was lost: {str(error).strip().splitlines()[0] if str(error).strip() else repr(error)}"
        finally:
            self._ended.set()
            self._other_end.close()
            self._give_back()

    def _give_back(self) -> None:
        """Kill the actor and free what it held."""
        try:
            self._ray.kill(self._actor)
            self._remove_placement_group(self._group)
        except Exception as error:  # ray itself has ended, and all actors with it
            logger.debug("nothing to give back: %r", error)

    @property
    def pid(self) -> int:
        """On its node. Waits until it runs."""
        return self._ray.get(self._description)[1]

    @property
    def node(self) -> str:
        """Ray's name of its node. Waits until it runs."""
        return self._ray.get(self._description)[0]

    def fileno(self) -> int:
        return self._link.fileno()

    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds for the end, or for ever. Returns whether it came."""
        return self._ended.wait(timeout)

    def how_it_ended(self) -> str:
        return self._how if self._ended.wait(5.0) else "closed its side"

    def kill(self) -> None:
        """End it, whatever it does."""
        self._closing = True
        self._ray.kill(self._actor)
        self._ended.wait(10.0)

    def close(self) -> None:
        """Give up this end; it must have ended."""
        self._watcher.join()
        self._link.close()
