"""An engine core in a process of its own: its start, its calls, its end and its death, and that nothing is left behind."""

import gc
import glob
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_engine import (
    PATIENCE_S,
    BrokenExecutor,
    ChildExecutor,
    DyingExecutor,
    RefusingExecutor,
    SlowStartExecutor,
    is_alive,
    make_child_engine,
    wait_until,
)
from test_engine_core import request_of
from toy_engine import expected_tokens, make_config, run

from jaxllm.core.types import EngineCoreOutput, FinishReason
from jaxllm.engine import engine_link
from jaxllm.engine.core_proc import InputType
from jaxllm.engine.errors import EngineDeadError, EngineStartError
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.mp_client import SyncMPClient
from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def own_temp_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nobody else's sockets are in it. Its path is short enough for them."""
    tmp_path_factory.getbasetemp()  # not inside
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        yield


def make_client() -> SyncMPClient:
    return SyncMPClient(make_config(log_stats=False), ChildExecutor, False)


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


@pytest.fixture
def client() -> Iterator[SyncMPClient]:
    """For tests that break it."""
    client = make_client()
    yield client
    client.shutdown()
    assert not is_alive(client.pid)


def outputs_of(client: SyncMPClient) -> dict[str, list[EngineCoreOutput]]:
    """All outputs until no request is left."""
    found: dict[str, list[EngineCoreOutput]] = {}
    while client._unfinished:
        for output in client.get_output().outputs:
            found.setdefault(output.request_id, []).append(output)
    return found


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


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


# How it ends


def test_shutdown_drains(client: SyncMPClient) -> None:
    client.collective_rpc("set_step_time", args=(0.01,))
    client.add_request(request_of("short", [5], max_tokens=5))
    client.shutdown(drain_timeout=PATIENCE_S)
    assert tokens_of(outputs_of_dead(client)["short"]) == expected_tokens([5], 5)


def test_shutdown_aborts_what_is_left(client: SyncMPClient) -> None:
    client.collective_rpc("set_step_time", args=(0.02,))
    client.add_request(request_of("long", [5], max_tokens=60))
    client.shutdown(drain_timeout=0.1)
    found = outputs_of_dead(client)["long"]
    assert found[-1].finish_reason is FinishReason.ABORT
    assert 1 <= len(tokens_of(found)) < 60


def test_shutdown_while_paused_does_not_wait(client: SyncMPClient) -> None:
    client.pause("keep")
    client.add_request(request_of("a", [5]))
    start = time.monotonic()
    client.shutdown(drain_timeout=PATIENCE_S)
    assert time.monotonic() - start < PATIENCE_S / 2
    assert outputs_of_dead(client)["a"][-1].finish_reason is FinishReason.ABORT


def outputs_of_dead(client: SyncMPClient) -> dict[str, list[EngineCoreOutput]]:
    """All outputs that came before the end."""
    found: dict[str, list[EngineCoreOutput]] = {}

    def read() -> None:
        for output in client.get_output().outputs:
            found.setdefault(output.request_id, []).append(output)

    while client._outputs.qsize() > 1:
        read()
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        read()
    return found


def test_hung_process_is_killed(client: SyncMPClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(engine_link, "EXIT_GRACE_S", 0.2)
    os.kill(client.pid, signal.SIGSTOP)
    client.shutdown()
    assert not is_alive(client.pid)
    assert f"process {client.pid} does not end; it is killed" in caplog.text


def test_forgotten_client_ends_its_process() -> None:
    before = folders()
    client = make_client()
    pid = client.pid
    del client
    gc.collect()
    wait_until(lambda: not is_alive(pid), "the process of a client that nobody holds")
    wait_until(lambda: folders() == before, "its folder")


def test_nothing_is_left_behind() -> None:
    threads = set(threading.enumerate())
    client = make_client()
    folder = client._link._folder
    assert os.stat(folder).st_mode & 0o777 == 0o700
    fds = len(os.listdir("/proc/self/fd"))
    client.shutdown()
    client.shutdown()
    assert not os.path.exists(folder)
    assert len(os.listdir("/proc/self/fd")) < fds
    assert set(threading.enumerate()) <= threads


# How it dies


def kill(client: SyncMPClient) -> None:
    os.kill(client.pid, signal.SIGKILL)


def fail_step(client: SyncMPClient) -> None:
    client.collective_rpc("fail_next_step")


def exit_amid(client: SyncMPClient) -> None:
    with pytest.raises(EngineDeadError, match="exit code 9"):
        client.collective_rpc("exit", args=(9,))


def send_garbage(client: SyncMPClient) -> None:
    with client._link._lock:
        client._link._send(InputType.ADD, [b"garbage"])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (send_garbage, "the engine core's process ended with exit code 1"),
        (kill, "the engine core's process was killed by SIGKILL"),
        (fail_step, r"the engine core cannot go on: MemoryError\('device'\)"),
        (exit_amid, "the engine core's process ended with exit code 9"),
    ],
)
def test_death_is_noticed_at_once(client: SyncMPClient, break_it: Callable[[SyncMPClient], None], message: str) -> None:
    client.collective_rpc("set_step_time", args=(0.005,))
    client.add_request(request_of("a", [5], max_tokens=60))
    assert len(client.get_output().outputs) == 1
    break_it(client)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=message):
        outputs_of(client)
    assert time.monotonic() - start < 2.0
    for call in (
        client.get_output,
        client.check_health,
        client.reset_prefix_cache,
        client.get_stats,
        lambda: client.add_request(request_of("b", [5])),
        lambda: client.collective_rpc("num_rows"),
    ):
        with pytest.raises(EngineDeadError, match=message):
            call()
    client.abort_requests(["a"])
    assert str(client.dead_error) == str(client.dead_error)
    wait_until(lambda: not is_alive(client.pid), "the end of the process")


def test_pending_calls_end_with_it(client: SyncMPClient) -> None:
    client.collective_rpc("set_step_time", args=(0.01,))
    client.add_request(request_of("a", [5], max_tokens=60))
    pending = client._link.call("pause", "wait", True)
    kill(client)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        pending.result(timeout=PATIENCE_S)


# How its parent dies

SCRIPT = """
    import os, signal, sys, time
    sys.path[:0] = [{tests!r}, {root!r}]
    from child_engine import *
    from jaxllm.llm import LLM
    from jaxllm.sampling_params import SamplingParams
    llm = LLM.from_engine(make_child_engine())
    client = llm.engine.engine_core
    client.collective_rpc("set_step_time", args=(0.01,))
    print(client.pid, client._link._folder, flush=True)
"""


class Script:
    """A process that starts an engine core, says its pid and goes on with `body`."""

    def __init__(self, body: str) -> None:
        code = textwrap.dedent(SCRIPT).format(tests=str(ROOT / "tests" / "engine"), root=str(ROOT)) + textwrap.dedent(body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        pid, self.folder = self.process.stdout.readline().split()
        self.engine_pid = int(pid)

    def wait(self) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        wait_until(lambda: not is_alive(self.engine_pid), "the end of the engine core's process")
        wait_until(lambda: not os.path.exists(self.folder), "the end of its folder")
        return out, err


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (signal.SIGKILL, "llm.generate([[5]] * 500, SamplingParams(max_tokens=60), use_tqdm=False)"),
        (signal.SIGTERM, "time.sleep(60)"),
    ],
)
def test_parent_is_killed(number: signal.Signals, body: str) -> None:
    script = Script(body)
    time.sleep(0.1)
    script.process.send_signal(number)
    script.wait()
    assert script.process.returncode == -number


def test_parent_is_killed_and_a_fork_of_it_lives() -> None:
    """The fork holds whatever the parent held."""
    script = Script(
        """
        fork = os.fork()
        if fork:
            print(fork, flush=True)
            if os.fork() == 0:
                sys.exit()  # with all that Python does at the end
            os.wait()
            print(llm.generate([[6]], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids, flush=True)
        time.sleep(60)
        """
    )
    assert script.process.stdout is not None
    fork = int(script.process.stdout.readline())
    try:
        assert script.process.stdout.readline() == f"{expected_tokens([6], 3)}\n"  # its end ended nothing here
        assert os.path.exists(script.folder)
        script.process.kill()
        script.process.wait()
        wait_until(lambda: not is_alive(script.engine_pid), "the end of the engine core's process")
        assert is_alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
        script.process.communicate()


@pytest.mark.parametrize("end", ["", "raise OSError('x')", "os._exit(5)"])
def test_parent_ends_without_a_word(end: str) -> None:
    script = Script(f"llm.enqueue([5], SamplingParams(max_tokens=60))\n{end}")
    start = time.monotonic()
    script.wait()
    assert script.process.returncode == {"": 0, "raise OSError('x')": 1}.get(end, 5)
    assert time.monotonic() - start < 5.0


def test_interrupt_of_the_whole_group() -> None:
    """Ctrl-C in a terminal: the call ends between two steps, and the engine core goes on to serve."""
    script = Script(
        """
        try:
            llm.generate([[5]] * 500, SamplingParams(max_tokens=60), use_tqdm=False)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        (output,) = llm.generate([[6]], SamplingParams(max_tokens=3), use_tqdm=False)
        print(output.outputs[0].token_ids, llm.engine.get_num_unfinished_requests())
        """
    )
    time.sleep(0.3)
    os.killpg(script.process.pid, signal.SIGINT)
    out, err = script.wait()
    assert out == f"interrupted\n{expected_tokens([6], 3)} 0\n", err
    assert script.process.returncode == 0


def test_unguarded_script_runs_once(tmp_path: Path) -> None:
    """No `if __name__ == "__main__"` is needed, and the front end has no jax."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path[:0] = [{str(ROOT / 'tests' / 'engine')!r}, {str(ROOT)!r}]\n"
        "print('started')\n"
        "from child_engine import *\n"
        "from jaxllm.llm import LLM\n"
        "llm = LLM.from_engine(make_child_engine())\n"
        "llm.generate([[5]], use_tqdm=False)\n"
        "print('jax' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
    assert done.stdout == "started\nFalse\n"


def folders() -> set[str]:
    return set(os.listdir(tempfile.gettempdir()))


def children() -> list[int]:
    """Engine cores that this process has started and not reaped."""
    found = []
    for path in glob.glob("/proc/self/task/*/children"):
        for pid in map(int, Path(path).read_text().split()):
            if b"jaxllm-engine-core" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found
