"""Shapes of well-known models, as their public config.json has them, so that a plan needs no download."""

from typing import Any

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA_3_ROPE,
        "torch_dtype": "bfloat16",
        **more,
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        **more,
    }


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama(
        2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True, rope_scaling={**_LLAMA_3_ROPE, "factor": 32.0}
    ),
    "llama-3.2-3b": _llama(
        3072, 8192, 28, 24, 8, head_dim=128, tie_word_embeddings=True, rope_scaling={**_LLAMA_3_ROPE, "factor": 32.0}
    ),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8),
    "llama-3.3-70b": _llama(8192, 28672, 80, 64, 8),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
    },
}
