"""Engine cores as Ray actors: ray_cluster.py on two nodes, and what is refused."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from async_streams import run
from child_engine import make_async_llm
from toy_engine import make_config

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.ray_process import RayPlacement

HERE = Path(__file__).parent


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_one_to_three_to_one_engines_under_load_on_two_nodes():
    code = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parents[1])]}; import ray_cluster; ray_cluster.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    # No request was lost, and each has the tokens that one engine gives.
    assert seen["right"] == seen["requests"] >= 168
    # Engines stood on both nodes, all three worked, and those that left have ended.
    assert seen["nodes"] == 2
    assert min(seen["by_engine"]) > 0
    assert sum(seen["by_engine"]) == 20 * seen["requests"]
    assert seen["left"] == [True, False, False]
    assert seen["second_scale"] == "data_parallel_size is changing already, got 2"
    # Of two requests that had begun, the one on the actor that was killed ended with an error.
    assert seen["ends"] == ["EngineLostError", "list"]
    assert "engine core 1's process was lost" in seen["death"]
    assert seen["http"] == [[200, {"data_parallel_size": 2}], [400, "data_parallel_size must be an integer of at least 1, got 0"]]
    assert "found no node with {'CPU': 1.0} free in 2 s" in seen["too_many"][0]
    assert seen["too_many"][1:] == [2, 2]
    assert seen["again"] == [True, True]


def test_the_number_of_engines_of_one_machine_is_fixed():
    llm = make_async_llm()
    try:
        with pytest.raises(ValueError, match="only data_parallel_backend 'ray' can change it"):
            run(llm.scale(2))
    finally:
        llm.shutdown()


def test_ray_is_for_servers_and_must_be_installed(monkeypatch: pytest.MonkeyPatch):
    config = make_config(data_parallel_backend="ray")
    with pytest.raises(ValueError, match="data_parallel_backend must be 'mp' here, got 'ray'"):
        LLMEngine(config, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'jaxllm\[ray\]'"):
        RayPlacement(config)
    with pytest.raises(ValueError, match=r"pip install 'jaxllm\[ray\]'"):
        AsyncLLM(config, None)
    with pytest.raises(ValueError, match="data_parallel_backend must be one of 'mp', 'ray', got 'slurm'"):
        make_config(data_parallel_backend="slurm")
