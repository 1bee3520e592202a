"""EngineArgs: the keyword arguments of `LLM` and the flags of the command line, turned into an EngineConfig.

This module starts no backend: a front end that only reads the configuration never touches the accelerator.
"""

import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxllm.checks import check_at_least, check_choice
from jaxllm.config import CacheConfig, DecoderConfig, EngineConfig, LoadFormat, ModelConfig, SchedulerConfig, has_fp8_kv_cache
from jaxllm.cuda import cuda_is_usable
from jaxllm.engine.data_parallel_args import local_engines
from jaxllm.parallel_config import ParallelConfig
from jaxllm.weights.source import ModelSource, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

UsageContext = Literal["llm", "server"]

# Sampling parameters that a model's generation_config.json may recommend.
GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# NVIDIA names of devices with 80 GB or more, where large batches fit (an A100's compute does not gain from them).
_LARGE_DEVICES = ("H100", "H200", "H20", "GH200", "B200", "B300", "GB200", "GB300")


def detect_platform() -> Literal["cuda", "cpu"]:
    """What jax will run on, found out without starting it."""
    asked = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    if asked:
        return "cuda" if asked in ("cuda", "gpu") else "cpu"
    return "cuda" if cuda_is_usable() else "cpu"


def _device_names() -> list[str]:
    """Names of the local NVIDIA devices, from the driver's own files."""
    names = []
    for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        names += [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("Model:")]
    return names


def default_batch_sizes(platform: str, usage: UsageContext, device: str | None = None) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) where the user gives none. As vLLM has them, but for the CPU.

    Args:
        device: NVIDIA's name of the device; None for those that are here.
    """
    if platform == "cpu":
        # A step's time is proportional to its tokens from about 128 on: larger steps gain nothing and delay all that wait.
        return 512, 128
    found = _device_names() if device is None else [device]
    large = any(name in words for words in found for name in _LARGE_DEVICES)
    if large:
        return (16384 if usage == "llm" else 8192), 1024
    return (8192 if usage == "llm" else 2048), 256


def parse_unknown(name: str, known: list[str]) -> str:
    """The message for an unknown argument, with the nearest known one."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


@dataclass
class EngineArgs:
    """Names and defaults are those of vLLM's engine arguments.

    Attributes:
        model: a folder, a .gguf file, a hub id, or "smollm2-135m-instruct".
        tokenizer: a folder or hub id; by default the model's own.
        skip_tokenizer_init: take and give token ids only.
        revision: branch, tag or commit of a hub id.
        download_dir: the hub's cache folder, instead of its own default.
        dtype: float32, bfloat16 or float16; "auto" is the model's own on a GPU and float32 on a CPU.
        load_format: safetensors, gguf or orbax; "auto" goes by what is there; "dummy" makes random weights.
        max_model_len: most tokens of a prompt and its output; by default what the model's config gives.
        seed: of dummy weights and of requests without a seed.
        hf_overrides: replaces fields of the model's config.
        generation_config: "auto" takes sampling defaults from the model's generation_config.json, "vllm" takes none;
            else a model whose file is taken.
        override_generation_config: replaces fields of it.
        max_logprobs: most log probabilities that a request may ask for; -1 for the whole vocabulary.
        logprobs_mode: raw_logprobs, processed_logprobs, raw_logits or processed_logits.
        block_size: tokens of a block of the KV cache.
        gpu_memory_utilization: the share of a device's memory for weights, temporaries and KV cache.
        kv_cache_memory_bytes: bytes of KV cache a device, instead of what gpu_memory_utilization leaves.
        num_gpu_blocks_override: blocks of the KV cache, instead of either.
        kv_cache_dtype: of the KV cache's numbers: bfloat16, float16, float32, or fp8 (the same as fp8_e4m3) with the scales that
            the checkpoint has, else 1; "auto" is the model's dtype, or fp8 if the checkpoint is quantized for that.
        enable_prefix_caching: reuse the blocks of prompts that begin alike.
        watermark: the share of the blocks that admission leaves free.
        max_num_seqs: most requests running at once; by default by device.
        max_num_batched_tokens: most tokens computed in a step; by default by device.
        scheduling_policy: fcfs or priority.
        enable_chunked_prefill: compute a long prompt in several steps.
        long_prefill_token_threshold: most tokens of one request in a step while there are others; 0 for no limit.
        scheduler_reserve_full_isl: admit a request only if its whole prompt fits in the free blocks.
        async_scheduling: dispatch a step before the tokens of the one before it are on the host.
        num_decode_steps: most tokens of a request that one dispatch decodes, while nobody waits and nothing needs the host.
        max_itl: milliseconds between two outputs of a stream, within which the steps of a dispatch must stay.
        tensor_parallel_size: devices that share each layer.
        pipeline_parallel_size: stages that share out the layers, each on tensor_parallel_size devices.
        enable_expert_parallel: share out the experts of a mixture-of-experts model; refused for a model without experts.
        distributed_executor_backend: "uni", one process drives all devices; "mp", worker processes drive some each. By default
            uni on one machine, mp on several.
        devices_per_worker: devices that each worker process drives, under "mp".
        execute_model_timeout: seconds for a step, after which worker processes count as hung.
        worker_hang_timeout: seconds without a sign of life after which a worker process, or another machine, counts as hung.
        nnodes: machines that share the devices evenly.
        node_rank: which of them this is. The engine runs on 0; the same command on the others runs their workers only.
        master_addr: where the others find node 0.
        master_port: at which port, and the two after it.
        data_parallel_size: engines, each with devices of its own, among which a server shares out its requests.
        data_parallel_rank: one engine is here, of this rank; a load balancer outside shares out the requests.
        data_parallel_size_local: how many of the engines are on this machine; by default all. The server waits for the others to
            join from machines that run it with --headless.
        data_parallel_start_rank: the rank of the first engine here; implies data_parallel_hybrid_lb, but for --headless.
        data_parallel_address: where headless machines find the server, 127.0.0.1 by default.
        data_parallel_rpc_port: at which port, 29550 by default; requests and outputs take ports of their own.
        data_parallel_hybrid_lb: a load balancer outside shares out the requests among servers of several engines each.
        data_parallel_external_lb: a load balancer outside shares out the requests among servers of one engine each; needs
            data_parallel_rank.
        data_parallel_restart: start an engine again that has died; the others serve meanwhile.
        data_parallel_routing: which engine gets a request: load (the one with the least to do) or prefix (the one that has most
            of its prompt cached, unless it has much more to do than others).
        data_parallel_backend: where engines run: mp (this machine) or ray (a Ray cluster; their number can then change).
        attention_backend: "auto" is "mosaic" on Hopper, "triton" on Ampere and Ada, "llvm" on a CPU with AVX-512, else
            "reference". A name is an order.
        matmul_backend: "auto" is "llvm" on a CPU with AVX-512, whose weights then lie as that wants them, else "xla".
        cudagraph_capture_sizes: sizes of decode steps to compile, in requests; by default a ladder up to max_num_seqs.
        compile_sizes: sizes of mixed steps to compile, in tokens; by default a ladder up to max_num_batched_tokens.
        compilation_cache_dir: by default `jaxllm/compiled` in the user's cache folder; "" keeps nothing.
        compiled_dir: a folder made by `python -m jaxllm.build`: its programs are loaded, and none is ever compiled; refused
            if they do not fit.
        background_compilation: serve as soon as the largest steps are compiled, and compile the smaller ones beside.
        disable_log_stats: do not count and time.
        stream_interval: tokens between two outputs of a stream.
        max_num_queued_reqs: most unfinished requests that the engine takes; by default without limit.
        max_num_queued_tokens: most prompt tokens of requests that have given no output yet; by default without limit.
        profile: folder to write a trace of every step to, for Perfetto and for `python -m jaxllm.bench trace`.
        use_tqdm_on_load: show progress bars while the engine starts.
        enforce_eager: accepted for compatibility; every step is compiled.
    """

    model: str = "smollm2-135m-instruct"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    download_dir: str | None = None
    dtype: str = "auto"
    load_format: str = ModelConfig.load_format
    max_model_len: int | None = None
    seed: int = ModelConfig.seed
    hf_overrides: Mapping[str, Any] | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    max_logprobs: int = ModelConfig.max_logprobs
    logprobs_mode: str = ModelConfig.logprobs_mode
    block_size: int = CacheConfig.block_size
    gpu_memory_utilization: float = CacheConfig.gpu_memory_utilization
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = CacheConfig.enable_prefix_caching
    watermark: float = CacheConfig.watermark
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    enable_chunked_prefill: bool = SchedulerConfig.enable_chunked_prefill
    long_prefill_token_threshold: int = SchedulerConfig.long_prefill_token_threshold
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = SchedulerConfig.async_scheduling
    num_decode_steps: int = SchedulerConfig.num_decode_steps
    max_itl: float | None = None
    tensor_parallel_size: int = ParallelConfig.tensor_parallel_size
    pipeline_parallel_size: int = ParallelConfig.pipeline_parallel_size
    enable_expert_parallel: bool = False
    distributed_executor_backend: str | None = None
    devices_per_worker: int = ParallelConfig.devices_per_worker
    execute_model_timeout: float = ParallelConfig.execute_model_timeout
    worker_hang_timeout: float = ParallelConfig.worker_hang_timeout
    nnodes: int = ParallelConfig.nnodes
    node_rank: int = ParallelConfig.node_rank
    master_addr: str = ParallelConfig.master_addr
    master_port: int = ParallelConfig.master_port
    data_parallel_size: int = ParallelConfig.data_parallel_size
    data_parallel_rank: int | None = None
    data_parallel_size_local: int | None = ParallelConfig.data_parallel_size_local
    data_parallel_start_rank: int | None = None
    data_parallel_address: str | None = None
    data_parallel_rpc_port: int | None = None
    data_parallel_hybrid_lb: bool = False
    data_parallel_external_lb: bool = False
    data_parallel_restart: bool = ParallelConfig.data_parallel_restart
    data_parallel_routing: str = ParallelConfig.data_parallel_routing
    data_parallel_backend: str = ParallelConfig.data_parallel_backend
    attention_backend: str = EngineConfig.attention_backend
    matmul_backend: str = EngineConfig.matmul_backend
    cudagraph_capture_sizes: Sequence[int] | None = None
    compile_sizes: Sequence[int] | None = None
    compilation_cache_dir: str | None = None
    compiled_dir: str | None = None
    background_compilation: bool = EngineConfig.background_compilation
    disable_log_stats: bool = False
    stream_interval: int = EngineConfig.stream_interval
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    profile: str | None = None
    use_tqdm_on_load: bool = True
    enforce_eager: bool = False

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineArgs":
        """Like the constructor, but the error for an unknown name suggests the nearest known one.

        Raises:
            TypeError: for an unknown name.
        """
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise TypeError(parse_unknown(name, known))
        return cls(**kwargs)

    def create_engine_config(self, usage: UsageContext = "llm", device: str | None = None) -> EngineConfig:
        """Find the model, complete what the user left open, and check everything.

        Args:
            device: NVIDIA's name of the device to complete it for; None for what there is here.

        Raises:
            ValueError: naming the argument and its value.
        """
        if self.enforce_eager:
            logger.info("enforce_eager has no effect: every step is compiled")
        check_choice("load_format", self.load_format, LoadFormat)
        if self.compiled_dir is not None and self.compilation_cache_dir:
            raise ValueError(
                f"compiled_dir {self.compiled_dir!r} and compilation_cache_dir {self.compilation_cache_dir!r} exclude each other"
            )
        local = local_engines(
            self.data_parallel_size,
            self.data_parallel_rank,
            self.data_parallel_size_local,
            self.data_parallel_start_rank,
            self.data_parallel_hybrid_lb,
            self.data_parallel_external_lb,
        )
        if local.size_local == local.size:
            for name in ("data_parallel_address", "data_parallel_rpc_port"):
                if getattr(self, name) is not None:
                    logger.warning("%s has no effect: no engine of this server is on a headless machine", name)
        platform = detect_platform() if device is None else "cuda"
        needs_weights = self.load_format != "dummy"
        source = resolve_model(self.model, revision=self.revision, download_dir=self.download_dir, weights=needs_weights)
        model = self._model_config(source, platform)
        if self.enable_expert_parallel:
            raise ValueError(f"enable_expert_parallel needs a model with experts; {model.decoder.architecture} has none")
        tokens, seqs = default_batch_sizes(platform, usage, device)
        if self.max_num_seqs is not None:
            seqs = self.max_num_seqs
        elif self.max_num_batched_tokens is not None:
            seqs = min(seqs, self.max_num_batched_tokens)
        if self.max_num_batched_tokens is not None:
            tokens = self.max_num_batched_tokens
        else:
            if not self.enable_chunked_prefill:
                tokens = max(tokens, model.max_model_len)
            tokens = max(min(tokens, seqs * model.max_model_len), seqs)
        return EngineConfig(
            model=model,
            cache=CacheConfig(
                block_size=self.block_size,
                gpu_memory_utilization=self.gpu_memory_utilization,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                num_gpu_blocks_override=self.num_gpu_blocks_override,
                enable_prefix_caching=self.enable_prefix_caching,
                watermark=self.watermark,
                cache_dtype=self._cache_dtype(source),  # type: ignore[arg-type]  # checked at birth
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=seqs,
                max_num_batched_tokens=tokens,
                max_model_len=model.max_model_len,
                policy=self.scheduling_policy,  # type: ignore[arg-type]  # checked at birth
                enable_chunked_prefill=self.enable_chunked_prefill,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                full_sequence_must_fit=self.scheduler_reserve_full_isl,
                async_scheduling=self.async_scheduling,
                num_decode_steps=self.num_decode_steps,
                max_itl=self.max_itl,
                num_pipeline_stages=self.pipeline_parallel_size,
            ),
            parallel=ParallelConfig(
                tensor_parallel_size=self.tensor_parallel_size,
                pipeline_parallel_size=self.pipeline_parallel_size,
                distributed_executor_backend=self._executor_backend(),  # type: ignore[arg-type]  # checked at birth
                devices_per_worker=self.devices_per_worker,
                execute_model_timeout=self.execute_model_timeout,
                worker_hang_timeout=self.worker_hang_timeout,
                nnodes=self.nnodes,
                node_rank=self.node_rank,
                master_addr=self.master_addr,
                master_port=self.master_port,
                data_parallel_size=local.size,
                data_parallel_start_rank=local.start_rank,
                data_parallel_restart=self.data_parallel_restart,
                data_parallel_routing=self.data_parallel_routing,  # type: ignore[arg-type]  # checked at birth
                data_parallel_backend=self.data_parallel_backend,  # type: ignore[arg-type]  # checked at birth
                data_parallel_size_local=None if local.size_local == local.size else local.size_local,
                data_parallel_address=self.data_parallel_address or ParallelConfig.data_parallel_address,
                data_parallel_rpc_port=ParallelConfig.data_parallel_rpc_port
                if self.data_parallel_rpc_port is None
                else self.data_parallel_rpc_port,
            ),
            attention_backend=self.attention_backend,
            matmul_backend=self.matmul_backend,
            cudagraph_capture_sizes=_sizes("cudagraph_capture_sizes", self.cudagraph_capture_sizes, seqs),
            compile_sizes=_sizes("compile_sizes", self.compile_sizes, tokens),
            compilation_cache_dir=self._cache_dir(),
            compiled_dir=self.compiled_dir,
            background_compilation=self.background_compilation,
            log_stats=not self.disable_log_stats,
            stream_interval=self.stream_interval,
            use_tqdm_on_load=self.use_tqdm_on_load,
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens,
            profile_dir=self.profile,
        )

    def load_tokenizer(self) -> "PreTrainedTokenizerFast | None":
        """The tokenizer; None with `skip_tokenizer_init`.

        Raises:
            ValueError: naming the model, if it has none.
        """
        if self.skip_tokenizer_init:
            return None
        from jaxllm.tokenizer import load_tokenizer

        # A revision is the model's own.
        name, revision = (self.model, self.revision) if self.tokenizer is None else (self.tokenizer, None)
        return load_tokenizer(name, revision=revision, download_dir=self.download_dir)

    def _model_config(self, source: ModelSource, platform: str) -> ModelConfig:
        hf = {**source.hf_config, **(self.hf_overrides or {})}
        decoder = DecoderConfig.from_hf(hf)
        longest = decoder.rope.max_position(decoder.max_position_embeddings)
        eos = _eos_token_ids(hf, source.generation_config)
        return ModelConfig(
            model=self.model,
            path=str(source.path),
            decoder=decoder,
            dtype=_resolve_dtype(self.dtype, hf, platform),  # type: ignore[arg-type]  # checked at birth
            max_model_len=longest if self.max_model_len is None else self.max_model_len,
            tokenizer=self.tokenizer,
            eos_token_ids=eos,
            max_logprobs=self.max_logprobs,
            logprobs_mode=self.logprobs_mode,  # type: ignore[arg-type]  # checked at birth
            seed=self.seed,
            load_format=self.load_format,  # type: ignore[arg-type]  # checked at birth
            generation_defaults=self._generation_defaults(source),
        )

    def _generation_defaults(self, source: ModelSource) -> dict[str, Any]:
        if self.generation_config == "auto":
            found: Mapping[str, Any] = source.generation_config
        elif self.generation_config == "vllm":
            found = {}
        else:
            found = resolve_model(self.generation_config, weights=False).generation_config
        found = {**found, **(self.override_generation_config or {})}
        defaults = {name: found[name] for name in GENERATION_FIELDS if found.get(name) is not None}
        if found.get("max_new_tokens") is not None:
            defaults["max_tokens"] = found["max_new_tokens"]
        return defaults

    def _cache_dtype(self, source: ModelSource) -> str:
        """vLLM's rule: a checkpoint that is quantized for an fp8 cache gets one unless another is named."""
        hf = {**source.hf_config, **(self.hf_overrides or {})}
        return "fp8" if self.kv_cache_dtype == "auto" and has_fp8_kv_cache(hf) else self.kv_cache_dtype

    def _executor_backend(self) -> str:
        if self.distributed_executor_backend is not None:
            return self.distributed_executor_backend
        return "uni" if self.nnodes == 1 else "mp"

    def _cache_dir(self) -> str | None:
        if self.compilation_cache_dir is not None:
            return self.compilation_cache_dir or None
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return str(Path(base) / "jaxllm" / "compiled")


def _sizes(name: str, sizes: Sequence[int] | None, largest: int) -> tuple[int, ...] | None:
    """Bucket sizes in order, those above `largest` left out and `largest` itself put in."""
    if sizes is None:
        return None
    for size in sizes:
        check_at_least(name, size, 1)
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


def _eos_token_ids(hf: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The model's end-of-sequence ids, the one of the config first, then those that only the generation config has."""
    ids: list[int] = []
    for found in (hf.get("eos_token_id"), generation.get("eos_token_id")):
        ids += found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys(ids))


def _resolve_dtype(dtype: str, hf: Mapping[str, Any], platform: str) -> str:
    if dtype == "half":
        return "float16"
    if dtype == "float":
        return "float32"
    if dtype != "auto":
        return dtype
    if platform == "cpu":
        return "float32"  # XLA:CPU is quick in float32 only, and exact
    own = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    return "bfloat16" if own == "float32" else str(own)
