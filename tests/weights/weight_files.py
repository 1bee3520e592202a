"""A tiny model of the Llama family as a checkpoint of every kind, and its parameters put together the slow, plain way."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxllm.layers.spec import ParamSpec, Part

M, H, K, D, F, V = 64, 4, 2, 16, 96, 40
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": M,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "head_dim": D,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SHAPES = {
    "model.embed_tokens.weight": (V, M),
    "model.layers.0.input_layernorm.weight": (M,),
    "model.layers.0.self_attn.q_proj.weight": (H * D, M),
    "model.layers.0.self_attn.k_proj.weight": (K * D, M),
    "model.layers.0.self_attn.v_proj.weight": (K * D, M),
    "model.layers.0.self_attn.q_proj.bias": (H * D,),
    "model.layers.0.self_attn.k_proj.bias": (K * D,),
    "model.layers.0.self_attn.v_proj.bias": (K * D,),
    "model.layers.0.self_attn.o_proj.weight": (M, H * D),
    "model.layers.0.post_attention_layernorm.weight": (M,),
    "model.layers.0.mlp.gate_proj.weight": (F, M),
    "model.layers.0.mlp.up_proj.weight": (F, M),
    "model.layers.0.mlp.down_proj.weight": (M, F),
    "model.norm.weight": (M,),
    "lm_head.weight": (V, M),
}
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_tensors(dtype: str = "float32") -> dict[str, np.ndarray]:
    """Hugging Face name → values, each number of the model different where the dtype allows."""
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return {name: rng.standard_normal(shape, dtype=np.float32).astype(kind) for name, shape in SHAPES.items()}


def tiny_specs(dtype: str = "float32", num_stripes: int = 1) -> list[ParamSpec]:
    """One layer's parameters; with more stripes than KV heads, the KV heads are repeated to fill them."""
    layer = "model.layers.0"
    repeat = max(num_stripes // K, 1)

    def attention(kind: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        names = [f"{layer}.self_attn.{name}_proj.{kind}" for name in "qkv"]
        return (
            Part(names[0], (H * D, *shape)),
            *(Part(name, (K * D, *shape), repeat=repeat, repeat_size=D if repeat > 1 else 1) for name in names[1:]),
        )

    width = (H + 2 * K * repeat) * D
    return [
        ParamSpec("embed.weight", (V, M), dtype, ("vocab", None), (Part("model.embed_tokens.weight", (V, M)),)),
        _vector("norm_in", f"{layer}.input_layernorm.weight", dtype),
        ParamSpec("qkv.kernel", (M, width), dtype, (None, "heads"), attention("weight", (M,)), True, num_stripes),
        ParamSpec("qkv.bias", (width,), dtype, ("heads",), attention("bias", ()), False, num_stripes),
        ParamSpec("o.kernel", (H * D, M), dtype, ("heads", None), (Part(f"{layer}.self_attn.o_proj.weight", (M, H * D)),), True),
        _vector("norm_post", f"{layer}.post_attention_layernorm.weight", dtype),
        ParamSpec(
            "gate_up.kernel",
            (M, 2 * F),
            dtype,
            (None, "mlp"),
            tuple(Part(f"{layer}.mlp.{name}_proj.weight", (F, M)) for name in ("gate", "up")),
            True,
            num_stripes,
        ),
        ParamSpec("down.kernel", (F, M), dtype, ("mlp", None), (Part(f"{layer}.mlp.down_proj.weight", (M, F)),), True),
        _vector("norm", "model.norm.weight", dtype),
        ParamSpec("lm_head.kernel", (M, V), dtype, (None, "vocab"), (Part("lm_head.weight", (V, M)),), True),
    ]


def _vector(path: str, name: str, dtype: str) -> ParamSpec:
    return ParamSpec(path, (M,), dtype, (None,), (Part(name, (M,)),))


def plain_param(spec: ParamSpec, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """The parameter in float32, by whole-array steps in the order of ParamSpec's description."""
    arrays = []
    for part in spec.parts:
        values = np.asarray(tensors[part.name]).astype(np.float32)
        values = np.moveaxis(values, part.axis, 0)
        size = part.repeat_size if part.repeat > 1 or part.group_padding else len(values)
        zeros = [np.zeros((count, *values.shape[1:]), np.float32) for count in (part.group_padding, part.padding)]
        groups = [values[at : at + size] for at in range(0, len(values), size)]
        values = np.concatenate([block for group in groups for block in [*[group] * part.repeat, zeros[0]]] + zeros[1:])
        values = np.moveaxis(values, 0, part.axis)
        arrays.append(values.T if spec.transpose else values)
    stripes = [np.split(values, spec.num_stripes, axis=-1) for values in arrays]
    return np.concatenate([part[i] for i in range(spec.num_stripes) for part in stripes], axis=-1)


def write_safetensors(folder: Path, tensors: Mapping[str, np.ndarray], *, num_files: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    if num_files == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {}
    for file in range(num_files):
        name = f"model-{file + 1:05d}-of-{num_files:05d}.safetensors"
        shard = dict(list(tensors.items())[file::num_files])
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, module, kind = name.replace("self_attn.", "self_attn-").replace("mlp.", "mlp-").split(".")
    return f"blk.{layer}.{GGUF_NAMES[module.replace('-', '.')]}.{kind}"


def gguf_writer(path: Path, arch: str = "llama", **metadata: object) -> gguf.GGUFWriter:
    """A writer with the metadata of the tiny model; `metadata` overrides keys (dots as "__"), None leaves one out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    values: dict[str, object] = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": M,
        "feed_forward_length": F,
        "attention.head_count": H,
        "attention.head_count_kv": K,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    values |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in values.items():
        name = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's conversion does to q and k: the two rotary halves of a head, row by row."""
    return values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path, tensors: Mapping[str, np.ndarray], quant: str = "F32", *, arch: str = "llama", **metadata: object
) -> Path:
    """Matrices in the type `quant`, vectors in F32; q and k interleaved if the architecture is llama."""
    writer = gguf_writer(path, arch, **metadata)
    kind = gguf.GGMLQuantizationType[quant]
    for name, values in tensors.items():
        values = np.asarray(values).astype(np.float32)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleave(values, H if "q_proj" in name else K)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            data = gguf.quantize(values, kind)
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    finish(writer)
    return path


def num_elements(tensors: Mapping[str, np.ndarray]) -> int:
    return sum(math.prod(values.shape) for values in tensors.values())


def run_python(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, on the CPU, that finds the project and this folder."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1]), str(here)])
    env = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **env}
    return subprocess.run([sys.executable, *map(str, args)], env=env, capture_output=True, text=True, check=False)
