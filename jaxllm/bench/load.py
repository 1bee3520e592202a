"""Send the requests of a data set to a server at the times of an arrival process."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from tqdm import tqdm

from jaxllm.bench.client import OpenAIClient, RequestOptions
from jaxllm.bench.datasets import SampleRequest
from jaxllm.bench.metrics import RequestRecord

PROBE = SampleRequest("Hi", prompt_len=1, output_len=1)


async def warm_up(
    client: OpenAIClient, request: SampleRequest, options: RequestOptions, count: int, max_concurrency: int | None
) -> None:
    """Send a request `count` times.

    Raises:
        ValueError: if one fails.
    """
    gate = _gate(max_concurrency)

    async def one(i: int) -> RequestRecord:
        async with gate:
            return await client.send(request, options, f"{options.request_id_prefix}warmup-{i}")

    for record in await asyncio.gather(*(one(i) for i in range(count))):
        if not record.success:
            raise ValueError(f"a warm-up request failed: {record.error}")


async def run_load(
    client: OpenAIClient,
    requests: Sequence[SampleRequest],
    options: RequestOptions,
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[], Any] = lambda: None,
) -> tuple[list[RequestRecord], float]:
    """Send each request at its time.

    Args:
        times: seconds after now, ascending, one for each request.
        max_concurrency: most requests under way; others wait in the client, which counts as their queue time.
        on_done: called after each request.

    Returns:
        The records in the order of the requests, and the seconds from the first send to the last end.
    """
    gate = _gate(max_concurrency)

    async def one(i: int, due: float) -> RequestRecord:
        async with gate:
            record = await client.send(requests[i], options, f"{options.request_id_prefix}{i}")
        record.due = due
        on_done()
        return record

    # A collection amid the run would be measured as latency.
    gc.collect()
    gc.freeze()
    try:
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for i, offset in enumerate(times):
                if (wait := begin + offset - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(one(i, time.perf_counter())))
        end = time.perf_counter()
    finally:
        gc.unfreeze()
    records = [task.result() for task in tasks]
    return records, end - min(record.start for record in records)


@asynccontextmanager
async def probing(client: OpenAIClient, options: RequestOptions, rate: float) -> AsyncIterator[list[RequestRecord]]:
    """While the block runs, ask for one token `rate` times a second, one probe after the other; gives their records."""
    records: list[RequestRecord] = []

    async def probe() -> None:
        while True:
            records.append(await client.send(PROBE, options, f"{options.request_id_prefix}probe-{len(records)}"))
            await asyncio.sleep(1 / rate)

    task = asyncio.create_task(probe()) if rate > 0 else None
    try:
        yield records
    finally:
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()


def progress_bar(total: int, enabled: bool) -> "tqdm[Any]":
    """On standard error."""
    return tqdm(total=total, desc="Requests", dynamic_ncols=True, disable=not enabled)


def _gate(max_concurrency: int | None) -> Any:
    return nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
