"""Shapes of well-known models, so that a simulation needs no files."""

import json
from pathlib import Path
from typing import Any

from jaxllm.config import DecoderConfig


def _hf(
    architecture: str, vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, longest: int, **more: Any
):
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-5,
        **more,
    }


MODELS = {
    "llama-3.1-8b": _hf("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 131072),
    "llama-3.1-70b": _hf("LlamaForCausalLM", 128256, 8192, 28672, 80, 64, 8, 131072),
    "llama-3.2-1b": _hf("LlamaForCausalLM", 128256, 2048, 8192, 16, 32, 8, 131072, tie_word_embeddings=True),
    "qwen3-8b": _hf("Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, 40960),
    "smollm2-135m": _hf("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 8192, tie_word_embeddings=True),
}


def model_shape(name: str) -> DecoderConfig:
    """A known model's shape, or that of a Hugging Face `config.json` or the folder that it lies in.

    Raises:
        ValueError: naming the model, if it is neither.
    """
    if name in MODELS:
        return DecoderConfig.from_hf(MODELS[name])
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        return DecoderConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        raise ValueError(f"--model-shape must be one of {', '.join(MODELS)}, or a config.json, got {name!r}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"--model-shape {name}: no JSON: {error}") from error
