"""How an AsyncLLM ends, and how its engine core dies."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from async_streams import collect, run, set_step_time, stream, tokens_of
from child_engine import is_alive, wait_until
from toy_engine import expected_tokens

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.errors import EngineDeadError

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("how", ["kill", "fail_next_step"])
def test_death_ends_every_stream(make: Callable[..., AsyncLLM], how: str) -> None:
    llm = make()
    message = "SIGKILL" if how == "kill" else "cannot go on: MemoryError"

    async def main() -> None:
        await set_step_time(llm, 0.005)
        await llm.check_health()
        assert (llm.errored, llm.is_running, llm.dead_error) == (False, True, None)
        tasks = [asyncio.create_task(collect(stream(llm, [5, i], str(i), max_tokens=60, n=1 + i % 2))) for i in range(20)]
        await asyncio.sleep(0.1)
        start = time.monotonic()
        if how == "kill":
            os.kill(llm.engine_core.pid, signal.SIGKILL)
        else:
            await llm.collective_rpc("fail_next_step")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert message in str(result)
        assert time.monotonic() - start < 2.0
        assert llm.num_unfinished_requests == 0
        await check_dead(llm, message)

    run(main())


def test_death_while_nothing_runs_is_noticed(make: Callable[..., AsyncLLM]) -> None:
    """Also before the first request, and without an event loop."""
    llm = make()
    os.kill(llm.engine_core.pid, signal.SIGKILL)
    wait_until(lambda: llm.errored, "the death to be noticed")
    run(check_dead(llm, "SIGKILL"))


async def check_dead(llm: AsyncLLM, message: str) -> None:
    assert (llm.errored, llm.is_running) == (True, False)
    assert message in str(llm.dead_error)
    for call in (
        llm.check_health(),
        collect(stream(llm, [5])),
        llm.reset_prefix_cache(),
        llm.get_stats(),
        llm.pause_generation(),
        llm.sleep(),
        llm.is_sleeping(),
    ):
        with pytest.raises(EngineDeadError, match=message):
            await call
    await llm.abort("0")


def test_fault_of_the_output_handler_is_no_silence(make: Callable[..., AsyncLLM], caplog: pytest.LogCaptureFixture) -> None:
    llm = make()

    def broken(*args: Any) -> Any:
        raise IndexError("a fault")

    llm.output_processor.process_outputs = broken  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match=r"outputs cannot be processed: IndexError\('a fault'\)"):
        run(collect(stream(llm, [5])))
    assert llm.errored
    assert "a fault" in caplog.text


def test_drain(make: Callable[..., AsyncLLM]) -> None:
    """What can end in time does, the rest is aborted, and nothing more is taken."""
    llm = make()

    async def main() -> None:
        await set_step_time(llm, 0.01)
        short = asyncio.create_task(collect(stream(llm, [5], "short", max_tokens=5)))
        long = asyncio.create_task(collect(stream(llm, [6], "long", max_tokens=63)))
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(llm.drain(0.3))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="takes no more requests"):
            await collect(stream(llm, [7]))
        await draining
        assert tokens_of(await short) == expected_tokens([5], 5)
        assert (await long)[-1].outputs[0].finish_reason == "abort"
        llm.shutdown()

    run(main())
    assert not is_alive(llm.engine_core.pid)


def test_shutdown_ends_open_streams(make: Callable[..., AsyncLLM]) -> None:
    llm = make()

    async def main() -> None:
        await set_step_time(llm, 0.01)
        task = asyncio.create_task(collect(stream(llm, [5], max_tokens=60)))
        await asyncio.sleep(0.05)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        await check_dead(llm, "shut down")

    run(main())
