"""Configurations of front ends and headless machines, for tests and for the processes that they start."""

import dataclasses
import socket
from typing import Any

from toy_engine import make_config

from jaxllm.config import EngineConfig

# Seconds of silence after which a machine is lost.
HANG_S = 5.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def two_machines(port: int, size: int = 2, size_local: int = 1, **config: Any) -> EngineConfig:
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **config}
    made = make_config(data_parallel_size=size, **config)
    parallel = dataclasses.replace(
        made.parallel, data_parallel_size_local=size_local, data_parallel_rpc_port=port, worker_hang_timeout=HANG_S
    )
    return dataclasses.replace(made, parallel=parallel)
