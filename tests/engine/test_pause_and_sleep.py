"""Pausing, sleeping and waking an engine core, step by step in this process."""

from typing import Any

import pytest
from test_engine_core import add, request_of
from toy_engine import ToyExecutor, expected_tokens, make_config, make_engine
from transformers import PreTrainedTokenizerFast

from jaxllm.core.types import EngineCoreOutput, EngineCoreOutputs, FinishReason
from jaxllm.engine.core import EngineCore
from jaxllm.engine.core_client import InprocClient
from jaxllm.engine.errors import EngineDeadError
from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams


@pytest.fixture
def core() -> EngineCore:
    return EngineCore(make_config(), ToyExecutor, log_stats=False)


def executor_of(core: EngineCore) -> ToyExecutor:
    assert isinstance(core.executor, ToyExecutor)
    return core.executor


class Tokens(dict[str, list[int]]):
    """What has come of each request."""

    def take(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for output in outputs.get(0, EngineCoreOutputs()).outputs:
            self.setdefault(output.request_id, []).extend(output.new_token_ids)


def run(core: EngineCore, tokens: Tokens) -> None:
    while core.has_work():
        tokens.take(core.step())


def check_free(core: EngineCore) -> None:
    core.scheduler.check_integrity()
    assert core.get_stats().kv_cache_usage == 0.0
    assert core.reset_prefix_cache()


def test_abort(core: EngineCore) -> None:
    add(core, request_of("a", [5] * 9))
    core.step()
    add(core, request_of("b", [6]))
    add(core, request_of("c", [6], client_index=1))
    assert core.pause("abort").done()
    assert (core.is_paused(), core.is_sleeping(), core.step()) == (True, False, {})
    told = core.take_undelivered()
    assert [output.request_id for output in told[0].outputs] == ["a", "b"]
    assert told[0].outputs[0] == EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT)
    assert (told[0].finished_requests, told[1].finished_requests) == ({"a", "b"}, {"c"})
    assert core.take_undelivered() == {}
    check_free(core)
    # New requests wait, and the workers hear of the end of the others with the next step.
    add(core, request_of("d", [7]))
    assert core.step() == {}
    core.resume()
    tokens = Tokens()
    run(core, tokens)
    assert tokens == {"d": expected_tokens([7], 4)}
    assert executor_of(core).rows == {}


def test_wait(core: EngineCore) -> None:
    tokens = Tokens()
    add(core, request_of("a", [5] * 9))
    tokens.take(core.step())
    waiting, waiting_too = core.pause("wait"), core.pause("wait", clear_cache=False)
    assert not waiting.done()
    add(core, request_of("b", [6]))
    add(core, request_of("c", [6]))
    core.abort_requests(["c"])
    assert core.take_undelivered()[0].finished_requests == {"c"}
    assert core.get_stats().num_waiting_reqs == 1
    assert not core.is_paused()
    for _ in range(3):
        assert not waiting.done()
        tokens.take(core.step())
    assert waiting.done()
    assert waiting_too.done()
    assert tokens == {"a": expected_tokens([5] * 9, 4)}
    assert core.is_paused()
    assert core.step() == {}
    core.resume()
    run(core, tokens)
    assert tokens["b"] == expected_tokens([6], 4)
    assert "c" not in tokens
    check_free(core)


def test_wait_without_requests_is_done_at_once(core: EngineCore) -> None:
    assert core.pause("wait").done()
    assert core.is_paused()


@pytest.mark.parametrize("clear_cache", [False, True])
def test_keep(core: EngineCore, clear_cache: bool) -> None:
    tokens = Tokens()
    add(core, request_of("a", [5] * 9, max_tokens=6))
    add(core, request_of("b", [6] * 9, max_tokens=3))
    tokens.take(core.step())
    assert core.pause("keep", clear_cache).done()
    assert core.take_undelivered() == {}
    assert (core.get_stats().kv_cache_usage == 0.0) is clear_cache
    assert core.step() == {}
    core.abort_requests(["b"])
    core.resume()
    run(core, tokens)
    assert tokens["a"] == expected_tokens([5] * 9, 6)
    assert len(tokens["b"]) == 1
    check_free(core)


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_another_pause_does_not_wait(core: EngineCore, mode: Any) -> None:
    tokens = Tokens()
    add(core, request_of("a", [5]))
    core.step()
    first = core.pause("wait")
    add(core, request_of("b", [6]))
    assert core.pause(mode).done()
    assert first.done()
    assert core.is_paused()
    core.resume()
    run(core, tokens)
    assert len(tokens.get("a", [])) == (3 if mode == "keep" else 0)
    assert len(tokens.get("b", [])) == (4 if mode == "keep" else 0)
    check_free(core)


def test_resume_ends_the_draining(core: EngineCore) -> None:
    tokens = Tokens()
    add(core, request_of("a", [5]))
    asleep = core.sleep(1, "wait")
    add(core, request_of("b", [6]))
    core.resume()
    with pytest.raises(RuntimeError, match="resumed before its requests had ended"):
        asleep.result(timeout=0)
    run(core, tokens)
    assert tokens == {"a": expected_tokens([5], 4), "b": expected_tokens([6], 4)}
    assert (core.is_paused(), core.is_sleeping()) == (False, False)
    assert executor_of(core).sleep_level == 0


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleep(core: EngineCore, level: int, mode: Any) -> None:
    tokens = Tokens()
    add(core, request_of("a", [5] * 9, max_tokens=6))
    tokens.take(core.step())
    asleep = core.sleep(level, mode)
    run(core, tokens)
    assert asleep.done()
    assert (core.is_sleeping(), core.is_paused()) == (True, True)
    assert (executor_of(core).asleep, executor_of(core).sleep_level) == ({"weights", "kv_cache"}, level)
    assert len(tokens["a"]) == (6 if mode == "wait" else 1)
    add(core, request_of("b", [6]))
    assert core.step() == {}
    with pytest.raises(ValueError, match=r"asleep \(kv_cache, scheduling, weights\): wake_up, not resume"):
        core.resume()
    core.wake_up()
    assert executor_of(core).asleep == set()
    assert (core.is_sleeping(), core.is_paused()) == (False, False)
    run(core, tokens)
    # The toy has forgotten its blocks: what went on was computed again.
    assert tokens["a"] == expected_tokens([5] * 9, 1 if mode == "abort" else 6)
    assert tokens["b"] == expected_tokens([6], 4)
    check_free(core)


def test_level_0_is_a_pause(core: EngineCore) -> None:
    add(core, request_of("a", [5] * 9))
    core.step()
    core.sleep(0, "keep").result(timeout=0)
    assert (core.is_sleeping(), core.is_paused(), executor_of(core).sleep_level) == (True, True, 0)
    assert core.get_stats().kv_cache_usage > 0.0
    core.wake_up(["weights"])
    assert core.is_sleeping()
    core.wake_up(["scheduling"])
    assert (core.is_sleeping(), core.is_paused()) == (False, False)
    core.sleep(0).result(timeout=0)
    core.resume()
    assert not core.is_sleeping()


def test_wake_up_in_parts(core: EngineCore) -> None:
    """Scheduling waits for all that is asleep, in whatever order it wakes."""
    core.sleep(1).result(timeout=0)
    core.wake_up(["scheduling"])
    core.wake_up(["weights"])
    assert executor_of(core).asleep == {"kv_cache"}
    assert (core.is_sleeping(), core.is_paused()) == (True, True)
    core.wake_up(["weights", "kv_cache"])
    assert (core.is_sleeping(), core.is_paused()) == (False, False)
    core.pause("keep").result(timeout=0)
    core.wake_up()  # nothing is asleep, so nothing changes
    assert core.is_paused()


def test_deeper_sleep(core: EngineCore) -> None:
    core.sleep(1).result(timeout=0)
    core.sleep(2).result(timeout=0)
    assert executor_of(core).sleep_level == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda core: core.pause("stop"), "mode must be one of abort, wait, keep, got 'stop'"),
        (lambda core: core.pause("abort", None), "clear_cache must be True or False, got None"),
        (lambda core: core.sleep(3), "level must be 0, 1 or 2, got 3"),
        (lambda core: core.sleep(True), "level must be 0, 1 or 2, got True"),
        (lambda core: core.sleep(1, "now"), "mode must be .* got 'now'"),
        (lambda core: core.wake_up("weights"), "tags must be a list of weights, kv_cache, scheduling, got 'weights'"),
        (lambda core: core.wake_up(["kv"]), r"tags must be .* got \['kv'\]"),
    ],
)
def test_mistakes_change_nothing(core: EngineCore, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(core)
    assert (core.is_paused(), core.is_sleeping()) == (False, False)


def test_failure_on_the_way_is_final() -> None:
    class Failing(ToyExecutor):
        def wake_up(self, tags: Any, *, timeout: float | None) -> None:
            raise MemoryError("device")

    core = EngineCore(make_config(), Failing, log_stats=False)
    core.sleep(1).result(timeout=0)
    with pytest.raises(EngineDeadError, match="device"):
        core.wake_up()
    for call in (core.step, core.resume, core.pause, core.sleep, core.wake_up, core.get_stats):
        with pytest.raises(EngineDeadError, match="device"):
            call()


def test_in_process_client_cannot_wait() -> None:
    client = InprocClient(make_config(), ToyExecutor, False)
    client.pause("wait")
    client.resume()
    client.add_request(request_of("a", [5]))
    for call in (client.pause, client.sleep):
        with pytest.raises(ValueError, match="'wait' needs an engine core in a process of its own"):
            call(mode="wait")
    client.pause("abort")
    assert client.is_paused()
    (output,) = client.get_output().outputs
    assert output.finish_reason is FinishReason.ABORT
    assert client.get_output().outputs == []
    assert client.num_gpu_blocks == 129
    assert client.get_stats().num_running_reqs == 0


def test_offline(tokenizer: PreTrainedTokenizerFast) -> None:
    llm = LLM.from_engine(make_engine(tokenizer=tokenizer))
    llm.enqueue([5], SamplingParams(max_tokens=3))
    llm.sleep(2, "keep")
    assert llm.is_sleeping()
    with pytest.raises(RuntimeError, match="asleep: wake_up comes first"):
        llm.generate([6], use_tqdm=False)
    llm.wake_up()
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs[0].token_ids == expected_tokens([5], 3)
    llm.enqueue([5], SamplingParams(max_tokens=3))
    llm.sleep()
    llm.wake_up(["weights", "kv_cache"])
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs[0].finish_reason == "abort"
