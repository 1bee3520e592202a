"""The host's part of a decode step in vLLM: its scheduler and its output processor, on a device that costs nothing.

Runs in an interpreter that has vLLM and not jaxllm: `python -I peer_vllm.py`. Reads jobs from standard input and answers each on
standard output, a line of JSON both. Checked with vLLM 0.32.
"""

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections import deque
from typing import Any

PARTS = ("schedule", "update", "output")


def time_steps(
    scheduler: Any, process_outputs: Any, make_output: Any, num_requests: int, num_steps: int, num_warm_up_steps: int
) -> dict[str, float]:
    """Milliseconds of each part, medians of the steps in which every request decodes.

    Steps overlap as with asynchronous scheduling: one is scheduled before the output of the one before it is taken in.

    Args:
        scheduler: has all requests.
        process_outputs: of the output processor, as a function of what the scheduler gives for one front end.
        make_output: what a device will answer to the scheduler output that was just made; not timed.
    """
    in_flight: deque[Any] = deque()
    steps: list[dict[str, float]] = []
    while len(steps) < num_warm_up_steps + num_steps:
        cpu, start = time.thread_time(), time.perf_counter()
        scheduled = scheduler.schedule()
        schedule, cpu_schedule = time.perf_counter() - start, time.thread_time() - cpu
        in_flight.append((scheduled, make_output(scheduled)))
        if len(in_flight) < 2:
            continue
        scheduled, output = in_flight.popleft()
        cpu, start = time.thread_time(), time.perf_counter()
        outputs = scheduler.update_from_output(scheduled, output)
        updated = time.perf_counter()
        given = process_outputs(outputs[0])
        end = time.perf_counter()
        cpu = time.thread_time() - cpu + cpu_schedule
        is_decode = scheduled.total_num_scheduled_tokens == len(scheduled.num_scheduled_tokens) == num_requests
        if is_decode and len(given.request_outputs) == num_requests:
            steps.append({"schedule": schedule, "update": updated - start, "output": end - updated, "cpu": cpu})
        if len(steps) == num_warm_up_steps:
            gc.collect()
            gc.freeze()
    gc.unfreeze()
    return {part: statistics.median(step[part] for step in steps[num_warm_up_steps:]) * 1e3 for part in (*PARTS, "cpu")}


def measure(job: dict[str, Any]) -> dict[str, float]:
    """A job: `model` (a folder with config.json and the tokenizer), `prompts`, `output_ids`, `max_tokens`, `num_steps`,
    `num_warm_up_steps`, `max_model_len`, `max_num_batched_tokens`, `block_size`, `num_blocks`, `detokenize`.
    """
    import torch
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.tokenizers import get_tokenizer
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.metrics.stats import IterationStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    prompts, output_ids, block_size = job["prompts"], job["output_ids"], job["block_size"]
    config = EngineArgs(
        model=job["model"],
        skip_tokenizer_init=not job["detokenize"],
        dtype="bfloat16",
        max_model_len=job["max_model_len"],
        max_num_seqs=len(prompts),
        max_num_batched_tokens=job["max_num_batched_tokens"],
        block_size=block_size,
        enable_prefix_caching=True,
        disable_log_stats=False,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = job["num_blocks"]
    config.scheduler_config.async_scheduling = True  # which its CPU platform turns off
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(job["num_blocks"], [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=block_size,
        log_stats=True,
    )
    processor = OutputProcessor(get_tokenizer(job["model"]) if job["detokenize"] else None, log_stats=True)
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    block_hasher = get_request_block_hasher(block_size, hash_function)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0,
            max_tokens=job["max_tokens"],
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            detokenize=job["detokenize"],
        )
        request = EngineCoreRequest(
            request_id=str(i),
            external_req_id=str(i),
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        processor.add_request(request, None)
        scheduler.add_request(Request.from_engine_core_request(request, block_hasher))
    num_answered = 0

    def make_output(scheduled: Any) -> ModelRunnerOutput:
        nonlocal num_answered
        num_answered += 1
        req_ids = list(scheduled.num_scheduled_tokens)
        token = output_ids[num_answered % len(output_ids)]
        # A prefill of several steps samples nothing before its last.
        sampled = [[] if scheduler.requests[req_id].is_prefill_chunk else [token] for req_id in req_ids]
        return ModelRunnerOutput(req_ids, {req_id: row for row, req_id in enumerate(req_ids)}, sampled)

    def process_outputs(outputs: Any) -> Any:
        return processor.process_outputs(outputs.outputs, time.monotonic(), IterationStats())

    return time_steps(scheduler, process_outputs, make_output, len(prompts), job["num_steps"], job["num_warm_up_steps"])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed goes to standard error
    os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"
    import vllm

    print(json.dumps({"name": "vLLM", "version": vllm.__version__, "python": platform.python_version()}), file=answers)
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
