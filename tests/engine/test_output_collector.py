"""One slot a stream: what a slow reader gets is what a quick one gets, in fewer pieces."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.engine.output_collector import RequestOutputCollector
from jaxllm.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput
from jaxllm.sampling_params import RequestOutputKind

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def output_of(*completions: CompletionOutput, finished: bool = False, **more: Any) -> RequestOutput:
    return RequestOutput("r", "p", [1], more.pop("prompt_logprobs", None), list(completions), finished, **more)


def test_deltas_are_joined() -> None:
    collector = RequestOutputCollector(DELTA)
    first, second, third = [{5: Logprob(-1.0)}], [{6: Logprob(-2.0)}], [{7: Logprob(-3.0)}]
    prompt_logprobs = [None, {1: Logprob(-0.5)}]
    collector.put(output_of(CompletionOutput(0, "a", [5], -1.0, first), prompt_logprobs=prompt_logprobs, num_cached_tokens=4))
    collector.put(output_of(CompletionOutput(0, "b", [6], -3.0, second), num_cached_tokens=4))
    collector.put(output_of(CompletionOutput(0, "c", [7], -6.0, third, "stop", "c"), finished=True, num_cached_tokens=4))
    merged = CompletionOutput(
        0, "abc", [5, 6, 7], -6.0, [{5: Logprob(-1.0)}, {6: Logprob(-2.0)}, {7: Logprob(-3.0)}], "stop", "c"
    )
    assert collector.get_nowait() == output_of(merged, finished=True, prompt_logprobs=prompt_logprobs, num_cached_tokens=4)
    assert collector.get_nowait() is None


def test_flat_logprobs_are_joined() -> None:
    collector = RequestOutputCollector(DELTA)
    for token in (5, 6):
        flat = FlatLogprobs()
        flat.append({token: Logprob(-float(token), 1, str(token)), 1: Logprob(-9.0)})
        collector.put(output_of(CompletionOutput(0, "", [token], None, flat)))
    output = collector.get_nowait()
    assert output is not None
    joined = output.outputs[0].logprobs
    assert isinstance(joined, FlatLogprobs)
    assert list(joined) == [{5: Logprob(-5.0, 1, "5"), 1: Logprob(-9.0)}, {6: Logprob(-6.0, 1, "6"), 1: Logprob(-9.0)}]
    joined.extend([None, {7: Logprob(-7.0)}])
    assert list(joined)[2:] == [{}, {7: Logprob(-7.0)}]


def test_the_newest_of_each_choice_stays() -> None:
    """Cumulative outputs of n choices come one choice at a time."""
    collector = RequestOutputCollector(CUMULATIVE)
    collector.put(output_of(CompletionOutput(0, "a", [5])))
    collector.put(output_of(CompletionOutput(1, "x", [8])))
    collector.put(output_of(CompletionOutput(0, "ab", [5, 6], finish_reason="length")))
    assert collector.get_nowait() == output_of(
        CompletionOutput(0, "ab", [5, 6], finish_reason="length"), CompletionOutput(1, "x", [8])
    )


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=20))
def test_any_pace(script: list[tuple[int, bool]]) -> None:
    """Deltas of three choices, read now and then: nothing is lost, doubled or in another order."""
    collector = RequestOutputCollector(DELTA)
    sent: dict[int, list[int]] = {0: [], 1: [], 2: []}
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def read() -> None:
        if (output := collector.get_nowait()) is not None:
            for completion in output.outputs:
                got[completion.index] += completion.token_ids
                assert completion.text == "".join(map(chr, completion.token_ids))

    for token, (index, is_read) in enumerate(script, start=65):
        sent[index].append(token)
        collector.put(output_of(CompletionOutput(index, chr(token), [token])))
        if is_read:
            read()
    read()
    assert got == sent


def test_error_comes_after_what_was_there() -> None:
    async def main() -> None:
        collector = RequestOutputCollector(DELTA)
        collector.put(output_of(CompletionOutput(0, "a", [5])))
        collector.put(OSError("gone"))
        assert (await collector.get()).outputs[0].text == "a"
        for _ in range(2):
            with pytest.raises(OSError, match="gone"):
                await collector.get()
            with pytest.raises(OSError, match="gone"):
                collector.get_nowait()

    asyncio.run(main())


def test_get_waits() -> None:
    async def main() -> None:
        collector = RequestOutputCollector(FINAL_ONLY)
        for text in "ab":
            task = asyncio.create_task(collector.get())
            await asyncio.sleep(0)
            assert not task.done()
            collector.put(output_of(CompletionOutput(0, text, [5])))
            assert (await task).outputs[0].text == text

    asyncio.run(main())
