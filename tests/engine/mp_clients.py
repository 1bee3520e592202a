"""Clients of an engine core in a process of its own, and what such processes leave behind."""

import glob
import os
import tempfile
from pathlib import Path

from child_engine import ChildExecutor
from toy_engine import make_config

from jaxllm.core.types import EngineCoreOutput
from jaxllm.engine.mp_client import SyncMPClient


def make_client() -> SyncMPClient:
    return SyncMPClient(make_config(log_stats=False), ChildExecutor, False)


def outputs_of(client: SyncMPClient) -> dict[str, list[EngineCoreOutput]]:
    """All outputs until no request is left."""
    found: dict[str, list[EngineCoreOutput]] = {}
    while client._unfinished:
        for output in client.get_output().outputs:
            found.setdefault(output.request_id, []).append(output)
    return found


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def folders() -> set[str]:
    return set(os.listdir(tempfile.gettempdir()))


def children() -> list[int]:
    """Engine cores that this process has started and not reaped."""
    found = []
    for path in glob.glob("/proc/self/task/*/children"):
        for pid in map(int, Path(path).read_text().split()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):  # it has ended, and another thread reaped it
                continue
            if b"jaxllm-engine-core" in command:
                found.append(pid)
    return found
