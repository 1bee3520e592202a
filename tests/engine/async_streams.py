"""Streams of an AsyncLLM over the toy model, for tests."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from child_engine import PATIENCE_S

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """In an event loop of its own, and not for ever."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return asyncio.run(bounded())


async def check_idle(llm: AsyncLLM) -> None:
    """Nothing is queued, running or remembered anywhere; every block is free."""
    await llm.resume_generation()
    await set_step_time(llm, 0.0)
    processor = llm.output_processor
    assert (processor.request_states, processor.parents, processor.internal_ids) == ({}, {}, {})
    assert processor.num_queued_tokens == 0
    stats = await llm.get_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (0, 0, 0.0)
    assert await llm.reset_prefix_cache()
    # The step after the last one tells the executor.
    while await llm.collective_rpc("num_rows") != [0]:
        await asyncio.sleep(0.005)


async def set_step_time(llm: AsyncLLM, seconds: float) -> None:
    await llm.collective_rpc("set_step_time", args=(seconds,))


def stream(llm: AsyncLLM, prompt: Any, request_id: str = "r", **params: Any) -> AsyncGenerator[RequestOutput, None]:
    params = {"max_tokens": 5, "output_kind": RequestOutputKind.DELTA, **params}
    return llm.generate(prompt, SamplingParams(**params), request_id)


async def collect(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in outputs]


def tokens_of(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    return [token for output in outputs for one in output.outputs if one.index == index for token in one.token_ids]
