"""How much of the devices' work buckets waste: the real scheduler over a null device."""

from collections.abc import Sequence

import numpy as np

from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec
from jaxllm.core.output import ModelRunnerOutput
from jaxllm.core.request import Request
from jaxllm.core.scheduler import Scheduler
from jaxllm.core.types import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker.buckets import Buckets


def padding_waste(
    lengths: Sequence[tuple[int, int]],
    arrivals: Sequence[float],
    buckets: Buckets,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> float:
    """The share of computed tokens that is padding.

    Args:
        lengths: prompt and output tokens of each request.
        arrivals: when each comes, in steps.
    """
    config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, 8192)
    groups = (KVCacheGroup((0,), KVCacheSpec(32, 1, 4, 4)),)
    scheduler = Scheduler(config, CacheConfig(enable_prefix_caching=False), KVCacheConfig(1 << 16, groups))
    todo, now, used, computed = sorted(zip(arrivals, lengths, strict=True)), 0.0, 0, 0
    while todo or scheduler.has_unfinished_requests():
        while todo and todo[0][0] <= now:
            _, (num_prompt, num_output) = todo.pop(0)
            params = SamplingParams(max_tokens=num_output, ignore_eos=True)
            request = EngineCoreRequest(f"{len(todo)}", [5] * num_prompt, params)
            scheduler.add_request(Request.from_engine_core_request(request, None))
        now += 1.0
        output = scheduler.schedule()
        counts = np.fromiter(output.num_scheduled_tokens.values(), np.int64)
        if not len(counts):
            continue
        used += int(counts.sum())
        computed += buckets.choose(counts).num_tokens
        req_ids = list(output.num_scheduled_tokens)
        sampled = [[] if scheduler.requests[req_id].is_prefill_chunk else [7] for req_id in req_ids]
        scheduler.update_from_output(output, ModelRunnerOutput(req_ids, {r: i for i, r in enumerate(req_ids)}, sampled))
    return 1 - used / computed
