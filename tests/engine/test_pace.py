"""Steps of several decodes keep the time between two outputs of a stream."""

import time

import pytest
from toy_engine import ToyExecutor, expected_tokens, make_config

from jaxllm.core.types import EngineCoreRequest
from jaxllm.engine.core import EngineCore
from jaxllm.engine.pace import DecodePace
from jaxllm.sampling_params import SamplingParams


def test_as_many_steps_as_fit() -> None:
    pace = DecodePace(max_itl=50.0, max_steps=8)
    assert pace.num_steps == 1
    pace.observe(10.0, 10.010, 1)
    assert (pace.step_time, pace.num_steps) == (pytest.approx(0.010), 5)
    # Dispatched ahead: it ran from the end of the last one on.
    pace.observe(10.001, 10.110, 5)
    assert (pace.step_time, pace.num_steps) == (pytest.approx(0.020), 2)
    # Quicker again: bit by bit.
    pace.observe(11.0, 11.010, 2)
    assert pace.step_time == pytest.approx(0.8 * 0.020 + 0.2 * 0.005)
    for i in range(60):
        pace.observe(12.0 + i, 12.0 + i + 0.001, 1)
    assert pace.num_steps == 8
    # Even one step is too slow: there is nothing less than one.
    pace.observe(100.0, 101.0, 1)
    assert pace.num_steps == 1


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(("max_itl", "most"), [(None, 6), (1e6, 6), (25.0, 2)])
def test_the_engine_core_keeps_it(async_scheduling: bool, max_itl: float | None, most: int) -> None:
    class Slow(ToyExecutor):
        def execute_model(self, scheduler_output):
            time.sleep(0.01 * scheduler_output.num_decode_steps)  # so a step takes 10 ms
            return super().execute_model(scheduler_output)

    config = make_config(async_scheduling=async_scheduling, num_decode_steps=6, max_itl=max_itl)
    core = EngineCore(config, Slow, log_stats=True)
    params = SamplingParams(max_tokens=30, detokenize=False)
    core.add_request(core.make_request(EngineCoreRequest("a", [5, 6], params)))
    numbers, tokens = [], []
    while core.has_work():
        for outputs in core.step().values():
            for output in outputs.outputs:
                numbers.append(len(output.new_token_ids))
                tokens += output.new_token_ids
    core.shutdown()
    assert tokens == expected_tokens([5, 6], 30)
    assert max(numbers) <= most
    assert max_itl == 25.0 or max(numbers) == most
