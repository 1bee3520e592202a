"""ParallelConfig: how many devices, and who drives them."""

from dataclasses import dataclass
from typing import Literal

from jaxllm.checks import check_at_least, check_choice

ExecutorBackend = Literal["uni", "mp"]
DataParallelRouting = Literal["load", "prefix"]
DataParallelBackend = Literal["mp", "ray"]


@dataclass(frozen=True)
class ParallelConfig:
    """How many devices, and who drives them.

    Attributes:
        pipeline_parallel_size: stages, each with some of the layers and with `tensor_parallel_size` devices.
        distributed_executor_backend: "uni", one process drives all devices; "mp", worker processes drive some each.
        devices_per_worker: under "mp".
        execute_model_timeout: seconds for a step under "mp", after which the workers count as hung.
        worker_hang_timeout: seconds without a heartbeat after which a worker process, or another machine, counts as hung.
        nnodes: machines that share the workers evenly, under "mp".
        node_rank: which of them this is; the engine runs on 0.
        master_addr, master_port: where the others find node 0, at three ports from this one on.
        data_parallel_size: engine cores, each in a process and with devices of its own; the front end shares out the requests.
        data_parallel_start_rank: the rank of the first of them; those before it are another server's.
        data_parallel_restart: start an engine core again that has died.
        data_parallel_routing: which engine core gets a request: "load" is the one with the least to do, "prefix" the one that has
            most of its prompt in its prefix cache, unless it has much more to do than others.
        data_parallel_backend: "mp" starts engine cores on this machine, "ray" on the nodes of a Ray cluster.
        data_parallel_size_local: the first so many engine cores are on the front end's machine, the others on headless machines,
            which join it; None for all.
        data_parallel_address, data_parallel_rpc_port: where headless machines find the front end.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: ExecutorBackend = "uni"
    devices_per_worker: int = 1
    execute_model_timeout: float = 300.0
    worker_hang_timeout: float = 8.0
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    data_parallel_size: int = 1
    data_parallel_restart: bool = False
    data_parallel_routing: DataParallelRouting = "load"
    data_parallel_start_rank: int = 0
    data_parallel_backend: DataParallelBackend = "mp"
    data_parallel_size_local: int | None = None
    data_parallel_address: str = "127.0.0.1"
    data_parallel_rpc_port: int = 29550

    def __post_init__(self) -> None:
        check_at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        check_choice("distributed_executor_backend", self.distributed_executor_backend, ExecutorBackend)
        check_at_least("data_parallel_size", self.data_parallel_size, 1)
        check_at_least("data_parallel_start_rank", self.data_parallel_start_rank, 0)
        check_choice("data_parallel_routing", self.data_parallel_routing, DataParallelRouting)
        check_choice("data_parallel_backend", self.data_parallel_backend, DataParallelBackend)
        if not 0 <= self.num_local_engines <= self.data_parallel_size:
            raise ValueError(
                f"data_parallel_size_local must be in [0, data_parallel_size {self.data_parallel_size}], "
                f"got {self.data_parallel_size_local}"
            )
        if self.num_local_engines < self.data_parallel_size and self.data_parallel_backend == "ray":
            raise ValueError(
                f"data_parallel_size_local {self.data_parallel_size_local} needs data_parallel_backend 'mp', got 'ray', which "
                "places all engines itself"
            )
        if not 0 < self.data_parallel_rpc_port < 65536:
            raise ValueError(f"data_parallel_rpc_port must be in [1, 65535], got {self.data_parallel_rpc_port}")
        check_at_least("devices_per_worker", self.devices_per_worker, 1)
        for name in ("execute_model_timeout", "worker_hang_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")
        if self.distributed_executor_backend == "uni" and self.devices_per_worker != 1:
            raise ValueError(
                "devices_per_worker needs distributed_executor_backend 'mp': otherwise one process drives all devices"
            )
        # A worker has devices of one stage only, unless it has all: those of two would wait for each other.
        if self.tensor_parallel_size % self.devices_per_worker and self.devices_per_worker != self.num_devices:
            raise ValueError(
                f"devices_per_worker {self.devices_per_worker} does not divide tensor_parallel_size {self.tensor_parallel_size}"
            )
        check_at_least("nnodes", self.nnodes, 1)
        check_at_least("node_rank", self.node_rank, 0)
        check_at_least("master_port", self.master_port, 1)
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank must be below nnodes {self.nnodes}, got {self.node_rank}")
        if self.nnodes > 1 and self.distributed_executor_backend == "uni":
            raise ValueError(f"nnodes {self.nnodes} needs distributed_executor_backend 'mp', got 'uni'")
        if self.nnodes > 1 and not self.has_one_engine:
            raise ValueError(f"nnodes {self.nnodes} needs one engine, got data_parallel_size {self.data_parallel_size}")
        if self.num_workers % self.nnodes:
            raise ValueError(f"nnodes {self.nnodes} must divide the number of workers, {self.num_workers}")
        if self.master_port > 65533:
            raise ValueError(f"master_port must be at most 65533, got {self.master_port}: three ports are needed")

    @property
    def num_devices(self) -> int:
        """Devices of one engine, on all its machines."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_workers(self) -> int:
        """Processes under "mp", on all machines."""
        return self.num_devices // self.devices_per_worker

    @property
    def output_rank(self) -> int:
        """The worker whose answer to a step is taken: the first of the last stage."""
        return (self.pipeline_parallel_size - 1) * self.tensor_parallel_size // self.devices_per_worker

    @property
    def num_local_workers(self) -> int:
        """Those of one machine."""
        return self.num_workers // self.nnodes

    @property
    def num_local_engines(self) -> int:
        """Those of the front end's own machine, where no Ray places them."""
        return self.data_parallel_size if self.data_parallel_size_local is None else self.data_parallel_size_local

    @property
    def has_one_engine(self) -> bool:
        """Whether there is one engine core, on this machine, and never another one."""
        is_alone = self.data_parallel_size == self.num_local_engines == 1
        return is_alone and not self.data_parallel_restart and self.data_parallel_backend == "mp"
