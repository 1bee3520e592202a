"""A Hugging Face config from the metadata of a GGUF file."""

import math
from typing import Any

import numpy as np

from jaxllm.weights.gguf import ROPE_FREQS, GgufFile

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Metadata that would change what the model computes, and that these architectures' code here does not know.
_REFUSED = (
    *("expert_count", "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"),
    *("attention.sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping"),
    *("logit_scale", "residual_scale", "embedding_scale", "rope.scaling.yarn_log_multiplier"),
)
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
# By the number of the ggml type.
_MODEL_DTYPES = {0: "float32", 1: "float16"}
# The trained lengths that llama3 rope scaling has been used with.
_LLAMA3_LENGTHS = (8192, 4096, 16384, 32768, 2048)


def hf_config(file: GgufFile) -> dict[str, Any]:
    """What the model's config.json would say.

    Raises:
        ValueError: naming the file and the metadata key that is missing or has a value that is not supported.
    """
    architecture = file.architecture

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.{key}", default)

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise ValueError(f"{file.path}: the metadata lacks {architecture}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"{file.path}: {architecture}.{key} differs between layers, which is not supported")
            return value[0]
        return value

    for key in _REFUSED:
        if get(key):
            raise ValueError(f"{file.path}: {architecture}.{key} = {get(key)!r} is not supported")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: tensor token_embd.weight is missing")
    num_heads = need("attention.head_count")
    head_dim = get("attention.key_length") or need("embedding_length") // num_heads
    if get("attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"{file.path}: {architecture}.attention.value_length {get('attention.value_length')} differs from "
            f"the key length {head_dim}, which is not supported"
        )
    config = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": need("attention.head_count_kv") if get("attention.head_count_kv") else num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(get("rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(".attn_" in name and name.endswith(".bias") for name in file.tensors),
        "mlp_bias": any(".ffn_" in name and name.endswith(".bias") for name in file.tensors),
        "dtype": _model_dtype(file),
        **_token_ids(file),
    }
    rotary_dim = get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    scaling = _rope_scaling(file, config["rope_theta"], head_dim)
    if scaling:
        config["rope_scaling"] = scaling
    if get("attention.sliding_window"):
        config["sliding_window"] = get("attention.sliding_window")
        if architecture == "llama":
            # GGUF calls Mistral's models "llama" too; of the two, only Mistral's have a window.
            config["architectures"] = ["MistralForCausalLM"]
        else:
            config |= {"use_sliding_window": True, "max_window_layers": 0}
    return config


def generation_config(file: GgufFile) -> dict[str, Any]:
    """What the model's generation_config.json would say: special token ids, and sampling defaults if the file has any."""
    sampling = {
        name: _shortest(value) if isinstance(value, float) else value
        for key, name in _SAMPLING.items()
        if (value := file.metadata.get(f"general.sampling.{key}")) is not None
    }
    config = _token_ids(file)
    # End of turn and end of message end a reply just as the end of the text does.
    ends = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(token for token in ends if token is not None))
    if len(ids) > 1:
        config["eos_token_id"] = ids
    return config | sampling


def _token_ids(file: GgufFile) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: token for name, token in ids.items() if token is not None}


def _shortest(value: float) -> float:
    """The decimal that was meant by a float32: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _model_dtype(file: GgufFile) -> str:
    """The type to compute in: that of most of the weights, bfloat16 where they are quantized."""
    sizes: dict[int, int] = {}
    for info in file.tensors.values():
        sizes[info.type_id] = sizes.get(info.type_id, 0) + math.prod(info.shape)
    return _MODEL_DTYPES.get(max(sizes, key=lambda type_id: sizes[type_id]), "bfloat16")


def _rope_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    def get(key: str) -> Any:
        return file.metadata.get(f"{file.architecture}.rope.{key}")

    kind = get("scaling.type") or ("linear" if get("scale_linear") else "none")
    factor = get("scaling.factor") or get("scale_linear")
    original = get("scaling.original_context_length")
    attn_factor = get("scaling.attn_factor") or get("scaling.yarn_attn_factor") or 1.0
    if attn_factor != 1.0 and kind != "yarn":
        raise ValueError(f"{file.path}: rope.scaling.attn_factor {attn_factor} with rope scaling {kind!r} is not supported")
    if ROPE_FREQS in file.tensors:
        if kind != "none":
            raise ValueError(f"{file.path}: {ROPE_FREQS} together with rope scaling {kind!r} is not supported")
        return _llama3_scaling(file, theta, head_dim, original)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{file.path}: rope scaling {kind!r} is not supported")
    if not factor:
        raise ValueError(f"{file.path}: rope scaling {kind!r} without a factor")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest(factor)}
    if kind == "yarn":
        if original:
            scaling["original_max_position_embeddings"] = original
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if get(f"scaling.{key}"):
                scaling[name] = _shortest(get(f"scaling.{key}"))
        if get("scaling.yarn_ext_factor") not in (None, 1.0):
            raise ValueError(f"{file.path}: rope.scaling.yarn_ext_factor {get('scaling.yarn_ext_factor')} is not supported")
        if attn_factor != 1.0:
            # The file's factor multiplies yarn's own; Hugging Face's takes its place.
            scaling["attention_factor"] = _shortest(attn_factor) * (1.0 + 0.1 * math.log(factor))
    return scaling


def llama3_divisors(theta: float, head_dim: int, factor: float, original: int, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """By how much llama3 rope scaling divides each frequency, [D/2] float64: 1 for those that turn at least `high` times
    within `original` tokens, `factor` for those that turn at most `low` times, in between from one to the other.

    Source: Llama 3.1's reference code (`apply_scaling`).
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = original * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int, original: int | None) -> dict[str, Any] | None:
    """The parameters of which the divisors in the file were made; it keeps only the divisors."""
    divisors = file.float_tensor(ROPE_FREQS)
    if divisors.shape != (head_dim // 2,):
        raise ValueError(f"{file.path}: {ROPE_FREQS} has shape {divisors.shape}, expected ({head_dim // 2},)")
    if np.all(divisors == 1.0):
        return None
    factor = _shortest(divisors.max())
    for length in (original,) if original else _LLAMA3_LENGTHS:
        if factor >= 1.0 and np.allclose(llama3_divisors(theta, head_dim, factor, length), divisors, rtol=1e-4, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": length,
            }
    raise ValueError(
        f"{file.path}: the frequency divisors in {ROPE_FREQS} are not those of llama3 rope scaling with low and high frequency "
        "factors 1 and 4, and divisors as such are not supported"
    )
