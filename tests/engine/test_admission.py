"""Limits on what is queued, in the synchronous engine: the rule, what counts, and that nothing is queued in part."""

from typing import Any

import pytest
from toy_engine import check_idle, executor_of, make_config, make_engine, run
from transformers import PreTrainedTokenizerFast

from jaxllm.engine.engine_args import EngineArgs
from jaxllm.engine.errors import AdmissionError, MaxQueuedTokensError, QueueOverflowError
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams


def rejections(engine: LLMEngine) -> dict[str, Any]:
    return {
        metric.labels["reason"]: getattr(metric, "value", None)
        for metric in engine.get_metrics()
        if metric.name.endswith("admission_rejections")
    }


def test_number_of_requests() -> None:
    engine = make_engine(make_config(max_num_queued_reqs=3))
    engine.add_request("a", [5], SamplingParams(max_tokens=3))
    with pytest.raises(QueueOverflowError, match=r"1 unfinished requests; with 3 more .* the 3 that max_num_queued_reqs"):
        engine.add_request("b", [5], SamplingParams(n=3))
    assert engine.get_num_unfinished_requests() == 1
    engine.add_request("c", [5], SamplingParams(max_tokens=2, n=2))
    with pytest.raises(QueueOverflowError, match="3 unfinished"):
        engine.add_request("d", [5], SamplingParams())
    engine.step()  # running requests count too
    with pytest.raises(AdmissionError):
        engine.add_request("d", [5], SamplingParams())
    engine.step()
    engine.add_request("d", [5], SamplingParams(n=2))  # those of "c" have ended
    assert rejections(engine) == {"max_num_queued_reqs": 3, "max_num_queued_tokens": 0}
    run(engine)
    check_idle(engine)


def test_number_of_tokens() -> None:
    engine = make_engine(make_config(max_num_queued_tokens=10, max_num_batched_tokens=8))
    engine.add_request("a", [5] * 12, SamplingParams(max_tokens=3))  # more than the limit, but the first
    with pytest.raises(
        MaxQueuedTokensError, match=r"12 prompt tokens are queued; with 1 more .* the 10 that max_num_queued_tokens"
    ):
        engine.add_request("b", [5], SamplingParams())
    engine.step()
    with pytest.raises(MaxQueuedTokensError):
        engine.add_request("b", [5], SamplingParams())
    engine.step()
    assert engine.output_processor.num_queued_tokens == 0  # the first token is there
    engine.add_request("b", [5] * 6, SamplingParams(max_tokens=1))
    with pytest.raises(MaxQueuedTokensError, match="6 prompt tokens are queued; with 6 more"):
        engine.add_request("c", [5] * 3, SamplingParams(n=2))
    engine.add_request("c", [5] * 2, SamplingParams(n=2))
    engine.abort_request(["b"])
    assert engine.output_processor.num_queued_tokens == 4
    run(engine)
    assert engine.output_processor.num_queued_tokens == 0
    assert rejections(engine) == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 3}
    check_idle(engine)


def test_offline_call_is_refused_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    llm = LLM.from_engine(make_engine(make_config(max_num_queued_reqs=4, log_stats=False), tokenizer=tokenizer))
    with pytest.raises(QueueOverflowError):
        llm.generate(["a"] * 5, use_tqdm=False)
    assert executor_of(llm.engine).rows == {}
    check_idle(llm.engine)
    assert len(llm.generate(["a"] * 4, use_tqdm=False)) == 4


@pytest.mark.parametrize("name", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_arguments(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        make_config(**{name: 0})
    assert getattr(EngineArgs(**{name: 5}), name) == 5
    assert getattr(EngineArgs(), name) is None
