"""Workers of well-known models that compile for a GPU that is not here."""

import dataclasses

from jaxllm.config import CacheConfig, CacheDType, DecoderConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxllm.parallel_config import ParallelConfig
from jaxllm.plan.abstract_worker import AbstractWorker
from jaxllm.plan.known_models import KNOWN_MODELS
from jaxllm.worker.buckets import Bucket
from kernels_pallas.aot import TARGETS


def make_worker(
    model: str,
    *,
    tensor_parallel_size: int = 1,
    num_layers: int | None = None,
    num_blocks: int = 4096,
    target: str = "h200",
    max_num_seqs: int = 256,
    attention_backend: str = "mosaic",
    kv_cache_dtype: CacheDType = "auto",
) -> AbstractWorker:
    """A worker of a known model that is ready to compile steps; `num_layers` of them, by default all."""
    decoder = DecoderConfig.from_hf(KNOWN_MODELS[model])
    if num_layers is not None:
        decoder = dataclasses.replace(decoder, num_layers=num_layers, sliding_windows=decoder.sliding_windows[:num_layers])
    config = EngineConfig(
        model=ModelConfig(model, "", decoder, "bfloat16", 8192, load_format="dummy"),
        cache=CacheConfig(num_gpu_blocks_override=num_blocks, cache_dtype=kv_cache_dtype),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
        parallel=ParallelConfig(tensor_parallel_size),
        attention_backend=attention_backend,
    )
    worker = AbstractWorker(config, TARGETS[target])
    worker.init_device()
    worker.load_model()
    worker.determine_available_memory()
    return worker


def bucket_of(worker: AbstractWorker, num_tokens: int, *, decode: bool) -> Bucket:
    """The bucket of this size and kind."""
    [bucket] = [found for found in worker.runner.buckets if (found.num_tokens, found.decode_only) == (num_tokens, decode)]
    return bucket
