"""An engine core in a process of its own: its start and its calls."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from child_engine import (
    BrokenExecutor,
    ChildExecutor,
    DyingExecutor,
    RefusingExecutor,
    SlowStartExecutor,
    is_alive,
    make_child_engine,
)
from mp_clients import children, folders, make_client, outputs_of, tokens_of
from test_engine_core import request_of
from toy_engine import expected_tokens, make_config, run

from jaxllm.core.types import FinishReason
from jaxllm.engine.errors import EngineDeadError, EngineStartError
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.mp_client import SyncMPClient
from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("own_temp_folder")]


@pytest.fixture(scope="module")
def long_lived() -> Iterator[SyncMPClient]:
    client = make_client()
    yield client
    client.shutdown()


@pytest.fixture
def shared(long_lived: SyncMPClient) -> Iterator[SyncMPClient]:
    """For tests that leave it alive."""
    yield long_lived
    long_lived.pause("abort")
    long_lived.wake_up()
    long_lived.resume()
    long_lived.collective_rpc("set_step_time", args=(0.0,))
    outputs_of(long_lived)


def test_requests(shared: SyncMPClient) -> None:
    assert shared.num_gpu_blocks == 129
    assert shared.get_output().outputs == []  # does not wait
    for i in range(30):
        shared.add_request(request_of(f"r{i}", [5, i], max_tokens=1 + i % 7))
    found = outputs_of(shared)
    assert {request_id: tokens_of(outputs) for request_id, outputs in found.items()} == {
        f"r{i}": expected_tokens([5, i], 1 + i % 7) for i in range(30)
    }
    assert all(outputs[-1].finish_reason is FinishReason.LENGTH for outputs in found.values())


def test_calls(shared: SyncMPClient) -> None:
    assert shared.collective_rpc("describe", timeout=3.0, args=("x",)) == [("x", 0, 3.0)]
    sent = {"a": (1, [2.5, None], {3}), "b": {4: b"x"}, "c": np.arange(5000, dtype=np.float32)}
    (((got,), more),) = shared.collective_rpc("echo", args=(sent,), kwargs={"d": True})
    assert more == {"d": True}
    np.testing.assert_array_equal(got.pop("c"), sent.pop("c"))
    assert got == sent
    shared.check_health()
    assert shared.reset_prefix_cache()
    assert shared.get_stats().num_running_reqs == 0


def test_failing_calls_raise_here_and_break_nothing(shared: SyncMPClient) -> None:
    with pytest.raises(AttributeError, match="missing"):
        shared.collective_rpc("missing")
    with pytest.raises(ZeroDivisionError, match="by request"):
        shared.collective_rpc("fail")
    with pytest.raises(TypeError, match="a object cannot be sent to another process"):
        shared.collective_rpc("make_unsendable")
    with pytest.raises(TypeError, match="a object cannot be sent to another process"):
        shared.collective_rpc("echo", args=(object(),))
    with pytest.raises(ValueError, match="mode must be one of abort, wait, keep, got 'now'"):
        shared.pause("now")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tags must be a list of"):
        shared.wake_up("weights")
    with pytest.raises(ValueError, match="the engine core has no call '__init__'"):
        shared._link.call("__init__").result()
    shared.check_health()


def test_refused_request_ends_with_an_error(shared: SyncMPClient, capfd: pytest.CaptureFixture[str]) -> None:
    """In the input thread, where it is made, and in the scheduler."""
    shared.add_request(request_of("bad", [5, 5, 5, 2**32]))
    shared.add_request(request_of("long", [5] * 65))
    shared.add_request(request_of("good", [5], max_tokens=2))
    found = outputs_of(shared)
    assert tokens_of(found["good"]) == expected_tokens([5], 2)
    for request_id, message in (("bad", "token ids must be integers"), ("long", "at most max_model_len 64 tokens")):
        (output,) = found[request_id]
        assert output.finish_reason is FinishReason.ERROR
        assert message in str(output.stop_reason)


def test_aborts(shared: SyncMPClient) -> None:
    """Unknown ones are ignored, and one that follows its request at once finds it."""
    shared.collective_rpc("set_step_time", args=(0.01,))
    for i in range(12):
        shared.add_request(request_of(f"r{i}", [5, i], max_tokens=60))
    shared.abort_requests([f"r{i}" for i in range(1, 12)] + ["unknown"])
    found = outputs_of(shared)
    assert tokens_of(found.pop("r0")) == expected_tokens([5, 0], 60)
    assert all(len(outputs) <= 2 and outputs[-1].finish_reason is None for outputs in found.values())
    assert shared.reset_prefix_cache()


def test_abort_reaches_the_step_that_runs(shared: SyncMPClient) -> None:
    shared.collective_rpc("set_step_time", args=(0.5,))
    shared.add_request(request_of("r", [5], max_tokens=60))
    time.sleep(0.05)  # its first step runs
    shared.add_request(request_of("s", [6], max_tokens=2))  # not in the scheduler before the step ends
    shared.abort_requests(["r", "s"])
    assert outputs_of(shared) == {}  # the step's token was dropped


def test_pause_and_sleep(shared: SyncMPClient) -> None:
    shared.pause("keep")
    shared.add_request(request_of("a", [5], max_tokens=3))
    assert (shared.is_paused(), shared.is_sleeping()) == (True, False)
    assert shared.get_stats().num_waiting_reqs == 1
    shared.resume()
    assert tokens_of(outputs_of(shared)["a"]) == expected_tokens([5], 3)
    shared.add_request(request_of("b", [6], max_tokens=9))
    shared.sleep(1, "wait")  # all that came before it is there when it returns
    got = []
    while shared._unfinished:
        got += shared.get_output().outputs
        assert shared._outputs.qsize() or not shared._unfinished
    assert tokens_of(got) == expected_tokens([6], 9)
    assert shared.collective_rpc("device_state") == [({"weights", "kv_cache"}, 1)]
    shared.wake_up(["kv_cache"])
    assert shared.is_sleeping()
    shared.wake_up()
    assert (shared.is_paused(), shared.is_sleeping()) == (False, False)
    shared.collective_rpc("set_step_time", args=(0.01,))
    shared.add_request(request_of("c", [7], max_tokens=60))
    shared.pause("abort")
    assert outputs_of(shared)["c"][-1].finish_reason is FinishReason.ABORT


def test_sigint_and_sigterm_are_the_front_ends(shared: SyncMPClient) -> None:
    shared.collective_rpc("set_step_time", args=(0.01,))
    shared.add_request(request_of("a", [5], max_tokens=8))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(shared.pid, number)
    assert tokens_of(outputs_of(shared)["a"]) == expected_tokens([5], 8)
    os.kill(shared.pid, signal.SIGTERM)  # while it waits for work
    shared.check_health()


def test_llm_engine(tokenizer: Any) -> None:
    """The synchronous engine, and LLM over it, do not notice the difference."""
    engine = make_child_engine(tokenizer)
    with LLM.from_engine(engine) as llm:
        assert engine.step() == []
        params = [SamplingParams(max_tokens=3), SamplingParams(n=2, max_tokens=4), SamplingParams(max_tokens=2, logprobs=2)]
        first, second, third = llm.generate([[5], [6], [7]], params, use_tqdm=False)
        assert first.outputs[0].token_ids == expected_tokens([5], 3)
        assert [one.token_ids for one in second.outputs] == [expected_tokens([6], 4)] * 2
        assert [len(entries) for entries in third.outputs[0].logprobs or []] == [2, 2]
        stopped = llm.generate([[5]], SamplingParams(max_tokens=60, stop=[first.outputs[0].text[-1]]), use_tqdm=False)[0]
        assert stopped.outputs[0].finish_reason == "stop"
        llm.enqueue([5], SamplingParams(max_tokens=60))
        llm.sleep(1, "wait")
        assert llm.is_sleeping()
        llm.wake_up()
        assert llm.wait_for_completion(use_tqdm=False)[0].outputs[0].token_ids == expected_tokens([5], 60)
        assert run(engine) == []
        assert {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}["jaxllm:num_requests_running"] == 0
        assert llm.collective_rpc("num_rows") == [0]
        assert llm.reset_prefix_cache()
    assert not is_alive(engine.engine_core.pid)  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate([[5]], use_tqdm=False)


# How it starts


@pytest.mark.parametrize(
    ("executor", "kind", "message"),
    [
        (RefusingExecutor, ValueError, "^gpu_memory_utilization is too small$"),
        (BrokenExecutor, EngineStartError, "cannot start: OSError: no device"),
        (DyingExecutor, EngineStartError, "ended with exit code 7 before it was ready"),
    ],
)
def test_failing_start(executor: Any, kind: type[Exception], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = folders()
    with pytest.raises(kind, match=message) as raised:
        SyncMPClient(make_config(), executor, False)
    assert type(raised.value) is kind
    assert folders() == before
    if executor is BrokenExecutor:
        assert 'raise OSError("no device")' in capfd.readouterr().err  # the place is in the log


def test_executor_that_cannot_be_imported_there(capfd: pytest.CaptureFixture[str]) -> None:
    class Local(ChildExecutor):
        pass

    with pytest.raises(ValueError, match=r"executor_class must be importable by another process, got <class .*Local"):
        LLMEngine(make_config(), None, Local, multiprocess=True)


def test_interrupted_start_leaves_no_process() -> None:
    before, before_too = folders(), children()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        SyncMPClient(make_config(), SlowStartExecutor, False)
    timer.join()
    assert folders() == before
    assert children() == before_too
