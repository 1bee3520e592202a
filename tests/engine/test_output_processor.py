"""Outputs of the engine core to RequestOutputs: kinds, stop strings, streams, n > 1, aborts, statistics."""

from typing import Any

import pytest
from toy_engine import lists_of
from transformers import PreTrainedTokenizerFast

from jaxllm.core.types import EngineCoreEvent, EngineCoreOutput, EngineCoreRequest, EventType, FinishReason
from jaxllm.engine.errors import RequestFailedError
from jaxllm.engine.metrics import IterationStats
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.parallel_sampling import ParentRequest
from jaxllm.outputs import FlatLogprobs, Logprob, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Queue:
    """The seam of a stream."""

    def __init__(self) -> None:
        self.items: list[RequestOutput | Exception] = []

    def put(self, item: RequestOutput | Exception) -> None:
        self.items.append(item)


class Bench:
    """An output processor and requests that a test feeds by hand."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, stream_interval: int = 1, log_stats: bool = False) -> None:
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(tokenizer, log_stats, stream_interval)
        self.aborts: list[str] = []

    def add(self, request_id: str, external_id: str = "x", queue: Queue | None = None, **params: Any) -> EngineCoreRequest:
        request = EngineCoreRequest(request_id, [5, 6, 7], SamplingParams(**params), arrival_time=100.0)
        if request.sampling_params.n == 1:
            self.processor.add_request(request, external_id, "prompt", queue=queue)
            return request
        parent = ParentRequest(request)
        for index, child in enumerate(parent.make_children(request)):
            self.processor.add_request(child, external_id, "prompt", parent, index, queue)
        return request

    def feed(self, request_id: str, tokens: list[int] | str, finish: FinishReason | None = None, **more: Any) -> Any:
        """One output of the engine core; the RequestOutput that it makes, or None."""
        if isinstance(tokens, str):
            assert self.tokenizer is not None
            tokens = self.tokenizer.encode(tokens, add_special_tokens=False)
        result = self.processor.process_outputs([EngineCoreOutput(request_id, tokens, finish_reason=finish, **more)])
        self.aborts += result.reqs_to_abort
        assert len(result.request_outputs) <= 1
        return result.request_outputs[0] if result.request_outputs else None

    def check_empty(self) -> None:
        processor = self.processor
        assert (processor.request_states, processor.parents, processor.internal_ids) == ({}, {}, {})


@pytest.fixture
def bench(tokenizer: PreTrainedTokenizerFast) -> Bench:
    return Bench(tokenizer)


def texts(output: RequestOutput) -> list[str]:
    return [completion.text for completion in output.outputs]


def test_cumulative(bench: Bench) -> None:
    bench.add("r", output_kind=CUMULATIVE)
    first = bench.feed("r", "ab")
    second = bench.feed("r", "c", FinishReason.LENGTH)
    assert (first.request_id, first.prompt, first.prompt_token_ids, first.finished) == ("x", "prompt", [5, 6, 7], False)
    assert (texts(first), texts(second)) == (["ab"], ["abc"])
    # What was given away does not change.
    assert len(first.outputs[0].token_ids) == 2
    assert len(second.outputs[0].token_ids) == 3
    assert (first.outputs[0].finish_reason, second.outputs[0].finish_reason) == (None, "length")
    assert (first.outputs[0].finished(), second.outputs[0].finished(), second.finished) == (False, True, True)
    assert second.outputs[0].stop_reason is None
    assert bench.aborts == []
    bench.check_empty()


def test_delta(bench: Bench) -> None:
    bench.add("r", output_kind=DELTA)
    outputs = [bench.feed("r", "ab"), bench.feed("r", "c"), bench.feed("r", "d", FinishReason.STOP, stop_reason=7)]
    assert [texts(output) for output in outputs] == [["ab"], ["c"], [""]]  # a stop token has no text
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 1, 1]
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", 7)


def test_final_only(bench: Bench) -> None:
    bench.add("r", output_kind=FINAL_ONLY)
    assert bench.feed("r", "ab") is None
    output = bench.feed("r", "c", FinishReason.REPETITION)
    assert texts(output) == ["abc"]
    assert (output.finished, output.outputs[0].finish_reason) == (True, "repetition")


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_stream_interval(tokenizer: PreTrainedTokenizerFast, kind: RequestOutputKind) -> None:
    """The first token and the end at once, between them every third token."""
    bench = Bench(tokenizer, stream_interval=3)
    bench.add("r", output_kind=kind)
    got = [bench.feed("r", char) for char in "abcdefgh"] + [bench.feed("r", "i", FinishReason.LENGTH)]
    got_texts = [output.outputs[0].text if output else None for output in got]
    if kind is DELTA:
        assert got_texts == ["a", None, None, "bcd", None, None, "efg", None, "hi"]
    else:
        assert got_texts == ["a", None, None, "abcd", None, None, "abcdefg", None, "abcdefghi"]
    sizes = [len(output.outputs[0].token_ids) for output in got if output]
    assert sizes == ([1, 3, 3, 2] if kind is DELTA else [1, 4, 7, 9])


@pytest.mark.parametrize(("engine", "request_", "num_outputs"), [(1, 3, 3), (3, 1, 3), (2, 3, 3), (3, 2, 3), (1, None, 6)])
def test_request_can_only_raise_the_stream_interval(
    tokenizer: PreTrainedTokenizerFast, engine: int, request_: int | None, num_outputs: int
) -> None:
    bench = Bench(tokenizer, stream_interval=engine)
    bench.add("r", output_kind=DELTA, stream_interval=request_)
    got = [bench.feed("r", char) for char in "abcde"] + [bench.feed("r", "f", FinishReason.LENGTH)]
    assert sum(output is not None for output in got) == num_outputs


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_a_request_that_the_core_goes_on_with(bench: Bench, include: bool) -> None:
    """Across two tokens, with more tokens after it in the same step, whose logprobs go too."""
    params = {"stop": ["yz"], "include_stop_str_in_output": include, "logprobs": 0}
    bench.add("r", output_kind=FINAL_ONLY, **params)
    assert bench.feed("r", "xy", new_logprobs=lists_of([([1], [-1.0], 1), ([2], [-2.0], 1)])) is None
    rows = [([3], [-4.0], 1), ([4], [-8.0], 1), ([5], [-16.0], 1)]
    output = bench.feed("r", "zab", new_logprobs=lists_of(rows))
    (completion,) = output.outputs
    assert completion.text == ("xyz" if include else "x")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "yz")
    assert len(completion.token_ids) == len(completion.logprobs) == 3
    assert completion.cumulative_logprob == -7.0
    assert bench.aborts == ["r"]
    assert bench.feed("r", "c") is None  # the core has sent another one meanwhile
    bench.check_empty()


def test_stop_string_at_the_last_token_that_the_core_allows(bench: Bench) -> None:
    """The core has ended it by length: the reason is the stop string, and there is nothing to abort."""
    bench.add("r", stop="b")
    output = bench.feed("r", "ab", FinishReason.LENGTH)
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("a", "stop", "b")
    assert bench.aborts == []


def test_stop_string_in_the_text_of_a_stop_token(bench: Bench) -> None:
    """A stop token has no text to look at, unless it is to be included."""
    for include, reason in ((False, 9), (True, "c")):
        bench.add("r", stop="c", include_stop_str_in_output=include)
        output = bench.feed("r", "abc", FinishReason.STOP, stop_reason=9)
        assert output.outputs[0].stop_reason == reason
        assert output.outputs[0].text == ("abc" if include else "ab")


def test_delta_holds_back_what_may_become_a_stop_string(bench: Bench) -> None:
    bench.add("r", output_kind=DELTA, stop=["xyz"])
    outputs = [bench.feed("r", char) for char in "axyaxyz"]
    assert "".join(texts(output)[0] for output in outputs) == "axya"
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1] * 7
    assert outputs[-1].finished


def test_min_tokens_keeps_stop_strings_away(bench: Bench) -> None:
    bench.add("r", stop="a", min_tokens=2)
    assert not bench.feed("r", "a").finished
    assert not bench.feed("r", "a").finished
    output = bench.feed("r", "a")
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("aa", "a")


def test_without_tokenizer() -> None:
    bench = Bench(None)
    bench.add("r", logprobs=0)
    output = bench.feed("r", [9, 8], FinishReason.STOP, new_logprobs=lists_of([([9], [-1.0], 1), ([8], [-2.0], 3)]))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [9, 8])
    assert output.outputs[0].logprobs == [{9: Logprob(-1.0, 1)}, {8: Logprob(-2.0, 3)}]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_logprobs_follow_the_tokens(bench: Bench, kind: RequestOutputKind, flat: bool) -> None:
    """And prompt logprobs come once in deltas, else every time."""
    bench.add("r", output_kind=kind, logprobs=0, prompt_logprobs=0, flat_logprobs=flat)
    outputs = [
        bench.feed(
            "r",
            [9],
            new_logprobs=lists_of([([9], [-1.0], 1)]),
            new_prompt_logprobs=lists_of([([6], [-1.0], 2), ([7], [-1.0], 3)]),
        ),
        bench.feed("r", [8], new_logprobs=lists_of([([8], [-2.0], 1)])),
        bench.feed("r", [4], FinishReason.LENGTH, new_logprobs=lists_of([([4], [-4.0], 1)])),
    ]
    outputs = [output for output in outputs if output is not None]
    got = [list(output.outputs[0].logprobs) for output in outputs]
    one, two, three = (
        {token: Logprob(value, 1, bench.tokenizer.decode([token]))} for token, value in ((9, -1), (8, -2), (4, -4))
    )
    have_prompt = [output.prompt_logprobs is not None for output in outputs]
    if kind is CUMULATIVE:
        assert (got, have_prompt) == ([[one], [one, two], [one, two, three]], [True, True, True])
    elif kind is DELTA:
        assert (got, have_prompt) == ([[one], [two], [three]], [True, False, False])
    else:
        assert (got, have_prompt) == ([[one, two, three]], [True])
    assert outputs[-1].outputs[0].cumulative_logprob == -7.0
    assert len(outputs[0].prompt_logprobs) == 3
    assert all(isinstance(output.outputs[0].logprobs, FlatLogprobs) is flat for output in outputs)


def test_num_cached_tokens_is_that_of_the_first_output(bench: Bench) -> None:
    bench.add("r")
    assert bench.feed("r", "a", num_cached_tokens=2).num_cached_tokens == 2
    assert bench.feed("r", "a", num_cached_tokens=0).num_cached_tokens == 2


def test_unknown_requests_are_passed_over(bench: Bench) -> None:
    bench.add("r")
    result = bench.processor.process_outputs([EngineCoreOutput("gone", [5]), EngineCoreOutput("r", [5])])
    assert [output.request_id for output in result.request_outputs] == ["x"]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_n_outputs(bench: Bench, kind: RequestOutputKind) -> None:
    bench.add("p", "mine", n=3, output_kind=kind)
    assert list(bench.processor.request_states) == ["0_p", "1_p", "2_p"]
    outputs = [
        bench.feed("1_p", "b"),
        bench.feed("2_p", "c", FinishReason.STOP),
        bench.feed("0_p", "aa", FinishReason.LENGTH),
        bench.feed("1_p", "b", FinishReason.LENGTH),
    ]
    if kind is FINAL_ONLY:
        assert outputs[:3] == [None] * 3
        assert [completion.index for completion in outputs[3].outputs] == [0, 1, 2]
        assert texts(outputs[3]) == ["aa", "bb", ""]
        assert [completion.finish_reason for completion in outputs[3].outputs] == ["length", "length", "stop"]
    else:
        assert [output.outputs[0].index for output in outputs] == [1, 2, 0, 1]
        assert [texts(output)[0] for output in outputs] == ["b", "", "aa", "b" if kind is DELTA else "bb"]
    assert [output.finished for output in outputs if output] == ([True] if kind is FINAL_ONLY else [False, False, False, True])
    assert {output.request_id for output in outputs if output} == {"mine"}
    bench.check_empty()


def test_children_have_seeds_of_their_own() -> None:
    request = EngineCoreRequest("p", [5], SamplingParams(n=3, seed=2**64 - 2, stop=["a"]))
    children = ParentRequest(request).make_children(request)
    assert [child.sampling_params.seed for child in children] == [2**64 - 2, 2**64 - 1, 0]
    assert [child.sampling_params.n for child in children] == [1, 1, 1]
    assert [child.request_id for child in children] == ["0_p", "1_p", "2_p"]
    assert request.sampling_params.n == 3
    unseeded = EngineCoreRequest("p", [5], SamplingParams(n=2))
    assert [child.sampling_params.seed for child in ParentRequest(unseeded).make_children(unseeded)] == [None, None]


def test_abort_by_the_callers_id(bench: Bench) -> None:
    """All requests of that name, children included; nothing comes of them any more."""
    bench.add("r1", "a")
    bench.add("r2", "b")
    bench.add("p", "a", n=2)
    bench.feed("0_p", "a", FinishReason.LENGTH)
    assert bench.processor.abort_requests(["a", "unknown"]) == ["r1", "1_p"]
    assert bench.feed("r1", "a") is None
    assert bench.feed("1_p", "a") is None
    assert bench.feed("r2", "a") is not None
    assert bench.processor.num_unfinished_requests == 1
    assert bench.processor.abort_requests(["a"]) == []
    assert bench.processor.abort_requests(["r2"]) == []
    assert bench.processor.abort_requests(["r2"], internal=True) == ["r2"]
    bench.check_empty()


def test_abort_of_one_child_or_of_the_parent(bench: Bench) -> None:
    bench.add("p", "a", n=3)
    assert bench.processor.abort_requests(["1_p"], internal=True) == ["1_p"]
    assert bench.processor.abort_requests(["p"], internal=True) == ["0_p", "2_p"]
    bench.check_empty()


def test_queues(bench: Bench) -> None:
    """A request's own queue takes its outputs, and its end when it is aborted."""
    queue, other = Queue(), Queue()
    bench.add("r", queue=queue, output_kind=DELTA)
    bench.add("s", "y", queue=other, output_kind=FINAL_ONLY, n=2)
    assert bench.feed("r", "a") is None
    assert bench.feed("0_s", "a") is None
    assert bench.processor.abort_requests(["x", "y"]) == ["r", "0_s", "1_s"]
    first, last = queue.items
    assert isinstance(first, RequestOutput)
    assert isinstance(last, RequestOutput)
    assert (texts(first), texts(last)) == (["a"], [""])
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    (both,) = other.items
    assert isinstance(both, RequestOutput)
    assert [(completion.text, completion.finish_reason) for completion in both.outputs] == [("a", "abort"), ("", "abort")]
    bench.check_empty()


def test_failed_request(bench: Bench) -> None:
    """It raises in its stream, and the others go on; without a stream the output says so."""
    queue = Queue()
    bench.add("r", queue=queue)
    bench.add("s", "y")
    failed, fine = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR), EngineCoreOutput("s", [70])
    assert len(bench.processor.process_outputs([failed, fine]).request_outputs) == 1
    (error,) = queue.items
    assert isinstance(error, RequestFailedError)
    assert "x" in str(error)
    assert bench.feed("s", [], FinishReason.ERROR).outputs[0].finish_reason == "error"
    bench.check_empty()


def test_times(tokenizer: PreTrainedTokenizerFast) -> None:
    """Events and steps of one request, and what is counted of it, by hand."""
    bench = Bench(tokenizer, log_stats=True)
    bench.add("r", output_kind=FINAL_ONLY, max_tokens=9)
    events = [EngineCoreEvent(EventType.QUEUED, 10.0), EngineCoreEvent(EventType.SCHEDULED, 12.0)]
    step = IterationStats(timestamp=103.0)
    output = EngineCoreOutput("r", [70], events=events, num_cached_tokens=2)
    bench.processor.process_outputs([output], 15.0, step)
    assert (step.num_prompt_tokens, step.num_cached_tokens, step.num_generation_tokens) == (3, 2, 1)
    assert (step.times_to_first_token, step.inter_token_latencies, step.finished_requests) == ([3.0], [], [])

    # Preempted and resumed: the times of the first scheduling stay.
    step = IterationStats(timestamp=104.0)
    events = [EngineCoreEvent(EventType.PREEMPTED, 15.5), EngineCoreEvent(EventType.SCHEDULED, 15.75)]
    bench.processor.process_outputs([EngineCoreOutput("r", [70, 71], events=events, num_cached_tokens=3)], 16.0, step)
    assert (step.num_prompt_tokens, step.num_cached_tokens, step.num_generation_tokens) == (0, 0, 2)
    assert (step.times_to_first_token, step.inter_token_latencies, step.num_preemptions) == ([], [1.0], 1)

    step = IterationStats(timestamp=105.0)
    last = EngineCoreOutput("r", [70], finish_reason=FinishReason.LENGTH, num_cached_tokens=3)
    (result,) = bench.processor.process_outputs([last], 18.0, step).request_outputs
    stats = result.metrics
    assert (stats.arrival_time, stats.queued_ts, stats.scheduled_ts, stats.first_token_ts) == (100.0, 10.0, 12.0, 15.0)
    assert (stats.last_token_ts, stats.first_token_latency, stats.num_generation_tokens) == (18.0, 3.0, 4)
    (finished,) = step.finished_requests
    assert (finished.finish_reason, finished.num_prompt_tokens, finished.num_generation_tokens) == (FinishReason.LENGTH, 3, 4)
    assert (finished.num_cached_tokens, finished.num_preemptions, finished.max_tokens) == (2, 1, 9)
    assert (finished.queued_time, finished.prefill_time, finished.decode_time, finished.inference_time) == (2.0, 3.0, 3.0, 6.0)
    assert finished.mean_time_per_output_token == 1.0
    assert finished.e2e_latency > 0.0
    assert (step.max_num_generation_tokens, step.n) == ([4], [1])


def test_tokens_after_a_stop_string_are_not_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    bench = Bench(tokenizer, log_stats=True)
    bench.add("r", stop="b")
    step = IterationStats(timestamp=101.0)
    tokens = tokenizer.encode("abcd")
    (result,) = bench.processor.process_outputs([EngineCoreOutput("r", tokens)], 1.0, step).request_outputs
    assert result.metrics.num_generation_tokens == step.num_generation_tokens == step.max_num_generation_tokens[0] == 2


def test_n_outputs_count_as_one_call(tokenizer: PreTrainedTokenizerFast) -> None:
    bench = Bench(tokenizer, log_stats=True)
    bench.add("p", n=2)
    step = IterationStats(timestamp=101.0)
    outputs = [EngineCoreOutput(f"{i}_p", [70] * (3 - i), finish_reason=FinishReason.LENGTH) for i in range(2)]
    bench.processor.process_outputs(outputs, 1.0, step)
    assert (step.max_num_generation_tokens, step.n, len(step.finished_requests)) == ([3], [2], 2)


def test_no_metrics_without_statistics(bench: Bench) -> None:
    bench.add("r")
    assert bench.feed("r", "a").metrics is None
