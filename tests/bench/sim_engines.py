"""Small simulated engines for the tests of jaxllm.bench.sim."""

from typing import Any

from jaxllm.bench.sim.engine import EngineSpec, SimEngine
from jaxllm.bench.sim.request import SimRequest
from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec


def make_spec(
    *,
    num_blocks: int = 1000,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    enable_prefix_caching: bool = True,
    watermark: float = 0.0,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    host_time: float = 0.0,
    **scheduler: Any,
) -> EngineSpec:
    groups = tuple(KVCacheGroup((i,), KVCacheSpec(block_size, 1, 8, 2, window)) for i, window in enumerate(windows))
    return EngineSpec(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            **scheduler,
        ),
        CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching, watermark=watermark),
        KVCacheConfig(num_blocks, groups),
        host_time,
    )


def by_size(num_tokens: int, num_rows: int, num_context_tokens: int, num_pairs: int) -> float:
    """A step time that shows every difference in what a step computes; a sum of powers of two, so that it is exact."""
    return 1.0 + num_tokens / 64 + num_rows / 1024 + num_context_tokens / 2**20 + num_pairs / 2**24


class Log:
    """Hears of tokens and keeps everything."""

    def __init__(self) -> None:
        self.gaps: dict[float, int] = {}
        self.done: list[tuple[int, float, float, int, int]] = []

    def gap(self, seconds: float, count: int) -> None:
        self.gaps[seconds] = self.gaps.get(seconds, 0) + count

    def finished(self, request: SimRequest) -> None:
        self.done.append(
            (request.index, request.first_time, request.token_time, request.num_cached_tokens, request.num_preemptions)
        )


def make_request(
    engine: SimEngine,
    index: int,
    prompt_len: int,
    output_len: int,
    prefix: int = 0,
    prefix_len: int = 0,
    time: float = 0.0,
    priority: int = 0,
):
    """A request whose first `prefix_len` tokens are those of `prefix`."""
    size = engine.scheduler.kv_cache_manager.block_size
    shared = min(prefix_len, prompt_len) // size
    own = (index + 1) << 20
    hashes = [(1 << 60) + (prefix << 20) + i for i in range(shared)] + [own + i for i in range(prompt_len // size - shared)]
    return SimRequest(index, prompt_len, output_len, hashes, own + (1 << 19), engine.block_hasher, time, priority)
