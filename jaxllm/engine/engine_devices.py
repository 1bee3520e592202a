"""Which devices of this machine an engine core gets when there are several of them. Nothing here starts a backend."""

import os
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_args import detect_platform


def visible_devices() -> list[str]:
    """The NVIDIA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        return [name.strip() for name in asked.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


def engine_environment(config: EngineConfig, local_index: int, num_local: int) -> dict[str, str]:
    """Environment variables for one of `num_local` engine cores on this machine.

    On GPUs each gets the next `num_devices` devices. On a CPU each gets its share of the cores, as threads: XLA:CPU
    makes as many as NPROC says, else one for every core, and several engines would then fight for them. A NPROC that is set
    stays.

    Raises:
        ValueError: if there are too few devices.
    """
    if detect_platform() == "cpu":
        if num_local == 1 or "NPROC" in os.environ:
            return {}
        return {"NPROC": str(max(1, len(os.sched_getaffinity(0)) // num_local))}
    size, devices = config.parallel.num_devices, visible_devices()
    if len(devices) < num_local * size:
        raise ValueError(
            f"data_parallel_size {num_local} with {size} devices an engine needs {num_local * size} devices, "
            f"found {len(devices)}: {', '.join(devices) or 'none'}"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[local_index * size : (local_index + 1) * size])}
