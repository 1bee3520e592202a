"""The same with worker processes, one a device or one for several: float32, asynchronous scheduling, chunked prompts, cached
prefixes and preemptions. Each process has devices of one stage only, if there is a pipeline."""

import os
import signal
import time
from typing import Any

import pytest
from devices import need_devices
from test_same_tokens import REQUESTS, check_same, num_preemptions, on_one_device, run, slow

from jaxllm import LLM
from jaxllm.engine.errors import EngineDeadError

pytestmark = pytest.mark.multi_gpu

MOST_S = 10.0  # until the engine is dead


def make_workers(make_tiny: Any, pipeline: int, tensor: int, devices_per_worker: int, **kwargs: Any) -> LLM:
    need_devices(pipeline * tensor)
    return make_tiny(
        distributed_executor_backend="mp",
        pipeline_parallel_size=pipeline,
        tensor_parallel_size=tensor,
        devices_per_worker=devices_per_worker,
        **{"worker_hang_timeout": 60.0, **kwargs},
    )


@pytest.mark.parametrize(
    ("pipeline", "tensor", "devices_per_worker", "asynchronous"),
    [
        slow(1, 1, 1, True),
        slow(1, 2, 1, True),
        slow(1, 3, 1, True),
        slow(1, 4, 1, True),
        slow(1, 8, 1, True),
        slow(1, 4, 2, True),
        slow(1, 8, 4, True),
        (2, 1, 1, True),
        slow(2, 1, 1, False),
        slow(2, 1, 2, True),
        slow(2, 2, 1, True),
        slow(2, 2, 2, True),
        slow(2, 2, 2, False),
        slow(2, 4, 2, True),
        slow(3, 1, 1, True),
        slow(3, 1, 1, False),
        slow(3, 2, 2, True),
    ],
)
def test_same_tokens(make_tiny, pipeline, tensor, devices_per_worker, asynchronous):
    expected = on_one_device(make_tiny)
    llm = make_workers(make_tiny, pipeline, tensor, devices_per_worker, async_scheduling=asynchronous)
    num_workers = pipeline * tensor // devices_per_worker
    check_same(run(llm), expected)
    assert num_preemptions(llm) > 0
    # Once more, with prefixes cached, after the weights were away.
    num_bytes = llm.collective_rpc("device_bytes")
    llm.sleep(level=1)
    assert llm.collective_rpc("device_bytes") == [0] * num_workers
    llm.wake_up()
    assert llm.collective_rpc("device_bytes") == num_bytes
    check_same(run(llm), expected)
    assert llm.collective_rpc("num_compiles_after_warm_up") == [0] * num_workers
    llm.engine.engine_core.check_health()
    if (pipeline, tensor) == (2, 1) and num_workers == 2:
        kill(llm, victim=int(asynchronous))


@pytest.mark.slow
@pytest.mark.parametrize(("devices_per_worker", "victim"), [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)])
def test_a_killed_worker_of_any_stage_ends_the_engine(make_tiny, devices_per_worker, victim):
    """Amid exchanges with the others, which lose their partner and may say so."""
    llm = make_workers(make_tiny, 2, 2, devices_per_worker)
    kill(llm, victim)


def kill(llm: LLM, victim: int) -> None:
    """A worker under load."""
    pids = llm.engine.engine_core.engine_core.executor.worker_pids  # type: ignore[attr-defined]
    for index, (prompt, params) in enumerate(REQUESTS):
        llm.engine.add_request(f"kill-{index}", prompt, params)
    for _ in range(5):
        llm.engine.step()
    start = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"worker {victim} \(pid {pids[victim]}\) was killed by SIGKILL"):
        finish(llm)
    assert time.monotonic() - start < MOST_S
    llm.shutdown()
    assert not any(map(is_alive, pids))
    assert time.monotonic() - start < 2 * MOST_S


def finish(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
