"""Small schedulers, managers and requests for the tests of jaxllm.core."""

from collections.abc import Sequence
from typing import Any

from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec
from jaxllm.core.kv_cache_manager import KVCacheManager
from jaxllm.core.kv_cache_utils import BlockHasher
from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.core.request import Request
from jaxllm.core.scheduler import Scheduler
from jaxllm.core.types import EngineCoreOutput, EngineCoreRequest
from jaxllm.sampling_params import SamplingParams

EOS = 2


class OverlappedScheduler(Scheduler):
    """Lets the next step be scheduled before this one's tokens are known: each sampling request is owed one."""

    def _update_after_schedule(self, requests: list[Request], output: SchedulerOutput) -> None:
        super()._update_after_schedule(requests, output)
        for request in requests:
            if not request.is_prefill_chunk:
                request.num_output_placeholders += 1


def make_kv_cache_config(num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,)) -> KVCacheConfig:
    """One group a window, one layer a group."""
    return KVCacheConfig(
        num_blocks,
        tuple(
            KVCacheGroup((layer,), KVCacheSpec(block_size, num_kv_heads=1, head_dim=8, itemsize=2, sliding_window=window))
            for layer, window in enumerate(windows)
        ),
    )


def make_manager(
    num_blocks: int, block_size: int = 4, windows: Sequence[int | None] = (None,), max_model_len: int | None = None, **kwargs: Any
) -> KVCacheManager:
    """Requests may have as many tokens as fit in all blocks, unless `max_model_len` says otherwise."""
    if max_model_len is None:
        max_model_len = (num_blocks - 1) // len(windows) * block_size
    return KVCacheManager(make_kv_cache_config(num_blocks, block_size, windows), max_model_len, **kwargs)


def make_scheduler(
    *,
    cls: type[Scheduler] = Scheduler,
    num_blocks: int = 1000,
    block_size: int = 4,
    windows: Sequence[int | None] = (None,),
    enable_prefix_caching: bool = True,
    watermark: float = 0.0,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 512,
    max_model_len: int = 512,
    **scheduler_fields: Any,
) -> Scheduler:
    return cls(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            **scheduler_fields,
        ),
        CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching, watermark=watermark),
        make_kv_cache_config(num_blocks, block_size, windows),
    )


def make_request(
    request_id: str,
    prompt: int | Sequence[int],
    block_hasher: BlockHasher | None = None,
    *,
    max_tokens: int = 16,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str | None = None,
    extra_keys: tuple[str, ...] = (),
    client_index: int = 0,
    **params: Any,
) -> Request:
    """`prompt` is token ids, or their number: then no two ids share a prefix."""
    if isinstance(prompt, int):
        first = 1000 + sum(request_id.encode()) * 1000
        prompt = range(first, first + prompt)
    request = EngineCoreRequest(
        request_id,
        list(prompt),
        SamplingParams(max_tokens=max_tokens, **params),
        eos_token_id=EOS,
        arrival_time=arrival_time,
        priority=priority,
        cache_salt=cache_salt,
        extra_keys=extra_keys,
        client_index=client_index,
    )
    return Request.from_engine_core_request(request, block_hasher)


def add_requests(scheduler: Scheduler, prompts: dict[str, int | Sequence[int]], **kwargs: Any) -> list[Request]:
    requests = [make_request(request_id, prompt, scheduler.block_hasher, **kwargs) for request_id, prompt in prompts.items()]
    for request in requests:
        scheduler.add_request(request)
    return requests


def runner_output(output: SchedulerOutput, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
    """Requests without an entry in `sampled` give no token, as in the middle of a prefill."""
    req_ids = list(output.num_scheduled_tokens)
    rows = {request_id: row for row, request_id in enumerate(req_ids)}
    return ModelRunnerOutput(req_ids, rows, [list(sampled.get(request_id, ())) for request_id in req_ids])


def update(
    scheduler: Scheduler, output: SchedulerOutput, sampled: dict[str, list[int]] | None = None
) -> dict[str, EngineCoreOutput]:
    """Feed back the tokens of a step, by default token 7 for every request that has computed all it has. Outputs by request."""
    if sampled is None:
        sampled = {}
        for request_id in output.num_scheduled_tokens:
            request = scheduler.requests.get(request_id)
            if request is not None and not request.is_prefill_chunk:
                sampled[request_id] = [7]
    by_client = scheduler.update_from_output(output, runner_output(output, sampled))
    scheduler.check_integrity()
    return {out.request_id: out for outputs in by_client.values() for out in outputs.outputs}


def step(scheduler: Scheduler, sampled: dict[str, list[int]] | None = None) -> SchedulerOutput:
    """Schedule and update at once."""
    output = scheduler.schedule()
    update(scheduler, output, sampled)
    return output


def free_ids(manager: KVCacheManager) -> list[int]:
    """Free blocks in the order of reuse."""
    return [block.block_id for block in manager.block_pool.free_queue.get_all()]


def ids_of(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]
