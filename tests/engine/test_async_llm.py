"""AsyncLLM over an engine core in another process, with the toy model."""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from async_streams import check_idle, collect, run, set_step_time, stream, tokens_of
from child_engine import make_async_llm
from toy_engine import expected_tokens, make_config
from transformers import PreTrainedTokenizerFast

from jaxllm.engine.async_llm import LEAST_CHARS_FOR_THREAD, OUTPUTS_PER_TURN, AsyncLLM
from jaxllm.engine.errors import MaxQueuedTokensError, QueueOverflowError, RequestFailedError
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def long_lived(tokenizer: PreTrainedTokenizerFast) -> Iterator[AsyncLLM]:
    llm = make_async_llm(tokenizer, max_model_len=256, num_blocks=257, max_num_seqs=16)
    yield llm
    llm.shutdown()


@pytest.fixture
def llm(long_lived: AsyncLLM) -> Iterator[AsyncLLM]:
    """For tests that leave it alive. Each has an event loop of its own."""
    yield long_lived
    run(check_idle(long_lived))


def test_kinds(llm: AsyncLLM, tokenizer: PreTrainedTokenizerFast) -> None:
    async def main() -> None:
        prompt = tokenizer.encode("hello")
        expected = expected_tokens(prompt, 9)
        await set_step_time(llm, 0.002)
        cumulative, deltas, final = await asyncio.gather(
            *(collect(stream(llm, "hello", kind.name, max_tokens=9, output_kind=kind, logprobs=1)) for kind in RequestOutputKind)
        )
        assert tokens_of(deltas) == expected
        assert cumulative[-1].outputs[0].token_ids == expected
        assert len(final) == 1
        (whole,) = final[0].outputs
        assert "".join(output.outputs[0].text for output in deltas) == whole.text == cumulative[-1].outputs[0].text
        assert [entry for output in deltas for entry in output.outputs[0].logprobs or []] == whole.logprobs
        assert len(deltas) >= 3
        for outputs in (deltas, cumulative, final):
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[-1].outputs[0].finish_reason == "length"
            assert outputs[0].prompt_token_ids == prompt
        assert final[0].request_id == "FINAL_ONLY"

    run(main())


def test_n(llm: AsyncLLM) -> None:
    async def main() -> None:
        outputs = await collect(stream(llm, [5, 6], n=3, max_tokens=7))
        assert [tokens_of(outputs, index) for index in range(3)] == [expected_tokens([5, 6], 7)] * 3
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        (final,) = await collect(stream(llm, [5, 6], n=3, max_tokens=7, output_kind=FINAL_ONLY))
        assert [one.index for one in final.outputs] == [0, 1, 2]

    run(main())


def test_stop_string_ends_the_request_in_the_engine(llm: AsyncLLM) -> None:
    async def main() -> None:
        text = "".join(output.outputs[0].text for output in await collect(stream(llm, [5, 6], max_tokens=9)))
        await set_step_time(llm, 0.005)
        outputs = await collect(stream(llm, [5, 6], max_tokens=250, stop=[text[-2:]]))
        assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", text[-2:])
        await asyncio.sleep(0.02)
        assert (await llm.get_stats()).num_running_reqs == 0

    run(main())


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "prompt must not be empty"),
        ([5] * 256, {}, "maximum model length of 256"),
        ([5], {"logprobs": 21}, "logprobs must be at most 20"),
        (7, {}, "prompt must be a string"),
        ({"prompt": "a", "images": 1}, {}, "unknown field 'images'"),
    ],
)
def test_mistakes_are_raised_before_anything_is_queued(llm: AsyncLLM, prompt: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(collect(stream(llm, prompt, **params)))


def test_ranks_and_priorities(llm: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=2)
        assert len(await collect(llm.generate([5], params, "r", data_parallel_rank=0))) >= 1
        for rank in (1, -1):
            with pytest.raises(ValueError, match=rf"data_parallel_rank must be in \[0, 0\], got {rank}"):
                await collect(llm.generate([5], params, "r", data_parallel_rank=rank))
        with pytest.raises(ValueError, match="priority must be 0"):
            await collect(llm.generate([5], params, "r", priority=1))
        with pytest.raises(ValueError, match="cache_salt must not contain '@'"):
            await collect(llm.generate([5], params, "r", cache_salt="a@b"))

    run(main())


def test_cache_salt(llm: AsyncLLM) -> None:
    """Prefixes are shared by those with the same salt only."""

    async def main() -> None:
        hits = []
        for salt in (None, None, "a", "a", "b"):
            outputs = await collect(llm.generate([5] * 41, SamplingParams(max_tokens=1), "r", cache_salt=salt))
            hits.append(outputs[-1].num_cached_tokens)
        assert hits == [0, 40, 0, 40, 0]

    run(main())


def test_consumers_that_stop(llm: AsyncLLM) -> None:
    """Each way to leave a stream aborts its request at once, and only that."""

    async def main() -> None:
        await set_step_time(llm, 0.005)
        other = asyncio.create_task(collect(stream(llm, [9], "other", max_tokens=200)))

        async for _ in (broken_off := stream(llm, [5], max_tokens=250)):
            break
        await broken_off.aclose()

        async def fails() -> None:
            async for _ in stream(llm, [6], max_tokens=250):
                raise KeyError("consumer")

        with pytest.raises(KeyError):
            await fails()

        cancelled = asyncio.create_task(collect(stream(llm, [7], max_tokens=250)))
        await asyncio.sleep(0.03)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.03):
                await collect(stream(llm, [8], max_tokens=250))

        while (await llm.get_stats()).num_running_reqs > 1:
            await asyncio.sleep(0.001)
        assert not other.done()  # so they have not just run to their end
        assert tokens_of(await other) == expected_tokens([9], 200)

    run(main())


def test_cancelled_before_it_was_queued(llm: AsyncLLM) -> None:
    """While its text is tokenized in a thread."""

    async def main() -> None:
        task = asyncio.create_task(collect(stream(llm, "a" * (LEAST_CHARS_FOR_THREAD + 1))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_abort_by_the_callers_id(llm: AsyncLLM) -> None:
    async def main() -> None:
        await set_step_time(llm, 0.005)
        tasks = [
            asyncio.create_task(collect(stream(llm, [5, i], request_id, max_tokens=100, n=n)))
            for i, (request_id, n) in enumerate([("a", 1), ("a", 2), ("b", 1)])
        ]
        await asyncio.sleep(0.05)
        await llm.abort("a")
        await llm.abort(["unknown"])
        for outputs in await asyncio.gather(*tasks[:2]):
            assert outputs[-1].finished
            assert {one.finish_reason for one in outputs[-1].outputs} == {"abort"}
            assert len(tokens_of(outputs)) < 100
        assert not tasks[2].done()
        await llm.abort(["b"])
        await tasks[2]

    run(main())


def test_slow_reader_gets_everything_in_fewer_pieces(llm: AsyncLLM) -> None:
    async def main() -> None:
        sizes = []
        async for output in stream(llm, [5], max_tokens=200):
            sizes.append(len(output.outputs[0].token_ids))
            if len(sizes) == 1:
                first = list(output.outputs[0].token_ids)
                while llm.num_unfinished_requests:
                    await asyncio.sleep(0.005)
                assert len(output.outputs[0].token_ids) == len(first)  # what was given away does not change
        assert len(sizes) == 2
        assert sum(sizes) == 200

    run(main())


def test_many_streams_and_random_cancellation(llm: AsyncLLM) -> None:
    """200 at once, of which a third ends early in one way or another: the others are right, and every block is free again."""
    rng = random.Random(1)

    async def one(i: int) -> str:
        prompt = [7, 8, 9, 10] * (i % 5) + [i % 97 + 3]
        num_tokens = 1 + i % 40
        fate = rng.choice(["", "", "break", "cancel", "abort", ""])
        got: list[int] = []
        outputs = stream(llm, prompt, str(i), max_tokens=num_tokens)
        async for output in outputs:
            got += output.outputs[0].token_ids
            if fate == "break" and len(got) >= num_tokens // 2:
                break
            if fate == "abort" and len(got) >= num_tokens // 2:
                await llm.abort(str(i))
            if fate == "cancel" and len(got) >= num_tokens // 2:
                raise asyncio.CancelledError
        await outputs.aclose()
        assert got == expected_tokens(prompt, num_tokens)[: len(got)]
        if not fate:
            assert len(got) == num_tokens
        return fate

    async def main() -> None:
        await set_step_time(llm, 0.001)
        tasks = [asyncio.create_task(one(i)) for i in range(200)]
        for task in rng.sample(tasks, 20):
            await asyncio.sleep(rng.random() * 0.01)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, str | asyncio.CancelledError) for result in results)
        assert results.count("") > 50

    run(main())


def test_long_text_does_not_stop_the_streams(llm: AsyncLLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """It is tokenized in another thread."""
    threads = set()
    encode = llm.input_processor._encode
    text = "hello " * LEAST_CHARS_FOR_THREAD

    def slow_encode(text: str, add_special_tokens: bool = True) -> list[int]:
        threads.add(threading.current_thread().name.partition("_")[0])
        if len(text) > 100:
            time.sleep(0.3)
        return encode(text, add_special_tokens)

    async def main() -> None:
        await set_step_time(llm, 0.005)
        short = asyncio.create_task(collect(stream(llm, "hello", max_tokens=20)))
        with pytest.raises(ValueError, match="longer than the maximum model length"):
            await collect(stream(llm, text))
        assert short.done()
        assert len(tokens_of(await short)) == 20

    llm.input_processor._encode = slow_encode  # type: ignore[method-assign]
    try:
        run(main())
    finally:
        llm.input_processor._encode = encode  # type: ignore[method-assign]
    assert threads == {"MainThread", "tokenize"}


def test_loop_gets_its_turn_amid_a_large_step(make: Callable[..., AsyncLLM]) -> None:
    num_requests = 3 * OUTPUTS_PER_TURN
    llm = make(max_num_seqs=num_requests, max_num_batched_tokens=num_requests, num_blocks=num_requests + 1)
    turns: list[int] = []
    num_ticks = 0
    ticks_at: list[int] = []
    process_outputs = llm.output_processor.process_outputs

    def counted(outputs: Any, *more: Any) -> Any:
        turns.append(len(outputs))
        ticks_at.append(num_ticks)
        return process_outputs(outputs, *more)

    llm.output_processor.process_outputs = counted  # type: ignore[method-assign]

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            num_ticks += 1
            await asyncio.sleep(0)

    async def main() -> None:
        await llm.pause_generation("keep")
        tasks = [asyncio.create_task(collect(stream(llm, [i % 50 + 3], str(i), max_tokens=1))) for i in range(num_requests)]
        while (await llm.get_stats()).num_waiting_reqs < num_requests:
            await asyncio.sleep(0.005)
        ticker = asyncio.create_task(tick())
        await llm.resume_generation()
        await asyncio.gather(*tasks)
        ticker.cancel()

    run(main())
    assert turns == [OUTPUTS_PER_TURN] * 3
    assert ticks_at[0] < ticks_at[1] < ticks_at[2]


def test_pause_and_resume(llm: AsyncLLM) -> None:
    async def main() -> None:
        await set_step_time(llm, 0.005)
        first = asyncio.create_task(collect(stream(llm, [5], "first", max_tokens=30)))
        await asyncio.sleep(0.05)
        await llm.pause_generation("keep", clear_cache=False)
        assert await llm.is_paused()
        assert not await llm.is_sleeping()
        second = asyncio.create_task(collect(stream(llm, [6], "second", max_tokens=3)))
        await asyncio.sleep(0.05)
        assert not first.done()
        assert not second.done()
        await llm.resume_generation()
        assert not await llm.is_paused()
        assert tokens_of(await first) == expected_tokens([5], 30)
        assert tokens_of(await second) == expected_tokens([6], 3)

        third = asyncio.create_task(collect(stream(llm, [7], "third", max_tokens=30)))
        await asyncio.sleep(0.05)
        await llm.pause_generation("wait")
        assert llm.num_unfinished_requests == 0
        assert tokens_of(await third) == expected_tokens([7], 30)
        await llm.resume_generation()

        fourth = asyncio.create_task(collect(stream(llm, [8], "fourth", max_tokens=200)))
        await asyncio.sleep(0.05)
        await llm.pause_generation()
        assert (await fourth)[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(ValueError, match="mode must be one of"):
            await llm.pause_generation("now")  # type: ignore[arg-type]

    run(main())


def test_sleep(llm: AsyncLLM) -> None:
    async def main() -> None:
        await set_step_time(llm, 0.005)
        first = asyncio.create_task(collect(stream(llm, [5], "first", max_tokens=30)))
        await asyncio.sleep(0.05)
        await llm.sleep(2, "keep")
        assert await llm.is_sleeping()
        assert await llm.collective_rpc("device_state") == [({"weights", "kv_cache"}, 2)]
        second = asyncio.create_task(collect(stream(llm, [6], "second", max_tokens=3)))
        with pytest.raises(ValueError, match="wake_up, not resume"):
            await llm.resume_generation()
        await llm.wake_up(["weights"])
        assert await llm.is_sleeping()
        await llm.wake_up()
        assert not await llm.is_sleeping()
        assert tokens_of(await first) == expected_tokens([5], 30)
        assert tokens_of(await second) == expected_tokens([6], 3)

    run(main())


def test_metrics(make: Callable[..., AsyncLLM]) -> None:
    llm = make(max_num_queued_reqs=2, max_num_queued_tokens=8)

    async def main() -> None:
        await set_step_time(llm, 0.005)
        await llm.pause_generation("keep")
        tasks = [asyncio.create_task(collect(stream(llm, [5, 6], str(i), max_tokens=4))) for i in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueOverflowError, match="max_num_queued_reqs"):
            await collect(stream(llm, [5]))
        await llm.abort("1")
        with pytest.raises(MaxQueuedTokensError, match="max_num_queued_tokens"):
            await collect(stream(llm, [5] * 9))
        await llm.resume_generation()
        await asyncio.gather(*tasks)
        await check_idle(llm)

    run(main())
    metrics = {metric.name + "".join(metric.labels.values()): metric for metric in llm.get_metrics()}
    values = {name.removeprefix("jaxllm:"): getattr(metric, "value", None) for name, metric in metrics.items()}
    assert values["admission_rejectionsmax_num_queued_reqs"] == values["admission_rejectionsmax_num_queued_tokens"] == 1
    assert (values["prompt_tokens"], values["generation_tokens"], values["request_successlength"]) == (2, 4, 1)
    assert (values["num_requests_running"], values["num_requests_waiting"]) == (0, 0)


def test_what_is_not_there() -> None:
    llm = AsyncLLM(make_config(log_stats=False), None, sys.modules["child_engine"].ChildExecutor)
    try:
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.get_tokenizer()
        with pytest.raises(ValueError, match="no statistics"):
            llm.get_metrics()
        assert len(run(collect(stream(llm, [5], detokenize=False)))) >= 1
    finally:
        llm.shutdown()


def test_refused_request_raises_in_its_stream(llm: AsyncLLM, capfd: pytest.CaptureFixture[str]) -> None:
    """What passed the checks here and fails in the engine core."""
    make = llm.input_processor.process_inputs

    def process_inputs(*args: Any) -> Any:
        request, text = make(*args)
        request.prompt_token_ids[-1] = 2**32
        return request, text

    async def main() -> None:
        llm.input_processor.process_inputs = process_inputs  # type: ignore[method-assign]
        with pytest.raises(RequestFailedError, match="request r failed in the engine: token ids must be integers"):
            await collect(stream(llm, [5] * 4, detokenize=False))

    try:
        run(main())
    finally:
        llm.input_processor.process_inputs = make  # type: ignore[method-assign]


def test_survives_its_event_loop(llm: AsyncLLM) -> None:
    """A loop that ends takes the output handler with it; the next one has another."""

    async def left_open() -> None:
        await set_step_time(llm, 0.005)
        outputs = stream(llm, [5], max_tokens=200)
        await anext(outputs)

    run(left_open())
    assert tokens_of(run(collect(stream(llm, [6])))) == expected_tokens([6], 5)
