"""The trace of a run, and what it shows: with asynchronous scheduling the devices do not wait for the host."""

import itertools
import json
from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.bench.cli import main
from jaxllm.bench.trace import dispatched_ahead, idle_gaps
from jaxllm.trace import TRACKS, Trace, durations, read_trace

# So wide that a step takes much longer than the host's part of it.
SLOW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, compiled: str) -> dict[bool, Path]:
    """The trace of an asynchronous and of a synchronous engine, with the same 4 requests of 24 tokens."""
    model = tmp_path_factory.mktemp("slow")
    (model / "config.json").write_text(json.dumps(SLOW))
    folders = {}
    for is_async in (True, False):
        folders[is_async] = tmp_path_factory.mktemp("trace")
        with LLM(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            compilation_cache_dir=compiled,
            use_tqdm_on_load=False,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            num_gpu_blocks_override=64,
            cudagraph_capture_sizes=[],
            compile_sizes=[],
            async_scheduling=is_async,
            profile=str(folders[is_async]),
        ) as llm:
            prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(4)]
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, detokenize=False), use_tqdm=False)
    return folders


def test_a_step_is_dispatched_before_the_last_one_has_ended(traces):
    events = read_trace(traces[True])
    # The others are those of a moment in which the machine had something else to do.
    assert dispatched_ahead(events) > 0.7
    assert len(idle_gaps(events)) < 7
    assert len(durations(events, "device", "step")) == 24


def test_without_asynchronous_scheduling_every_step_waits_for_the_host(traces):
    events = read_trace(traces[False])
    # None, but that the thread which notes the end of a step may come late.
    assert dispatched_ahead(events) < 0.3
    assert len(idle_gaps(events)) > 16


def test_every_stage_of_every_step_is_there(traces):
    events = read_trace(traces[True])
    for track, name in (
        ("engine core", "schedule"),
        ("engine core", "dispatch"),
        ("engine core", "wait"),
        ("engine core", "update"),
        ("front end", "detokenize"),
        ("worker", "dispatch"),
    ):
        assert len(durations(events, track, name)) >= 24, (track, name)
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"].count("device") == 1
    steps = [event for event in events if event["name"] == "step"]
    # One step at a time on the device.
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.2 for a, b in itertools.pairwise(steps))
    assert {step["args"]["bucket"] for step in steps} == {"mixed 32", "decode 4"}


def test_the_command(traces, capsys):
    assert main(["trace", str(traces[True])]) == 0
    out = capsys.readouterr().out
    assert "idle gaps of the device: " in out
    merged = json.loads((traces[True] / "all.json").read_text())
    assert {event["tid"] for event in merged["traceEvents"] if event["ph"] == "X"} == set(range(len(TRACKS)))
    # A second look does not count the merged file.
    assert main(["trace", str(traces[True])]) == 0
    assert capsys.readouterr().out == out


def test_a_folder_without_traces(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 2
    assert "holds no trace" in capsys.readouterr().err


def test_the_trace_of_a_process_that_was_killed(tmp_path):
    trace = Trace(str(tmp_path), "worker")
    trace.span("dispatch", 1.0, 1.5, step=0)
    trace.span("dispatch", 2.0, 2.25, step=1)
    trace.close()
    trace.span("late", 3.0, 4.0)
    (path,) = tmp_path.glob("worker-*-0.json")
    path.write_text(path.read_text()[:-30])
    events = read_trace(tmp_path)
    assert durations(events, "worker", "dispatch") == [0.5]
    again = Trace(str(tmp_path), "worker")
    again.close()
    assert len(list(tmp_path.iterdir())) == 2
