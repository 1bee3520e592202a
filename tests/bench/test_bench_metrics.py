"""The definitions of the load test's figures, on times worked by hand."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.bench.metrics import (
    Objective,
    RequestRecord,
    Summary,
    calculate_metrics,
    chunks_per_second,
    concurrency_steps,
    output_lens,
    parse_goodput,
    parse_latencies,
    parse_percentiles,
)

# Sent at 10.0; chunks at 10.2, 10.3, 10.6: TTFT 0.2, ITL 0.1 and 0.3, E2EL 0.6; four tokens: TPOT 0.4 / 3.
FOUR_TOKENS = RequestRecord(prompt_len=7, due=9.5, start=10.0, chunk_times=[10.2, 10.3, 10.6], output_len=4, text="a b c d")
# Sent at 10.5; one chunk at 11.5: TTFT = E2EL = 1.0, no ITL, no TPOT.
ONE_TOKEN = RequestRecord(prompt_len=3, due=10.5, start=10.5, chunk_times=[11.5], output_len=1, text="x")
# Sent at 11.0; chunks at 11.1 and 12.0; the server did not count. TTFT 0.1, ITL 0.9, E2EL 1.0.
UNCOUNTED = RequestRecord(prompt_len=5, due=11.0, start=11.0, chunk_times=[11.1, 12.0], text="one two three")
FAILED = RequestRecord(prompt_len=100, due=10.0, start=10.0, chunk_times=[10.1], output_len=50, error="HTTP 500")
RECORDS = [FOUR_TOKENS, ONE_TOKEN, UNCOUNTED, FAILED]


def count_words(text: str) -> int:
    return len(text.split())


def test_latencies_of_one_request() -> None:
    assert FOUR_TOKENS.ttft == pytest.approx(0.2)
    assert FOUR_TOKENS.latency == pytest.approx(0.6)
    assert FOUR_TOKENS.itls == pytest.approx([0.1, 0.3])
    assert FOUR_TOKENS.queue_time == pytest.approx(0.5)
    nothing = RequestRecord(prompt_len=1, start=5.0, error="refused")
    assert (nothing.ttft, nothing.latency, nothing.itls, nothing.success) == (0.0, 0.0, [], False)


def test_all_figures() -> None:
    result = calculate_metrics(RECORDS, 2.0, count_tokens=count_words, percentiles=[50, 99.9]).as_result()
    assert result["completed"] == 3
    assert result["failed"] == 1
    assert result["total_input_tokens"] == 7 + 3 + 5
    assert result["total_output_tokens"] == 4 + 1 + 3
    assert result["request_throughput"] == 1.5
    assert result["output_throughput"] == 4.0
    assert result["total_token_throughput"] == 11.5
    assert result["request_goodput"] is None
    # TTFT 200, 1000, 100 ms.
    assert result["mean_ttft_ms"] == pytest.approx(1300 / 3)
    assert result["median_ttft_ms"] == pytest.approx(200)
    assert result["std_ttft_ms"] == pytest.approx(np.std([200, 1000, 100]))
    assert result["p50_ttft_ms"] == pytest.approx(200)
    assert result["p99.9_ttft_ms"] == pytest.approx(200 + 0.998 * 800)
    # TPOT (600 - 200) / 3 and (1000 - 100) / 2; the request of one token has none.
    assert result["mean_tpot_ms"] == pytest.approx((400 / 3 + 450) / 2)
    # ITL 100, 300, 900 ms, pooled.
    assert result["mean_itl_ms"] == pytest.approx(1300 / 3)
    assert result["median_itl_ms"] == pytest.approx(300)
    # E2EL 600, 1000, 1000 ms.
    assert result["mean_e2el_ms"] == pytest.approx(2600 / 3)
    assert result["mean_concurrent_requests"] == pytest.approx(2.6 / 2)
    # 10.0 to 10.6, 10.5 to 11.5, 11.0 to 12.0.
    assert result["max_concurrent_requests"] == 2
    # Chunks at 0.2, 0.3, 0.6 | 1.5, 1.1 | 2.0 seconds.
    assert result["max_output_tokens_per_s"] == 3.0


@pytest.mark.parametrize(
    ("objectives", "num_good"),
    [
        ({"ttft": 200.0001}, 2),  # 200, 1000, 100 ms
        ({"ttft": 150}, 1),
        ({"tpot": 140}, 2),  # 133, 0 (one token), 450 ms
        ({"e2el": 1000.0001, "ttft": 100.0001}, 1),
        ({"ttft": 0}, 0),
    ],
)
def test_goodput(objectives: dict[str, float], num_good: int) -> None:
    metrics = calculate_metrics(RECORDS, 2.0, count_tokens=count_words, goodput=objectives)
    assert metrics.request_goodput == num_good / 2.0


def test_queue_times_are_reported_where_asked_for() -> None:
    metrics = calculate_metrics(RECORDS, 2.0, latencies=["client_queue_time", "e2el_including_client_queue"])
    assert metrics.latencies["client_queue_time"].mean == pytest.approx(500 / 3)
    assert metrics.latencies["e2el_including_client_queue"].mean == pytest.approx((1100 + 1000 + 1000) / 3)
    assert "mean_ttft_ms" not in metrics.as_result()


def test_output_lengths_come_from_server_tokenizer_or_chunks() -> None:
    assert output_lens(RECORDS, count_words) == [4, 1, 3, 0]
    assert output_lens(RECORDS, None) == [4, 1, 2, 0]


def test_nothing_succeeded() -> None:
    result = calculate_metrics([FAILED], 1.0).as_result()
    assert (result["completed"], result["failed"], result["output_throughput"]) == (0, 1, 0.0)
    assert (result["mean_itl_ms"], result["max_concurrent_requests"], result["max_output_tokens_per_s"]) == (0.0, 0, 0.0)


def test_a_request_is_not_under_way_at_its_end() -> None:
    first = RequestRecord(1, start=0.0, chunk_times=[1.0])
    second = RequestRecord(1, start=1.0, chunk_times=[2.0])
    assert [count for _, count in concurrency_steps([first, second])] == [1, 0, 1, 0]


TIMES = st.floats(0, 50, allow_nan=False)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    start = draw(TIMES)
    return RequestRecord(1, start=start, chunk_times=sorted(start + gap for gap in draw(st.lists(TIMES, min_size=1, max_size=5))))


@given(st.lists(records(), min_size=1, max_size=8))
def test_concurrency_and_rates_count_every_request_and_chunk(found: list[RequestRecord]) -> None:
    steps = concurrency_steps(found)
    assert [count for _, count in steps[-1:]] in ([], [0])
    assert all(count >= 0 for _, count in steps)
    area = sum(count * (after - time) for (time, count), (after, _) in pairwise(steps))
    assert area == pytest.approx(sum(record.latency for record in found), abs=1e-6)
    assert chunks_per_second(found).sum() == sum(len(record.chunk_times) for record in found)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_a_summary_is_in_order(seconds: list[float]) -> None:
    summary = Summary.of(seconds, [0, 25, 50, 100])
    values = [value for _, value in summary.percentiles]
    assert values == sorted(values)
    assert values[0] == pytest.approx(min(seconds) * 1000)
    assert values[-1] == pytest.approx(max(seconds) * 1000)
    assert values[2] == pytest.approx(summary.median)


def test_flags() -> None:
    assert parse_percentiles("50,99,99.9,50") == [50.0, 99.0, 99.9]
    assert parse_latencies("itl, ttft") == ["itl", "ttft"]
    assert parse_goodput(["ttft:200", "tpot:30.5"]) == {"ttft": 200.0, "tpot": 30.5}


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parse_percentiles, "50,x", "--metric-percentiles must be numbers"),
        (parse_percentiles, "101", r"--metric-percentiles must be in \[0, 100\]"),
        (parse_latencies, "ttft,speed", "unknown metric 'speed'"),
        (parse_goodput, ["itl:5"], "--goodput: unknown metric 'itl'"),
        (parse_goodput, ["ttft"], "NAME:MILLISECONDS, such as ttft:200, got 'ttft'"),
        (parse_goodput, ["ttft:-1"], "got 'ttft:-1'"),
        (parse_goodput, ["ttft:nan"], "got 'ttft:nan'"),
        (Objective.parse, "p99_speed:1", "an objective is such as"),
        (Objective.parse, "max_ttft:1", "an objective is such as"),
        (Objective.parse, "p101_ttft:1", "a percentile must be in"),
    ],
)
def test_flags_that_are_wrong(parse: object, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(value)  # type: ignore[operator]


def test_objectives() -> None:
    assert Objective.parse("p99_ttft:500") == Objective("p99_ttft_ms", 500.0, "ttft", 99.0)
    assert Objective.parse("e2el:9000").field == "p99_e2el_ms"
    assert Objective.parse("mean_itl:30") == Objective("mean_itl_ms", 30.0, "itl", None)
    assert Objective.parse("p99.9_tpot:1").field == "p99.9_tpot_ms"
    assert Objective.parse("mean_itl:30").met_by({"mean_itl_ms": 30.0})
    assert not Objective.parse("mean_itl:30").met_by({"mean_itl_ms": 30.1})
