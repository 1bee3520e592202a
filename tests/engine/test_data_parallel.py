"""AsyncLLM over two engine cores, with the toy model: who gets what, and what each of them counts."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from async_streams import collect, run, set_step_time, stream, tokens_of
from child_engine import PATIENCE_S, BrokenExecutor, ChildExecutor, DyingExecutor, is_alive, wait_until
from toy_engine import expected_tokens, make_config
from transformers import PreTrainedTokenizerFast

from jaxllm.engine import engine_group
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.coordinator import CoordinatorProcess
from jaxllm.engine.dp_client import DPLBAsyncMPClient
from jaxllm.engine.errors import EngineDeadError, EngineStartError
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.metrics import Counter
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

pytestmark = pytest.mark.timeout(90)

PARAMS = SamplingParams(max_tokens=30)


def client_of(llm: AsyncLLM) -> DPLBAsyncMPClient:
    assert isinstance(llm.engine_core, DPLBAsyncMPClient)
    return llm.engine_core


def pids_of(llm: AsyncLLM) -> list[int]:
    return [*client_of(llm).pids, coordinator_of(llm).process.pid]


def coordinator_of(llm: AsyncLLM) -> CoordinatorProcess:
    coordinator = client_of(llm)._group.coordinator
    assert coordinator is not None
    return coordinator


@pytest.fixture(scope="module", autouse=True)
def own_temp_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nobody else's sockets are in it. Its path is short enough for them."""
    tmp_path_factory.getbasetemp()  # not inside
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def make_pair(tokenizer: PreTrainedTokenizerFast, own_temp_folder: Path) -> Iterator[Callable[..., AsyncLLM]]:
    """AsyncLLMs of a test's own, with two engine cores, which it may break. Nothing of them may be left."""
    made: list[tuple[AsyncLLM, list[int]]] = []

    def make_one(**config: Any) -> AsyncLLM:
        config = {"data_parallel_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 16, **config}
        llm = AsyncLLM(make_config(**config), tokenizer, ChildExecutor)
        made.append((llm, pids_of(llm)))
        return llm

    yield make_one
    for llm, pids in made:
        pids += pids_of(llm)
        llm.shutdown()
        assert not any(map(is_alive, pids))
    assert os.listdir(own_temp_folder) == []


def tokens_by_engine(llm: AsyncLLM) -> list[float]:
    metrics = [metric for metric in llm.get_metrics() if metric.name == "jaxllm:generation_tokens"]
    assert [metric.labels for metric in metrics] == [{"engine": "0"}, {"engine": "1"}]
    return [metric.value for metric in metrics if isinstance(metric, Counter)]


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        await asyncio.sleep(0.005)


def test_both_engines_work(make_pair: Callable[..., AsyncLLM]) -> None:
    """Requests, calls, metrics and aborts of two engine cores behind one AsyncLLM."""
    llm = make_pair()
    client = client_of(llm)

    async def main() -> None:
        # Without news of the engines the front end counts its own requests alone, and none ends before all are shared out.
        coordinator = coordinator_of(llm).process.pid
        await set_step_time(llm, 0.2)
        os.kill(coordinator, signal.SIGSTOP)
        try:
            streams = (collect(stream(llm, [5, i], str(i), max_tokens=6, n=1 + i % 2)) for i in range(40))
            ended = asyncio.gather(*streams)
            await until(lambda: client.num_unfinished(0) + client.num_unfinished(1) == 60, "60 requests in the engines")
        finally:
            os.kill(coordinator, signal.SIGCONT)
        await set_step_time(llm, 0.0)
        outputs = await ended
        for i, found in enumerate(outputs):
            assert tokens_of(found) == expected_tokens([5, i], 6)
        # 60 requests of 6 tokens, in turn.
        assert tokens_by_engine(llm) == [180, 180]
        # A wish is honoured, and a request that is aborted ends where it runs.
        await set_step_time(llm, 0.01)
        kept = asyncio.create_task(collect(stream(llm, [6], "kept", max_tokens=30)))
        for rank in (1, 1, 1):
            generator = llm.generate([7], PARAMS, "r", data_parallel_rank=rank)
            await anext(generator)
            await generator.aclose()
        assert tokens_of(await kept) == expected_tokens([6], 30)
        await until(lambda: not client._engine_of, "the aborted requests to end")
        assert (client.num_unfinished(0), client.num_unfinished(1)) == (0, 0)
        for rank in (-1, 2):
            with pytest.raises(ValueError, match=r"data_parallel_rank must be in \[0, 1\], got"):
                await collect(llm.generate([5], PARAMS, "r", data_parallel_rank=rank))
        # Calls go to both.
        assert await llm.collective_rpc("echo", args=(1,)) == [((1,), {})] * 2
        await llm.pause_generation("keep")
        assert await llm.is_paused()
        waiting = [asyncio.create_task(collect(stream(llm, [8, i], max_tokens=2))) for i in range(4)]
        await until(lambda: sum(map(client.num_unfinished, (0, 1))) == 4, "the requests to be queued")
        assert (await llm.get_stats()).num_waiting_reqs == 4
        await llm.resume_generation()
        assert [tokens_of(found) for found in await asyncio.gather(*waiting)] == [expected_tokens([8, i], 2) for i in range(4)]
        await llm.sleep(1)
        assert await llm.is_sleeping()
        assert len(await llm.collective_rpc("device_state")) == 2
        await llm.wake_up()
        with pytest.raises(ValueError, match="level must be 0, 1 or 2, got 3"):
            await llm.sleep(3)
        while await llm.collective_rpc("num_rows") != [0, 0]:
            await asyncio.sleep(0.005)

    run(main())


def test_snapshots_reach_the_balancer(make_pair: Callable[..., AsyncLLM]) -> None:
    """Also after the coordinator was killed."""
    llm = make_pair()
    client = client_of(llm)

    async def main() -> None:
        await set_step_time(llm, 0.02)
        tasks = [asyncio.create_task(collect(llm.generate([5, i], PARAMS, str(i), data_parallel_rank=0))) for i in range(6)]
        await until(lambda: (s := client._group.snapshot) is not None and s[0] is not None and s[0].waiting == 2, "a snapshot")
        snapshot = client._group.snapshot
        assert snapshot is not None
        assert snapshot[0].running == 4
        assert snapshot[0].kv_cache_usage > 0
        # The coordinator dies; another takes its place and hears of the engine cores again.
        coordinator = coordinator_of(llm)
        first = coordinator.process.pid
        os.kill(first, signal.SIGKILL)
        client._group.snapshot = None
        assert [tokens_of(found)[-1:] for found in await asyncio.gather(*tasks)] == [
            expected_tokens([5, i], 30)[-1:] for i in range(6)
        ]
        await until(lambda: coordinator.process.pid != first, "another coordinator")
        await collect(stream(llm, [5], max_tokens=30))
        await until(lambda: client._group.snapshot is not None, "its snapshot")

    run(main())


def test_one_engine_dies_under_load(make_pair: Callable[..., AsyncLLM]) -> None:
    """Only what its callers have a part of is lost: all else begins again in the other one."""
    llm = make_pair()
    client = client_of(llm)

    async def main() -> None:
        await set_step_time(llm, 0.02)
        begun: list[list[Any]] = [[] for _ in range(24)]

        async def one(i: int) -> list[int]:
            # Every third is not streamed: it may have tokens, but nobody has seen them.
            kind = RequestOutputKind.FINAL_ONLY if i % 3 == 0 else RequestOutputKind.DELTA
            async for output in stream(llm, [5, i], str(i), max_tokens=20, output_kind=kind, logprobs=1, n=1 + (i == 3)):
                begun[i].append(output)
            return tokens_of(begun[i])

        tasks = [asyncio.create_task(one(i)) for i in range(24)]
        await until(lambda: sum(map(bool, begun)) >= 4 and all(n > 4 for n in tokens_by_engine(llm)), "streams to begin")
        await until(lambda: client.num_unfinished(0) >= 8, "requests there")
        lost = {request.partition("-")[0] for request in client._requests[0]}
        os.kill(client.pids[0], signal.SIGKILL)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [i for i, result in enumerate(found) if isinstance(result, BaseException)]
        assert 1 <= len(failed) <= 4, failed  # no more than ran there at once
        for i, result in enumerate(found):
            if i in failed:
                assert begun[i], f"{i} was lost before it began"
                assert i % 3, f"{i} was not streamed and is lost"
                assert isinstance(result, EngineDeadError)
                assert "engine core 0's process was killed by SIGKILL" in str(result)
            else:
                assert result == expected_tokens([5, i], 20)
                assert sum(len(one.outputs[0].logprobs) for one in begun[i] if one.outputs) >= 20
        assert len(lost) > len(failed)
        # The other one goes on alone.
        assert llm.is_running
        await llm.check_health()
        assert llm.num_unfinished_requests == llm.output_processor.num_queued_tokens == 0
        outputs = await asyncio.gather(*(collect(stream(llm, [9, i], str(i), max_tokens=3)) for i in range(4)))
        assert [tokens_of(one) for one in outputs] == [expected_tokens([9, i], 3) for i in range(4)]
        with pytest.raises(EngineDeadError, match="engine core 0's process was killed by SIGKILL"):
            await collect(llm.generate([5], PARAMS, "r", data_parallel_rank=0))
        assert await llm.reset_prefix_cache()
        # Without the last one nothing goes.
        task = asyncio.create_task(collect(stream(llm, [5], max_tokens=60)))
        await asyncio.sleep(0.05)
        os.kill(client.pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="engine core 1's process was killed by SIGKILL"):
            await task
        await until(lambda: llm.errored, "the end")
        with pytest.raises(EngineDeadError, match=r"engine core 0's .* engine core 1's"):
            await llm.check_health()

    run(main())


def test_requests_go_where_their_prefix_is(make_pair: Callable[..., AsyncLLM]) -> None:
    llm = make_pair(data_parallel_routing="prefix", max_num_seqs=8)
    client = client_of(llm)

    placed, place = [], client.balancer.place

    def note_place(engine: int) -> None:
        placed.append(engine)
        place(engine)

    client.balancer.place = note_place  # type: ignore[method-assign]

    async def where(prompt: list[int], **kwargs: Any) -> tuple[int, int]:
        """(engine, cached tokens)"""
        outputs = await collect(llm.generate(prompt, PARAMS, "r", **kwargs))
        return placed[-1], outputs[-1].num_cached_tokens

    async def main() -> None:
        prefixes = [[10 + i] * 24 for i in range(3)]
        for rank, prefix in zip((0, 1, 1), prefixes, strict=True):
            await where([*prefix, 5], data_parallel_rank=rank)
        await until(lambda: client._prefixes is not None and len(client._prefixes) >= 18, "the events")
        for _ in range(3):
            assert await where([*prefixes[0], 6]) == (0, 24)
            assert await where([*prefixes[1], 6, 7]) == (1, 24)
            assert await where([*prefixes[2], 8]) == (1, 24)
        # Another salt is another prefix, and what nobody has goes round, sooner or later: snapshots may be old.
        assert (await where([*prefixes[0], 6], cache_salt="s"))[1] == 0
        assert {(await where([40 + i] * 12))[0] for i in range(30)} == {0, 1}
        # One that is overloaded gets no more.
        await set_step_time(llm, 0.02)
        tasks = [asyncio.create_task(collect(stream(llm, [*prefixes[0], i], str(i), max_tokens=9))) for i in range(40)]
        await until(lambda: client.num_unfinished(0) + client.num_unfinished(1) == 40, "all to be sent")
        assert 9 <= client.num_unfinished(0) <= 31
        assert [tokens_of(one) for one in await asyncio.gather(*tasks)] == [
            expected_tokens([*prefixes[0], i], 9) for i in range(40)
        ]
        # What is forgotten there is forgotten here.
        while not await llm.reset_prefix_cache():
            await asyncio.sleep(0.005)
        await until(lambda: client._prefixes is not None and len(client._prefixes) == 0, "the events")

    run(main())


def test_request_that_kills_engines_does_not_go_to_all_of_them(make_pair: Callable[..., AsyncLLM]) -> None:
    llm = make_pair(data_parallel_size=3)
    client = client_of(llm)

    async def main() -> None:
        await set_step_time(llm, 5.0)
        task = asyncio.create_task(collect(llm.generate([5], PARAMS, "r", data_parallel_rank=0)))
        await until(lambda: client.num_unfinished(0) == 1, "the request")
        os.kill(client.pids[0], signal.SIGKILL)
        await until(lambda: client.num_unfinished(1) + client.num_unfinished(2) == 1, "it to move")
        os.kill(client.pids[1 if client.num_unfinished(1) else 2], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await task
        assert llm.is_running

    run(main())


def test_engine_comes_back(make_pair: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is paused if the others are, gets requests again, and while no engine lives there is hope."""
    monkeypatch.setattr(engine_group, "FIRST_RESTART_DELAY_S", 0.05)
    llm = make_pair(data_parallel_restart=True)
    client = client_of(llm)

    async def main() -> None:
        await llm.pause_generation("keep")
        first = client.pids[1]
        os.kill(first, signal.SIGKILL)
        await until(lambda: client.balancer.available == [0], "the death to be noticed")
        await until(lambda: client.balancer.available == [0, 1], "its return")
        assert client.pids[1] != first
        assert not is_alive(first)
        waiting = asyncio.create_task(collect(llm.generate([5], PARAMS, "r", data_parallel_rank=1)))
        await until(lambda: client.num_unfinished(1) == 1, "the request")
        await asyncio.sleep(0.05)
        assert (await llm.get_stats()).num_waiting_reqs == 1
        await llm.resume_generation()
        assert tokens_of(await waiting)[-30:] == expected_tokens([5], 30)
        # Both at once.
        await set_step_time(llm, 0.05)
        tasks = [asyncio.create_task(collect(stream(llm, [5], max_tokens=60))) for _ in range(2)]
        await until(lambda: all(client.num_unfinished(engine) for engine in (0, 1)), "the requests")
        for pid in client.pids:
            os.kill(pid, signal.SIGKILL)
        for task in tasks:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await task
        assert not llm.errored
        await until(lambda: client.balancer.available == [0, 1], "both to return")
        outputs = await asyncio.gather(*(collect(stream(llm, [7, i], max_tokens=3)) for i in range(6)))
        assert [tokens_of(one) for one in outputs] == [expected_tokens([7, i], 3) for i in range(6)]
        # The end does not wait for one that is starting.
        os.kill(client.pids[0], signal.SIGKILL)
        await until(lambda: 0 in client._group._starting, "the start")
        start = time.monotonic()
        llm.shutdown()
        assert time.monotonic() - start < 5

    run(main())


@pytest.mark.parametrize(
    ("executor", "message"),
    [(BrokenExecutor, "0's process cannot start: OSError: no device"), (DyingExecutor, "exit code 7")],
)
def test_start_that_fails_leaves_nothing(executor: type[ChildExecutor], message: str, own_temp_folder: Path) -> None:
    with pytest.raises(EngineStartError, match=message):
        AsyncLLM(make_config(data_parallel_size=2), None, executor)
    assert os.listdir(own_temp_folder) == []


def test_forgotten_client_ends_its_processes(tokenizer: PreTrainedTokenizerFast) -> None:
    llm = AsyncLLM(make_config(data_parallel_size=2), tokenizer, ChildExecutor)
    pids = pids_of(llm)
    del llm
    wait_until(lambda: not any(map(is_alive, pids)), "the processes to end")


def test_ranks_of_another_servers_engines(make_pair: Callable[..., AsyncLLM]) -> None:
    llm = make_pair(data_parallel_start_rank=4)

    async def main() -> None:
        for rank in (4, 5, 5):
            assert tokens_of(await collect(llm.generate([5], PARAMS, "r", data_parallel_rank=rank)))[-30:] == expected_tokens(
                [5], 30
            )
        with pytest.raises(ValueError, match=r"data_parallel_rank must be in \[4, 5\], got 0"):
            await collect(llm.generate([5], PARAMS, "r", data_parallel_rank=0))
        found = {metric.labels["engine"]: metric.value for metric in llm.get_metrics() if metric.name == "jaxllm:prompt_tokens"}  # type: ignore[union-attr]
        assert found == {"4": 1, "5": 2}

    run(main())


def test_offline_engine_refuses() -> None:
    with pytest.raises(ValueError, match="data_parallel_size must be 1 here, got 2"):
        LLMEngine(make_config(data_parallel_size=2), None, ChildExecutor)
