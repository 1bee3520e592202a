"""WorkerPlace: which of several workers. Without jax, for those who only start workers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerPlace:
    """Which of several workers this one is.

    Attributes:
        rank: its place among all workers.
        local_rank: its place among those of its machine.
        num_workers: over all machines.
        num_devices: that each worker drives.
        coordinator: host:port at which the first worker is found by the others; "" if there is only one.
    """

    rank: int = 0
    local_rank: int = 0
    num_workers: int = 1
    num_devices: int = 1
    coordinator: str = ""
