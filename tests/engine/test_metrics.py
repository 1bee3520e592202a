"""Totals over a whole run, by hand."""

from typing import Any

import pytest
from toy_engine import ToyExecutor, make_config, make_engine, run
from transformers import PreTrainedTokenizerFast

from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput, WorkerStepStats
from jaxllm.core.types import SchedulerStats, StepStats
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.metrics import EngineMetrics, Histogram, IterationStats, one_two_five
from jaxllm.sampling_params import SamplingParams


def values_of(engine: Any) -> dict[str, Any]:
    metrics = {}
    for metric in engine.get_metrics():
        assert metric.name.startswith("jaxllm:")
        assert metric.documentation
        name = metric.name.removeprefix("jaxllm:") + "".join(f"/{value}" for value in metric.labels.values())
        assert name not in metrics
        metrics[name] = metric
    return metrics


def test_bounds_are_inclusive() -> None:
    histogram = Histogram("h", "", [1.0, 2.0])
    histogram.observe([0.5, 1.0, 1.5, 9.0])
    assert histogram.counts == [2, 1, 1]
    assert histogram.buckets == {"1.0": 2, "2.0": 3, "+Inf": 4}
    assert (histogram.count, histogram.sum) == (4, 12.0)


def test_one_two_five() -> None:
    assert one_two_five(64) == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0]
    assert one_two_five(100) == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]


@pytest.mark.parametrize("num_requests", [1, 3])
def test_totals(tokenizer: PreTrainedTokenizerFast, num_requests: int) -> None:
    """n requests of P prompt tokens and M output tokens each, one after another, sharing their first two blocks of 4."""
    engine = make_engine(make_config(), tokenizer=tokenizer)
    n, prompt_len, num_outputs = num_requests, 9, 5
    for i in range(n):
        engine.add_request(str(i), [5] * (prompt_len - 1) + [10 + i], SamplingParams(max_tokens=num_outputs, ignore_eos=True))
        run(engine)
    got = values_of(engine)
    assert got["prompt_tokens"].value == n * prompt_len
    assert got["prompt_tokens_cached"].value == got["prefix_cache_hits"].value == (n - 1) * 8
    assert got["prefix_cache_queries"].value == n * prompt_len
    assert got["generation_tokens"].value == n * num_outputs
    assert got["request_success/length"].value == n
    assert got["request_success/stop"].value == got["request_success/abort"].value == 0
    assert got["num_preemptions"].value == 0
    assert (got["iteration_tokens_total"].count, got["iteration_tokens_total"].sum) == (
        n * num_outputs,
        n * (prompt_len + num_outputs),
    )
    assert got["inter_token_latency_seconds"].count == n * (num_outputs - 1)
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
    ):
        assert got[name].count == n
        assert got[name].sum > 0.0
    sums = {
        "request_prompt_tokens": n * prompt_len,
        "request_generation_tokens": n * num_outputs,
        "request_max_num_generation_tokens": n * num_outputs,
        "request_params_n": n,
        "request_params_max_tokens": n * num_outputs,
        "request_num_preemptions": 0,
        "request_prefill_kv_computed_tokens": n * prompt_len - (n - 1) * 8,
    }
    for name, total in sums.items():
        assert (got[name].count, got[name].sum) == (n, total)
    assert (got["num_requests_running"].value, got["num_requests_waiting"].value) == (0, 0)


def test_gauges_while_running(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = make_engine(make_config(max_num_seqs=2, num_blocks=21), tokenizer=tokenizer)
    for i in range(3):
        engine.add_request(str(i), [5 + i] * 6, SamplingParams(max_tokens=5))
    engine.step()
    got = values_of(engine)
    assert (got["num_requests_running"].value, got["num_requests_waiting"].value) == (2, 1)
    assert got["kv_cache_usage_perc"].value == pytest.approx(0.2)  # two blocks each, of twenty


def test_preemptions_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = make_engine(make_config(num_blocks=18, max_num_batched_tokens=64), tokenizer=tokenizer)
    for i in range(3):
        engine.add_request(str(i), [5 + i] * 16, SamplingParams(max_tokens=20, ignore_eos=True))
    run(engine)
    got = values_of(engine)
    assert got["num_preemptions"].value == got["request_num_preemptions"].sum > 0


def test_no_statistics() -> None:
    engine = make_engine(make_config(log_stats=False))
    engine.add_request("r", [5], SamplingParams())
    assert run(engine)[-1].metrics is None
    with pytest.raises(ValueError, match="disable_log_stats"):
        engine.get_metrics()


def test_where_the_time_of_steps_went() -> None:
    metrics = EngineMetrics(64)
    for num_compiles in (0, 1):
        step = StepStats(0.5, 1.0, 2.0, 0.25, 7, num_compiles, 9)
        metrics.record(SchedulerStats(step=step), IterationStats(0.0))
    metrics.record(SchedulerStats(), IterationStats(0.0))
    stages = {stage: counter.value for stage, counter in metrics.step_time.items()}
    assert stages == {"schedule": 1.0, "dispatch": 2.0, "wait": 4.0, "update": 0.5}
    assert metrics.computed_tokens.value == 18
    assert (metrics.padding_tokens.value, metrics.compiles_after_warm_up.value) == (14, 1)


def test_a_step_tells_what_it_cost() -> None:
    class CountingExecutor(ToyExecutor):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            output = super().execute_model(scheduler_output)
            output.stats = WorkerStepStats(1.0, 2.0, 3, 4, 5)
            return output

    engine = LLMEngine(make_config(), None, CountingExecutor)
    engine.add_request("a", [5, 6], SamplingParams(max_tokens=2))
    run(engine)
    got = values_of(engine)
    assert (got["step_time_seconds/dispatch"].value, got["step_time_seconds/wait"].value) == (2.0, 4.0)
    assert got["step_time_seconds/schedule"].value > 0
    assert got["step_time_seconds/update"].value > 0
    assert got["computed_tokens"].value == 10
    assert (got["padding_tokens"].value, got["compiles_after_warm_up"].value) == (6, 4)
