"""Several processes that are one jax: each has devices of its own, and all run the same programs in the same order."""

import os
from collections.abc import Sequence

import jax
import numpy as np

from jaxllm.worker.place import WorkerPlace

_SIMULATED_DEVICES = "xla_force_host_platform_device_count"


def join_processes(place: WorkerPlace) -> list[jax.Device]:
    """Start jax here and in all other workers together. Called by each of them, before jax is used for anything else.

    Returns:
        The devices of all workers, in the order of their ranks.

    Raises:
        ValueError: if there are fewer devices here than a worker drives.
    """
    # Of a machine's GPUs each worker sees its own only, and takes no memory of the others.
    first = place.local_rank * place.num_devices
    visible = list(range(first, first + place.num_devices))
    if place.num_devices > 1 and _SIMULATED_DEVICES not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", place.num_devices)
    if place.num_workers > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # Each times its kernels by itself: shared out, one that compiles waits for one that has found its program on disk.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false"
        jax.distributed.initialize(
            place.coordinator,
            place.num_workers,
            place.rank,
            local_device_ids=visible,
            # Not on every interface of the machine: whoever reaches it can take part.
            coordinator_bind_address=place.coordinator if place.rank == 0 else None,
        )
    else:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, visible)))
    devices = []
    for rank in range(place.num_workers):
        own = [device for device in jax.devices() if device.process_index == rank]
        if len(own) < place.num_devices:
            raise ValueError(f"worker {rank} needs {place.num_devices} devices, found {len(own)}: {own}")
        devices += own[: place.num_devices]
    return devices


def replicate(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Put an array that all processes have on all devices of a sharding that replicates it. Nothing is exchanged or compared."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


Pieces = Sequence[tuple[jax.Device, np.ndarray]]


def to_host(array: jax.Array) -> Pieces:
    """What the devices of this process hold of an array, in memory of the host's own."""
    # A copy: on a CPU, np.asarray would keep the device's memory.
    return [(shard.device, np.array(shard.data)) for shard in array.addressable_shards]


def from_host(pieces: Pieces, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> jax.Array:
    """The array that `to_host` was given, on the devices again."""
    arrays = [jax.device_put(piece, device) for device, piece in pieces]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)
