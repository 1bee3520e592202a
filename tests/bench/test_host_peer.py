"""`host --peer`: a peer that is none, and the peer's loop over our own scheduler."""

import json
import stat
import sys
from pathlib import Path

import pytest
from test_host import CONFIG

from jaxllm.bench.cli import main
from jaxllm.bench.host_peer import peer_table
from jaxllm.bench.peer_vllm import time_steps
from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.core.async_scheduler import AsyncScheduler
from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.core.request import Request
from jaxllm.core.types import EngineCoreOutputs, EngineCoreRequest
from jaxllm.engine.output_processor import OutputProcessor, OutputProcessorOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

ANSWERS = """
import json
print(json.dumps({"name": "Other", "version": "9", "python": "3"}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    config = json.loads(open(job["model"] + "/config.json").read())
    assert sys.argv[1] == "-I" and sys.argv[2].endswith("peer_vllm.py"), sys.argv
    assert all(len(prompt) == 128 and max(prompt) < config["vocab_size"] for prompt in job["prompts"])
    assert 128 + job["max_tokens"] == job["max_model_len"] <= config["max_position_embeddings"]
    assert job["num_blocks"] * job["block_size"] >= len(job["prompts"]) * job["max_model_len"]
    print(json.dumps({"schedule": 1000.0 * len(job["prompts"]), "update": 500.0, "output": 500.0, "cpu": 1.0}), flush=True)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def interpreter(folder: Path, body: str) -> str:
    """Something to run in the place of a Python that has vLLM."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_both_sides_and_the_ratio(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host.json"
    flags = ["--model", model, "--skip-tokenizer-init", "--num-steps", "20", "--output-json", str(out)]
    assert main(["host", "--sizes", "1", "3", *flags, "--peer", interpreter(tmp_path, ANSWERS)]) == 0
    results = json.loads(out.read_text())
    assert results["peer"]["3"] == {"schedule": 3000.0, "update": 500.0, "output": 500.0, "cpu": 1.0}
    lines = capsys.readouterr().out.splitlines()
    assert "Other 9 (Python 3)" in lines[3]
    ours = sum(results["3"][part] for part in ("schedule", "update", "output"))
    row = lines[6].split()
    assert row[0] == "3"
    assert [float(value) for value in row[5:9]] == [3000, 500, 500, 4000]
    assert float(row[4]) == pytest.approx(ours, abs=2e-3)
    assert float(row[9]) == pytest.approx(4000 / ours, rel=0.01)


def test_table_by_hand() -> None:
    ours, theirs = {"schedule": 1.0, "update": 2.0, "output": 1.0}, {"schedule": 4.0, "update": 2.0, "output": 4.0}
    lines = peer_table({8: ours}, {8: theirs}, "Other").splitlines()
    assert lines[2].split() == ["8", "1.000", "2.000", "1.000", "4.000", "4.000", "2.000", "4.000", "10.000", "2.5"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('no module named vllm')", "no module named vllm"),
        ("sys.exit(3)", "exit 3"),
        ('print(\'{"name": 1, "version": 2, "python": 3}\', flush=True); sys.exit(\'later\')', "later"),
    ],
)
def test_a_peer_that_fails(body: str, message: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", model, "--skip-tokenizer-init", "--num-steps", "1", "--sizes", "1"]
    assert main(["host", *flags, "--peer", interpreter(tmp_path, body)]) == 2
    err = capsys.readouterr().err
    assert "failed" in err
    assert message in err


def test_no_such_interpreter(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--model", model, "--skip-tokenizer-init", "--peer", "/no/such/python"]) == 2
    assert "--peer '/no/such/python' cannot be run" in capsys.readouterr().err


def test_the_loop_of_the_peer() -> None:
    """Over our own scheduler, which has the same methods: chunked prompts first, then decodes, and only these are counted."""
    spec = KVCacheSpec(block_size=8, num_kv_heads=1, head_dim=8, itemsize=2)
    scheduler = AsyncScheduler(
        SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64, async_scheduling=True),
        CacheConfig(block_size=8),
        KVCacheConfig(64, (KVCacheGroup((0,), spec),)),
    )
    processor = OutputProcessor(None, log_stats=False)
    for i in range(3):
        params = SamplingParams(max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        request = EngineCoreRequest(str(i), [i] * 10, params)
        processor.add_request(request, str(i), None)
        scheduler.add_request(Request.from_engine_core_request(request, scheduler.block_hasher))
    steps: list[int] = []

    def make_output(scheduled: SchedulerOutput) -> ModelRunnerOutput:
        steps.append(scheduled.total_num_scheduled_tokens)
        ids = list(scheduled.num_scheduled_tokens)
        sampled = [[] if scheduler.requests[req_id].is_prefill_chunk else [5] for req_id in ids]
        return ModelRunnerOutput(ids, {req_id: row for row, req_id in enumerate(ids)}, sampled)

    def process_outputs(outputs: EngineCoreOutputs) -> OutputProcessorOutput:
        return processor.process_outputs(outputs.outputs)

    figures = time_steps(scheduler, process_outputs, make_output, 3, num_steps=7, num_warm_up_steps=2)
    assert list(figures) == ["schedule", "update", "output", "cpu"]
    assert min(figures.values()) > 0
    # 10 and 6 tokens of prompts; a decode, the other 4, and 10. The last step is scheduled while the ninth decode is taken in.
    assert steps == [16, 15, *[3] * 10]
