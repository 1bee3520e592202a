"""Configuration: frozen dataclasses, complete and checked at birth. Standard library only.

`EngineConfig` holds all of it. Users do not build it by hand: `jaxllm.engine.engine_args.EngineArgs` does, from the keyword
arguments of `LLM` and the flags of the command line.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm.checks import check_at_least, check_choice
from jaxllm.parallel_config import ParallelConfig

DType = Literal["float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "orbax", "dummy"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
SchedulingPolicy = Literal["fcfs", "priority"]
CacheDType = Literal["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3"]
ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        type: how they are stretched beyond the trained length.
        factor: by how much.
        original_max_position: the trained length; all types but linear need it.
        low_freq_factor, high_freq_factor: llama3.
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: yarn.
    """

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_choice("rope type", self.type, RopeType)
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ValueError(f"rope_theta must be positive, got {self.theta!r}")
        if self.factor < 1.0:
            raise ValueError(f"the rope factor must be at least 1, got {self.factor!r}")
        if self.type in ("dynamic", "llama3", "yarn") and self.original_max_position is None:
            raise ValueError(f"rope type {self.type!r} needs original_max_position_embeddings")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "RopeConfig":
        """Read either form of a Hugging Face config: `rope_theta` and `rope_scaling`, or `rope_parameters`.

        Raises:
            ValueError: naming what is unsupported.
        """
        scaling = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
        if any(isinstance(value, Mapping) for value in scaling.values()):
            raise ValueError(f"rope_parameters that differ by layer type are not supported: {scaling!r}")
        rotary_share = scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
        if rotary_share != 1.0:
            raise ValueError(f"partial_rotary_factor {rotary_share!r} is not supported")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        theta = float(scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0)
        if kind == "default":
            return cls(theta=theta)
        check_choice("rope type", kind, RopeType)
        longest = hf.get("max_position_embeddings")
        original = scaling.get("original_max_position_embeddings") or hf.get("original_max_position_embeddings")
        if original is None and kind != "linear":
            original = longest
        factor = scaling.get("factor")
        if factor is None and kind == "yarn" and original and longest:
            factor = longest / original
        if factor is None:
            raise ValueError(f"rope type {kind!r} needs a factor, got {scaling!r}")
        floats = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        return cls(
            theta=theta,
            type=kind,
            factor=float(factor),
            original_max_position=original,
            truncate=bool(scaling.get("truncate", True)),
            **{name: float(scaling[name]) for name in floats if scaling.get(name) is not None},
        )

    def max_position(self, max_position_embeddings: int) -> int:
        """The longest context that a model with this `max_position_embeddings` in its config can take."""
        if self.type == "yarn":
            return int((self.original_max_position or max_position_embeddings) * self.factor)
        if self.type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        return max_position_embeddings


Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]

# What sets the families of models/decoder.py apart, where their configs do not say it themselves.
DECODER_FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True, "attention_out_bias": False},
    "Qwen3ForCausalLM": {"qk_norm": True, "head_dim": 128},
}


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder-only transformer of the Llama family; differences between models are fields.

    Attributes:
        architecture: the Hugging Face class name.
        sliding_windows: one a layer: tokens that a query can see, itself included; None for all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    hidden_act: Activation = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            check_at_least(name, getattr(self, name), 1)
        check_choice("hidden_act", self.hidden_act, Activation)
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps >= 0):
            raise ValueError(f"rms_norm_eps must not be negative, got {self.rms_norm_eps!r}")
        if any(window is not None and window < 1 for window in self.sliding_windows):
            raise ValueError(f"a sliding window must be at least 1, got {self.sliding_windows!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_attention_heads {self.num_heads} is no multiple of num_key_value_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"{len(self.sliding_windows)} sliding windows for {self.num_layers} layers")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "DecoderConfig":
        """From the contents of a Hugging Face `config.json`.

        Raises:
            ValueError: naming the architecture if it is not supported, or the field that is missing or unsupported.
        """
        architectures = hf.get("architectures") or []
        supported = [name for name in architectures if name in DECODER_FAMILIES]
        if not supported:
            raise ValueError(
                f"model architecture {', '.join(architectures) or hf.get('model_type', 'unknown')!r} is not supported; "
                f"supported: {', '.join(sorted(DECODER_FAMILIES))}"
            )
        architecture = supported[0]

        def need(name: str) -> Any:
            if hf.get(name) is None:
                raise ValueError(f"the model config of {architecture} lacks {name!r}")
            return hf[name]

        if hf.get("quantization_config") and not has_fp8_kv_cache(hf):
            raise ValueError(f"quantized checkpoints are not supported, got quantization_config {hf['quantization_config']!r}")
        bias = bool(hf.get("attention_bias", False))
        num_layers, num_heads = need("num_hidden_layers"), need("num_attention_heads")
        fields: dict[str, Any] = {
            "qkv_bias": bias,
            "attention_out_bias": bias,
            "mlp_bias": bool(hf.get("mlp_bias", False)),
            **DECODER_FAMILIES[architecture],
        }
        if hf.get("head_dim"):
            fields["head_dim"] = hf["head_dim"]
        elif "head_dim" not in fields:
            if need("hidden_size") % num_heads:
                raise ValueError(f"hidden_size {hf['hidden_size']} is no multiple of num_attention_heads {num_heads}")
            fields["head_dim"] = hf["hidden_size"] // num_heads
        return cls(
            architecture=architecture,
            vocab_size=need("vocab_size"),
            hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=hf.get("num_key_value_heads") or num_heads,
            max_position_embeddings=need("max_position_embeddings"),
            rms_norm_eps=float(need("rms_norm_eps")),
            rope=RopeConfig.from_hf(hf),
            hidden_act=hf.get("hidden_act", "silu"),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            sliding_windows=_sliding_windows(hf, architecture, num_layers),
            **fields,
        )


def has_fp8_kv_cache(hf: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is quantized for an fp8 KV cache and nothing else: plain weights, and scales for the cache.

    That is how compressed-tensors says so.
    """
    quantization = hf.get("quantization_config") or {}
    scheme = quantization.get("kv_cache_scheme") or {}
    kind = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    return not quantization.get("config_groups") and bool(scheme) and all(scheme.get(key) == kind[key] for key in kind)


def _sliding_windows(hf: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = hf.get("sliding_window")
    if architecture == "LlamaForCausalLM" or (architecture.startswith("Qwen") and not hf.get("use_sliding_window", False)):
        window = None
    if window is None:
        return (None,) * num_layers
    kinds = hf.get("layer_types")
    if kinds is None:
        # Qwen: the first max_window_layers layers see everything. Mistral: every layer slides.
        full = hf.get("max_window_layers", 28) if architecture.startswith("Qwen") else 0
        return tuple(None if layer < full else int(window) for layer in range(num_layers))
    for kind in kinds:
        check_choice("layer_types", kind, Literal["full_attention", "sliding_attention"])
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True)
class ModelConfig:
    """Which model, in which precision, up to which length.

    Attributes:
        model: what the user asked for.
        path: the folder or file that it resolved to.
        decoder: its shape.
        dtype: of weights and activations, and of the KV cache unless CacheConfig says otherwise.
        max_model_len: longest prompt plus output, tokens.
        eos_token_ids: the first ends a request; the others act as stop token ids.
        max_logprobs: most log probabilities a request may ask for; -1 for the whole vocabulary.
        seed: of weights with `load_format="dummy"` and of requests without a seed of their own.
        generation_defaults: sampling defaults that the model recommends (temperature, top_p, …).
    """

    model: str
    path: str
    decoder: DecoderConfig
    dtype: DType
    max_model_len: int
    tokenizer: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    seed: int = 0
    load_format: LoadFormat = "auto"
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DType)
        check_choice("logprobs_mode", self.logprobs_mode, LogprobsMode)
        check_choice("load_format", self.load_format, LoadFormat)
        check_at_least("max_model_len", self.max_model_len, 1)
        check_at_least("max_logprobs", self.max_logprobs, -1)
        check_at_least("seed", self.seed, 0)
        longest = self.decoder.rope.max_position(self.decoder.max_position_embeddings)
        if self.max_model_len > longest:
            raise ValueError(
                f"max_model_len {self.max_model_len} is greater than the {longest} positions that the model's config gives"
            )


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache.

    Attributes:
        block_size: tokens a block.
        gpu_memory_utilization: the share of a device's memory that weights, temporaries and KV cache may take together.
        kv_cache_memory_bytes: bytes of KV cache a device, instead of what `gpu_memory_utilization` leaves.
        num_gpu_blocks_override: number of blocks, instead of either.
        watermark: the share of the blocks that admission leaves free.
        cache_dtype: of the numbers kept; "auto" is the model's, "fp8" is "fp8_e4m3".
    """

    block_size: int = 32
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    watermark: float = 0.0
    cache_dtype: CacheDType = "auto"

    def __post_init__(self) -> None:
        check_at_least("block_size", self.block_size, 1)
        check_choice("kv_cache_dtype", self.cache_dtype, CacheDType)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark!r}")
        if self.kv_cache_memory_bytes is not None:
            check_at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        if self.num_gpu_blocks_override is not None:
            check_at_least("num_gpu_blocks_override", self.num_gpu_blocks_override, 2)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and the rules of admission.

    Attributes:
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens computed in a step.
        max_model_len: as in ModelConfig.
        policy: "fcfs", or "priority": lower (priority, arrival time) first, with preemption of the highest.
        long_prefill_token_threshold: most tokens of one request in a step when there are others; 0 for no limit.
        full_sequence_must_fit: admit a request only if all its known tokens fit in the free blocks, not just its first chunk.
        num_lookahead_tokens: slots allocated beyond the scheduled tokens, for drafts.
        async_scheduling: schedule and dispatch a step before the tokens of the one before it are on the host.
        num_decode_steps: most tokens of a request that one dispatch decodes, one after the other.
        max_itl: milliseconds between two outputs of a stream, which bound the steps of a dispatch; None for no bound.
        num_pipeline_stages: as pipeline_parallel_size in ParallelConfig.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    policy: SchedulingPolicy = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    full_sequence_must_fit: bool = True
    num_lookahead_tokens: int = 0
    async_scheduling: bool = True
    num_decode_steps: int = 1
    max_itl: float | None = None
    num_pipeline_stages: int = 1

    def __post_init__(self) -> None:
        check_at_least("num_decode_steps", self.num_decode_steps, 1)
        if self.max_itl is not None and not self.max_itl > 0:
            raise ValueError(f"max_itl must be a positive number of milliseconds, got {self.max_itl!r}")
        check_at_least("max_num_seqs", self.max_num_seqs, 1)
        check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_at_least("max_model_len", self.max_model_len, 1)
        check_choice("scheduling_policy", self.policy, SchedulingPolicy)
        check_at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        check_at_least("num_lookahead_tokens", self.num_lookahead_tokens, 0)
        check_at_least("pipeline_parallel_size", self.num_pipeline_stages, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs {self.max_num_seqs}"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens {self.max_num_batched_tokens} must be at least "
                f"max_model_len {self.max_model_len}"
            )
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold {self.long_prefill_token_threshold} is greater than "
                f"max_model_len {self.max_model_len}"
            )


@dataclass(frozen=True)
class EngineConfig:
    """All of it.

    Attributes:
        attention_backend: "auto" is "mosaic" on Hopper, "triton" on Ampere and Ada, "llvm" on a CPU with AVX-512, else
            "reference". A name is an order.
        matmul_backend: "auto" is "llvm" on a CPU with AVX-512, whose weights then lie as that wants them, else "xla".
        cudagraph_capture_sizes: sizes of decode buckets, in requests; None for a ladder up to max_num_seqs.
        compile_sizes: sizes of mixed buckets, in tokens; None for a ladder up to max_num_batched_tokens.
        compilation_cache_dir: where compiled steps are kept between runs; None for nowhere.
        compiled_dir: a folder made by `python -m jaxllm.build`: its programs are loaded, and none is ever compiled.
        background_compilation: serve as soon as the largest steps are compiled, and compile the smaller ones beside.
        log_stats: whether the engine counts and times its steps.
        stream_interval: tokens between two outputs of a stream; the first and the last always come at once.
        use_tqdm_on_load: show progress bars while the engine starts.
        max_num_queued_reqs: most unfinished requests that the engine takes; None for no limit.
        max_num_queued_tokens: most prompt tokens of requests that have given no output yet; None for no limit.
        profile_dir: folder for a trace of every step; None for none.
    """

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    attention_backend: str = "auto"
    matmul_backend: str = "auto"
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    compile_sizes: tuple[int, ...] | None = None
    compilation_cache_dir: str | None = None
    compiled_dir: str | None = None
    background_compilation: bool = True
    log_stats: bool = True
    stream_interval: int = 1
    use_tqdm_on_load: bool = False
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    profile_dir: str | None = None

    @property
    def kv_cache_dtype(self) -> str:
        """Of the KV cache's numbers: one of DType, or "float8_e4m3fn"."""
        if self.cache.cache_dtype == "auto":
            return self.model.dtype
        return "float8_e4m3fn" if self.cache.cache_dtype.startswith("fp8") else self.cache.cache_dtype

    def __post_init__(self) -> None:
        check_at_least("stream_interval", self.stream_interval, 1)
        num_stages, num_layers = self.parallel.pipeline_parallel_size, self.model.decoder.num_layers
        if num_stages > num_layers:
            raise ValueError(f"pipeline_parallel_size {num_stages} is greater than the model's {num_layers} layers")
        if self.parallel.data_parallel_routing == "prefix" and not self.cache.enable_prefix_caching:
            raise ValueError("data_parallel_routing 'prefix' needs enable_prefix_caching")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        if self.scheduler.num_decode_steps > 1 and num_stages > 1:
            # A stage could not start its second step before the last stage has ended its first.
            raise ValueError(
                f"num_decode_steps {self.scheduler.num_decode_steps} needs pipeline_parallel_size 1, got {num_stages}"
            )
        if self.scheduler.num_decode_steps > 1 and self.model.max_logprobs == -1:
            raise ValueError(
                f"num_decode_steps {self.scheduler.num_decode_steps} needs room on the device for the log probabilities of all "
                "steps: max_logprobs must not be -1"
            )
