"""Two engines behind one front end, each with two workers: a worker's death is its engine's, and nobody else's."""

import asyncio
import os
import signal
import time

import pytest
from async_streams import collect, run, set_step_time, stream, tokens_of
from child_engine import is_alive, wait_until
from test_multiproc import MOST_S, children, mp_config
from toy_engine import expected_tokens
from toy_worker import ToyMultiProcExecutor

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.dp_client import DPLBAsyncMPClient
from jaxllm.engine.errors import EngineDeadError


@pytest.mark.timeout(90)
def test_a_worker_is_killed_under_load() -> None:
    config = mp_config(2, parallel={"data_parallel_size": 2}, max_num_seqs=4, max_num_batched_tokens=16)
    llm = AsyncLLM(config, None, ToyMultiProcExecutor)
    client = llm.engine_core
    assert isinstance(client, DPLBAsyncMPClient)
    workers = [children(pid) for pid in client.pids]
    assert [len(pids) for pids in workers] == [2, 2]
    begun: list[int] = []

    async def one(index: int) -> list[int]:
        found = []
        async for output in stream(llm, {"prompt_token_ids": [5, index]}, str(index), max_tokens=20, detokenize=False):
            begun.append(index)
            found.append(output)
        return tokens_of(found)

    async def main() -> None:
        await set_step_time(llm, 0.02)
        tasks = [asyncio.create_task(one(index)) for index in range(16)]
        while len(set(begun)) < 6:
            await asyncio.sleep(0.005)
        start = time.monotonic()
        os.kill(workers[0][1], signal.SIGKILL)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - start < MOST_S
        failed = [result for result in found if isinstance(result, BaseException)]
        assert 1 <= len(failed) <= 4  # the streams that had begun there
        for error in failed:
            assert isinstance(error, EngineDeadError)
            assert f"worker 1 (pid {workers[0][1]}) was killed by SIGKILL" in str(error)
        for index, result in enumerate(found):
            assert isinstance(result, BaseException) or result == expected_tokens([5, index], 20)
        # The dead engine's other worker has ended with it; the other engine goes on.
        wait_until(lambda: not any(map(is_alive, workers[0])), "the end of the workers")
        last = await collect(stream(llm, {"prompt_token_ids": [6]}, max_tokens=3, detokenize=False))
        assert tokens_of(last) == expected_tokens([6], 3)
        assert all(map(is_alive, workers[1]))

    try:
        run(main())
    finally:
        llm.shutdown()
    wait_until(lambda: not any(map(is_alive, [*workers[0], *workers[1]])), "the end of all workers")
