"""A program: a Ray cluster of two nodes on this machine, and an AsyncLLM of toy engines on it that grows and shrinks under load.

Prints what it saw as one line of JSON; tests/engine/test_ray.py looks at it. A process of its own, since Ray keeps threads and
changes signal handlers.
"""

import asyncio
import json
import os
import signal
import sys
from typing import Any

import httpx
import ray
from async_streams import collect, set_step_time, stream, tokens_of
from child_engine import ChildExecutor, is_alive, wait_until
from ray.cluster_utils import Cluster
from toy_engine import expected_tokens, make_config

from jaxllm.engine import ray_process
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.dp_client import DPLBAsyncMPClient
from jaxllm.engine.errors import EngineStartError
from jaxllm.serve.app import build_app
from jaxllm.serve.args import ServeArgs
from jaxllm.serve.context import Context


def client_of(llm: AsyncLLM) -> DPLBAsyncMPClient:
    assert isinstance(llm.engine_core, DPLBAsyncMPClient)
    return llm.engine_core


async def requests_until(llm: AsyncLLM, done: asyncio.Event, results: list[bool], number: int) -> None:
    """One after the other; notes whether each gave the right tokens."""
    count = 0
    while not done.is_set():
        prompt = [5, number, count % 200]
        found = tokens_of(await collect(stream(llm, prompt, f"{number}-{count}", max_tokens=20)))
        results.append(found == expected_tokens(prompt, 20))
        count += 1


async def scenario(llm: AsyncLLM, seen: dict[str, Any]) -> None:
    client = client_of(llm)
    await set_step_time(llm, 0.005)
    results: list[bool] = []
    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(requests_until(llm, done, results, number))
        while len(results) < 24:
            await asyncio.sleep(0.01)
        await llm.scale(3)
        await set_step_time(llm, 0.005)
        seen["nodes"] = len({link.process.node for link in client._links})
        seen["pids"] = client.pids
        seen["at_three"] = len(results)
        while len(results) < seen["at_three"] + 120:
            await asyncio.sleep(0.01)
        try:
            await asyncio.gather(llm.scale(1), llm.scale(2))
        except ValueError as error:
            seen["second_scale"] = str(error)
        while llm.num_engines != 1 or client._is_scaling:
            await asyncio.sleep(0.01)
        seen["at_one"] = len(results)
        seen["left"] = [is_alive(pid) for pid in seen["pids"]]
        while len(results) < seen["at_one"] + 24:
            await asyncio.sleep(0.01)
        done.set()
    seen["requests"], seen["right"] = len(results), sum(results)
    seen["by_engine"] = [
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "jaxllm:generation_tokens"  # type: ignore[union-attr]
    ]

    # An actor that dies takes only what has begun with it.
    await llm.scale(2)
    await set_step_time(llm, 0.1)
    begun = [llm.generate([9, i], stream_params(), f"b{i}") for i in range(2)]
    for generator in begun:
        await anext(generator)
    os.kill(client.pids[1], signal.SIGKILL)
    ends = await asyncio.gather(*(collect(generator) for generator in begun), return_exceptions=True)
    seen["ends"] = sorted(type(end).__name__ for end in ends)
    seen["death"] = str(client._deaths[1])

    # The dead one leaves, and another one comes, over HTTP.
    await llm.scale(1)
    context = Context(llm, llm.config, None, ServeArgs(served_model_name=("toy",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(context)), base_url="http://engine") as http:
        made = await http.post("/scale", json={"data_parallel_size": 2})
        refused = await http.post("/scale", json={"data_parallel_size": 0})
    seen["http"] = [[made.status_code, made.json()], [refused.status_code, refused.json()["error"]["message"]]]
    # There are four cores. What could be started is ended again, and nothing else changes.
    ray_process.PLACEMENT_TIMEOUT_S = 2.0
    try:
        await llm.scale(6)
    except EngineStartError as error:
        seen["too_many"] = [str(error), llm.num_engines, len(client.pids)]
    again = await asyncio.gather(*(collect(stream(llm, [7, i], f"a{i}")) for i in range(2)))
    seen["again"] = [tokens_of(found) == expected_tokens([7, i], 5) for i, found in enumerate(again)]


def stream_params() -> Any:
    from jaxllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(max_tokens=20, output_kind=RequestOutputKind.DELTA)


def main() -> None:
    seen: dict[str, Any] = {}
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        config = make_config(max_num_seqs=4, max_num_batched_tokens=16, data_parallel_backend="ray")
        llm = AsyncLLM(config, None, ChildExecutor)
        try:
            asyncio.run(scenario(llm, seen))
            pids = client_of(llm).pids
        finally:
            llm.shutdown()
        # Ray ends an actor's process a moment after the actor.
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of the actors' processes")
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    sys.exit(main())
