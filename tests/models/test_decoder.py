"""Decoder, every family and flag, against a plain NumPy decoder; and the same results however the tokens are fed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpy_decoder
import pytest
from model_helpers import Runner

from jaxllm.config import DecoderConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig, make_kv_cache_groups
from jaxllm.layers.attention import AttentionMetadata
from jaxllm.models.decoder import Decoder
from jaxllm.models.graph import build_model_graph

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}


def qwen(name):
    return {"architectures": [f"{name}ForCausalLM"]}


def rope(kind, **fields):
    return {"rope_scaling": {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16, **fields}}


VARIANTS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads as heads": {"num_key_value_heads": 4},
    "heads of their own size": {"head_dim": 14},
    "gelu": {"hidden_act": "gelu"},
    "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "qwen2": qwen("Qwen2"),
    "qwen2 with windows": {**qwen("Qwen2"), "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {**qwen("Qwen3"), "tie_word_embeddings": True},
    "linear rope": rope("linear"),
    "dynamic rope": rope("dynamic"),
    "llama3 rope": rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn rope": rope("yarn", beta_fast=4.0),
    "yarn rope with scales": rope("yarn", beta_fast=4.0, mscale=1.2, mscale_all_dim=0.7, truncate=False),
    "yarn rope with a factor": rope("yarn", attention_factor=1.5),
}


def random_tensors(config, seed=0):
    """Random tensors under the names that the model asks for; norms near 1."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for spec in Decoder.param_specs(config, "float32"):
        for part in spec.parts:
            value = rng.standard_normal(part.shape)
            tensors[part.name] = (1 + 0.2 * value if "norm" in part.name else 0.25 * value).astype(np.float32)
    return tensors


def groups_of(config, block_size=4):
    groups = make_kv_cache_groups(Decoder.kv_cache_specs(config, block_size, "float32"))
    return KVCacheConfig(num_blocks=1, groups=groups).array_of_layer()


def make_runner(config, tensors, **options):
    return Runner(config, tensors, block_size=4, max_len=40, kv_groups=groups_of(config), **options)


def prompts_of(config, lengths, seed=5):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]


def check(found, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=2e-5 * scale, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_of_prompts_then_mixed_steps(variant):
    """Row by row the logits of the NumPy decoder: two prompts at once, then a decode beside a chunk, then decodes alone."""
    config = DecoderConfig.from_hf({**TINY, **VARIANTS[variant]})
    tensors = random_tensors(config)
    runner = make_runner(config, tensors, num_rows=3)
    long, short, late = prompts_of(config, (21, 9, 12))
    expected = {
        name: numpy_decoder.logits(config, tensors, ids) for name, ids in (("long", long), ("short", short), ("late", late))
    }
    out = runner.logits(runner.run([long[:19], short[:7]], num_tokens=32))
    check(out, np.concatenate([expected["long"][:19], expected["short"][:7]]))
    out = runner.logits(runner.run([long[19:20], short[7:8], late[:11]], num_tokens=32))
    check(out, np.concatenate([expected["long"][19:20], expected["short"][7:8], expected["late"][:11]]))
    out = runner.logits(runner.run([long[20:], short[8:], late[11:]], decode_only=True))
    check(out, np.stack([expected["long"][20], expected["short"][8], expected["late"][11]]))


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2 with windows"])
def test_any_way_of_feeding_gives_the_same(variant):
    config = DecoderConfig.from_hf({**TINY, **VARIANTS[variant]})
    tensors = random_tensors(config)
    (ids,) = prompts_of(config, (20,))
    expected = numpy_decoder.logits(config, tensors, ids)
    runner = make_runner(config, tensors, num_rows=2)
    for size in (1, 3, 20):
        runner.reset()
        outs = [runner.run([ids[start : start + size]], num_tokens=24) for start in range(0, len(ids), size)]
        check(runner.logits(jnp.concatenate(outs)), expected)
    runner.reset()
    check(runner.logits(jnp.concatenate([runner.run([[token]], decode_only=True)[:1] for token in ids])), expected)


def test_bfloat16_is_near():
    config = DecoderConfig.from_hf({**TINY, **VARIANTS["qwen3"]})
    tensors = random_tensors(config)
    (ids,) = prompts_of(config, (18,))
    runner = make_runner(config, tensors, dtype="bfloat16", num_rows=1)
    out = runner.logits(runner.run([ids]))
    expected = numpy_decoder.logits(config, tensors, ids)
    assert out.dtype == jnp.float32
    assert np.abs(out - expected).max() < 0.05 * np.abs(expected).max()


def test_padding_tokens_change_nothing():
    config = DecoderConfig.from_hf(TINY)
    tensors = random_tensors(config)
    (ids,) = prompts_of(config, (10,))
    tight, loose = (make_runner(config, tensors, num_rows=2) for _ in range(2))
    np.testing.assert_allclose(tight.run([ids]), loose.run([ids], num_tokens=40), atol=1e-5)
    for a, b in zip(tight.caches, loose.caches, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_layers_of_one_structure_are_lowered_once_and_caches_updated_in_place():
    config = DecoderConfig.from_hf({**TINY, "num_hidden_layers": 8})
    runner = Runner(config, random_tensors(config), num_rows=64, max_len=64)
    captured = []
    run = runner.step
    runner.step = lambda *arguments: captured.append(arguments) or run(*arguments)
    runner.run([[1, 2, 3]], num_tokens=8)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), captured[0])
    lowered = run.lower(*shapes)
    assert len(re.findall(r"func\.func private @_run_layer\w*\(", lowered.as_text())) == 1
    memory = lowered.compile().memory_analysis()
    cache_bytes = sum(cache.nbytes for cache in runner.caches)
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 4


def test_groups_use_their_own_block_tables():
    """Full attention and windows interleaved: two groups share arrays, and their blocks do not overlap."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    hf = {**TINY, **qwen("Qwen2"), "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 3, "layer_types": kinds}
    config = DecoderConfig.from_hf(hf)
    assert groups_of(config) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    tensors = random_tensors(config)
    runner = make_runner(config, tensors, num_rows=2)
    assert len(runner.caches) == 2
    (ids,) = prompts_of(config, (15,))
    check(runner.logits(runner.run([ids])), numpy_decoder.logits(config, tensors, ids))


def test_wrong_kv_groups_are_refused():
    config = DecoderConfig.from_hf(TINY)
    with pytest.raises(ValueError, match="kv_groups has 2 entries for 3 layers"):
        Decoder(config, jnp.float32, kv_groups=[(0, 0), (0, 1)])


def test_one_row_of_bfloat16_converts_no_weight():
    """XLA:CPU would copy every weight to float32: ten times slower than two rows."""
    config = DecoderConfig.from_hf({**TINY, "hidden_size": 128, "intermediate_size": 512, "vocab_size": 4000})
    graph = build_model_graph(config, "bfloat16", kv_groups=groups_of(config))
    weights = [jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16) for spec in graph.specs]
    shapes = {"positions": (1,), "slot_mapping": (1, 1), "block_tables": (1, 1, 4), "seq_lens": (1,), "query_start_loc": (2,)}
    integers = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    metadata = AttentionMetadata(**integers, num_decodes=jax.ShapeDtypeStruct((), jnp.int32), decode_only=True)
    caches = (jax.ShapeDtypeStruct((9, 2, 2, 4, 8), jnp.bfloat16),) * 3

    def step(weights, token_ids, caches, metadata):
        model = graph.bind(weights)
        hidden, caches = model(token_ids, caches, metadata)
        return model.compute_logits(hidden), caches

    compiled = jax.jit(step, donate_argnums=2).lower(weights, integers["positions"], caches, metadata).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 128 * 512 * 4
