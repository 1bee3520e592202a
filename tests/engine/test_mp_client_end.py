"""An engine core in a process of its own: its end and its death, its parent's too, and that nothing is left behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from child_engine import (
    PATIENCE_S,
    is_alive,
    wait_until,
)
from mp_clients import folders, make_client, outputs_of, tokens_of
from test_engine_core import request_of
from toy_engine import expected_tokens

from jaxllm.core.types import EngineCoreOutput, FinishReason
from jaxllm.engine import engine_link
from jaxllm.engine.core_proc import InputType
from jaxllm.engine.errors import EngineDeadError
from jaxllm.engine.mp_client import SyncMPClient

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("own_temp_folder")]


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
