"""Replays recorded traces of vLLM's scheduler, step by step and exactly. The format: tests/data/oracle/scheduler/README.md."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.core.request import Request, RequestStatus
from jaxllm.core.scheduler import Scheduler
from jaxllm.core.types import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams

DATA = Path(__file__).parent.parent / "data" / "oracle"
TRACES = sorted(DATA.glob("scheduler/*.json")) + sorted(DATA.glob("scheduler_033/*.json"))


class RecordingScheduler(Scheduler):
    """Keeps the order of preemptions, which a SchedulerOutput does not tell."""

    def _preempt(self, index: int, timestamp: float) -> None:
        self.preempted.append(self.running[index].request_id)
        super()._preempt(index, timestamp)


def make_scheduler(config: dict[str, Any]) -> RecordingScheduler:
    spec = KVCacheSpec(block_size=config["block_size"], num_kv_heads=1, head_dim=8, itemsize=2)
    scheduler = RecordingScheduler(
        SchedulerConfig(
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=config["max_model_len"],
            policy=config["policy"],
            enable_chunked_prefill=config["enable_chunked_prefill"],
            long_prefill_token_threshold=config["long_prefill_token_threshold"],
            full_sequence_must_fit=config["full_sequence_must_fit"],
        ),
        CacheConfig(
            block_size=config["block_size"],
            enable_prefix_caching=config["enable_prefix_caching"],
            watermark=config["watermark"],
        ),
        KVCacheConfig(config["num_blocks"], (KVCacheGroup((0,), spec),)),
    )
    scheduler.preempted = []
    return scheduler


def make_request(fields: dict[str, Any], scheduler: Scheduler) -> Request:
    request = EngineCoreRequest(
        request_id=fields["id"],
        prompt_token_ids=fields["prompt_token_ids"],
        sampling_params=SamplingParams(
            max_tokens=fields["max_tokens"],
            min_tokens=fields["min_tokens"],
            ignore_eos=fields["ignore_eos"],
            stop_token_ids=fields["stop_token_ids"],
        ),
        eos_token_id=fields["eos_token_id"],
        arrival_time=fields["arrival_time"],
        priority=fields["priority"],
        cache_salt=fields["cache_salt"],
    )
    return Request.from_engine_core_request(request, scheduler.block_hasher)


def decisions(scheduler: RecordingScheduler, output: SchedulerOutput) -> dict[str, Any]:
    """What a trace records of `schedule`. Dictionaries are compared as lists of items: their order counts."""
    new, resumed = [], []
    for data in output.scheduled_new_reqs:
        (resumed if scheduler.requests[data.req_id].num_preemptions else new).append(data.req_id)
    cached = output.scheduled_cached_reqs
    num_computed_tokens = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    num_computed_tokens |= {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
    return {
        "num_scheduled_tokens": list(output.num_scheduled_tokens.items()),
        "new": new,
        "resumed": resumed,
        "preempted": scheduler.preempted,
        "num_computed_tokens": list(num_computed_tokens.items()),
        "num_cached_tokens": [(data.req_id, data.num_computed_tokens) for data in output.scheduled_new_reqs],
        "block_ids": {r.request_id: scheduler.kv_cache_manager.get_block_ids(r.request_id)[0] for r in scheduler.running},
        "free_blocks": scheduler.kv_cache_manager.block_pool.num_free_blocks,
        "waiting": [request.request_id for request in scheduler.waiting],
        "running": [request.request_id for request in scheduler.running],
    }


def check_worker_view(tables: dict[str, list[int]], output: SchedulerOutput, scheduler: Scheduler) -> None:
    """Keep block tables as a worker does, from the differences it is sent, and compare."""
    for request_id in output.finished_req_ids | output.preempted_req_ids:
        tables.pop(request_id, None)
    for data in output.scheduled_new_reqs:
        assert data.token_ids == scheduler.requests[data.req_id].all_token_ids
        tables[data.req_id] = data.block_ids[0].copy()
    cached = output.scheduled_cached_reqs
    for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        tables[request_id] += block_ids[0] if block_ids is not None else []
    assert tables == {r.request_id: scheduler.kv_cache_manager.get_block_ids(r.request_id)[0] for r in scheduler.running}
    assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())


def run_model(output: SchedulerOutput, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
    req_ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(req_ids, {r: i for i, r in enumerate(req_ids)}, [list(sampled[r]) for r in req_ids])


@pytest.mark.parametrize("path", TRACES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_oracle(path: Path) -> None:
    trace = json.loads(path.read_text())
    scheduler = make_scheduler(trace["config"])
    fields_of = {fields["id"]: fields for fields in trace["requests"]}
    first_output_seen: set[str] = set()
    tables: dict[str, list[int]] = {}
    for number, step in enumerate(trace["steps"]):
        at = f"step {number}"
        for request_id in step.get("add", ()):
            scheduler.add_request(make_request(fields_of[request_id], scheduler))
        for request_id in step.get("abort", ()):
            scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        if "reset_prefix_cache" in step:
            reset = step["reset_prefix_cache"]
            assert scheduler.reset_prefix_cache(reset["reset_running_requests"]) == reset["result"], at
            assert scheduler.preempted == reset["preempted"], at
            scheduler.preempted = []

        output = scheduler.schedule()
        expected = dict(step["schedule"])
        for name in ("num_scheduled_tokens", "num_computed_tokens", "num_cached_tokens"):
            expected[name] = list(expected[name].items())
        assert decisions(scheduler, output) == expected, at
        scheduler.preempted = []
        check_worker_view(tables, output, scheduler)

        model_runner_output = run_model(output, step["sampled"])
        for request_id in step.get("abort_in_flight", ()):
            scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        outputs = scheduler.update_from_output(output, model_runner_output)
        emitted = outputs[0].outputs if outputs else []
        assert [out.request_id for out in emitted] == list(step["outputs"]), at
        for out in emitted:
            expected_out = dict(step["outputs"][out.request_id])
            if out.request_id not in first_output_seen:
                first_output_seen.add(out.request_id)
                assert out.num_cached_tokens == expected_out.pop("num_cached_tokens"), at
            reason = None if out.finish_reason is None else str(out.finish_reason)
            assert {
                "new_token_ids": out.new_token_ids,
                "finish_reason": reason,
                "stop_reason": out.stop_reason,
            } == expected_out, at
        assert scheduler.kv_cache_manager.block_pool.num_free_blocks == step["free_blocks_after"], at
        if "free_queue_after" in step:
            free = [block.block_id for block in scheduler.kv_cache_manager.block_pool.free_queue.get_all()]
            assert free == step["free_queue_after"], at
        scheduler.check_integrity()


def test_oracle_traces_are_all_here() -> None:
    assert len(TRACES) == 71, "the traces of tests/data/oracle are not complete"
