"""Steps run while the smaller ones are still being compiled."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from tiny_configs import LAYER_1

from jaxllm import LLM, SamplingParams
from jaxllm.worker.model_runner import ModelRunner


def start(folder: Path, **kwargs) -> LLM:
    (folder / "config.json").write_text(json.dumps(LAYER_1))
    kwargs = {"cudagraph_capture_sizes": [1, 2], **kwargs}
    return LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True, use_tqdm_on_load=False, max_num_seqs=4, block_size=4,
        max_num_batched_tokens=8, num_gpu_blocks_override=64, compile_sizes=[], compilation_cache_dir="", **kwargs,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """In which another Python finds jaxllm and this module."""
    here = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (here.parents[1], here.parent, here)))}


def answer(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0].token_ids


def runner_of(llm: LLM) -> ModelRunner:
    return llm.engine.engine_core.engine_core.executor.worker.runner


def test_larger_steps_stand_in_for_smaller_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, lower = threading.Event(), ModelRunner._lower

    def slow(self, bucket, name):
        assert bucket in self.buckets.largest or go_on.wait(60)
        return lower(self, bucket, name)

    monkeypatch.setattr(ModelRunner, "_lower", slow)
    with start(tmp_path) as llm:
        runner = runner_of(llm)
        assert sorted(map(str, runner.ready)) == ["decode 4", "mixed 8"]
        early = answer(llm)
        assert sorted(map(str, runner.ready)) == ["decode 4", "mixed 8"]
        go_on.set()
        llm.collective_rpc("finish_compilation")
        assert sorted(map(str, runner.ready)) == ["decode 1", "decode 2", "decode 4", "mixed 8"]
        assert answer(llm) == early
        assert llm.collective_rpc("num_compiles_after_warm_up") == [0]


def test_several_decodes_a_dispatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, lower = threading.Event(), ModelRunner._lower

    def slow(self, bucket, name):
        assert bucket in self.buckets.largest or go_on.wait(60)
        return lower(self, bucket, name)

    monkeypatch.setattr(ModelRunner, "_lower", slow)
    with start(tmp_path, num_decode_steps=2, cudagraph_capture_sizes=[1]) as llm:
        runner, used = runner_of(llm), []
        run = runner._run
        monkeypatch.setattr(runner, "_run", lambda bucket, vector: used.append(str(bucket)) or run(bucket, vector))
        early = answer(llm)
        assert set(used) - {"decode 4"} == {"mixed 8", "decode 4 x 2"}
        go_on.set()
        llm.collective_rpc("finish_compilation")
        assert sorted(map(str, runner.ready)) == ["decode 1", "decode 1 x 2", "decode 4", "decode 4 x 2", "mixed 8"]
        used.clear()
        assert answer(llm) == early
        assert "decode 1 x 2" in used
        assert llm.collective_rpc("num_compiles_after_warm_up") == [0]


def test_a_step_that_does_not_compile_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lower = ModelRunner._lower

    def fail(self, bucket, name):
        if str(bucket) == "decode 1":
            raise RuntimeError("no such instruction")
        return lower(self, bucket, name)

    monkeypatch.setattr(ModelRunner, "_lower", fail)
    with start(tmp_path) as llm:
        with pytest.raises(RuntimeError, match="no such instruction"):
            llm.collective_rpc("finish_compilation")
        assert "decode 1 could not be compiled; a larger step takes its place" in caplog.text
        assert len(answer(llm)) == 6


def test_everything_before_the_first_step_if_asked(tmp_path: Path) -> None:
    with start(tmp_path, background_compilation=False) as llm:
        assert len(runner_of(llm).ready) == 4


def test_a_shutdown_does_not_wait_for_what_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, lower = [], threading.Event(), ModelRunner._lower

    def slow(self, bucket, name):
        if bucket not in self.buckets.largest:
            begun.append(str(bucket))
            assert go_on.wait(60)
        return lower(self, bucket, name)

    monkeypatch.setattr(ModelRunner, "_lower", slow)
    llm = start(tmp_path)
    threading.Timer(0.2, go_on.set).start()
    llm.shutdown()
    assert begun in ([], ["decode 1"])


def test_an_engine_that_nobody_holds_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, lower = [], threading.Event(), ModelRunner._lower

    def slow(self, bucket, name):
        if bucket not in self.buckets.largest:
            begun.append(str(bucket))
            assert go_on.wait(60)
        return lower(self, bucket, name)

    monkeypatch.setattr(ModelRunner, "_lower", slow)
    llm = start(tmp_path)
    runner = weakref.ref(runner_of(llm))
    del llm
    gc.collect()
    go_on.set()
    deadline = time.monotonic() + 60
    while runner() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        gc.collect()
    assert begun in ([], ["decode 1"])


SCRIPT = """
import sys
import threading
import time
from pathlib import Path

from test_background_compilation import ModelRunner, start

lower = ModelRunner._lower


def slow(self, bucket, name):
    if bucket not in self.buckets.largest:
        print(bucket, flush=True)
        while threading.main_thread().is_alive():
            time.sleep(0.01)
    return lower(self, bucket, name)


ModelRunner._lower = slow
llm = start(Path(sys.argv[1]))
"""


def test_the_end_of_a_script_does_not_wait_for_what_has_not_begun(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n") in ([""], ["decode 1", ""]), done.stderr
