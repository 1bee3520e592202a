"""Two engines behind one front end, each with devices of its own that share every layer."""

import asyncio

import pytest
from devices import need_devices
from test_same_tokens import REQUESTS, check_same, logprobs_of, on_one_device

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.outputs import RequestOutput

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "worker_hang_timeout": 60.0},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "worker_hang_timeout": 60.0},
    ],
    ids=["tensor", "tensor with workers", "pipeline with workers"],
)
def test_same_tokens(make_tiny, tiny_args, kwargs):
    need_devices(4)
    expected = on_one_device(make_tiny)
    llm = AsyncLLM.from_engine_args(EngineArgs(**{**tiny_args, "data_parallel_size": 2, **kwargs}))

    async def answer(index: int) -> RequestOutput:
        prompt, params = REQUESTS[index]
        return [output async for output in llm.generate(prompt, params, str(index))][-1]

    async def main() -> None:
        # The second time with prefixes cached.
        for _ in range(2):
            outputs = await asyncio.gather(*map(answer, range(len(REQUESTS))))
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            logprobs = [logprobs_of(output.outputs[0].logprobs) + logprobs_of(output.prompt_logprobs) for output in outputs]
            check_same((tokens, logprobs), expected)
        numbers = {
            metric.labels["engine"]: metric.value for metric in llm.get_metrics() if metric.name == "jaxllm:generation_tokens"
        }
        assert numbers.keys() == {"0", "1"}
        # Requests went out in turn.
        assert min(numbers.values()) > 0.3 * sum(numbers.values())
        preemptions = [metric.value for metric in llm.get_metrics() if metric.name == "jaxllm:num_preemptions"]
        assert sum(preemptions) > 0

    try:
        asyncio.run(main())
    finally:
        llm.shutdown()
