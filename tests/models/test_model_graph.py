"""Parameters and how they get into a model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import SMOLLM2, pack

from jaxllm.config import DECODER_FAMILIES, DecoderConfig, RopeConfig
from jaxllm.core.kv_cache_interface import KVCacheSpec
from jaxllm.layers.spec import ParamSpec, Part
from jaxllm.models.decoder import Decoder
from jaxllm.models.graph import build_model_graph
from jaxllm.models.registry import MODELS, model_class

TINY = DecoderConfig("LlamaForCausalLM", 10, 8, 12, 2, 4, 2, 6, 32, 1e-5, RopeConfig())
KV_GROUPS = [(0, 0), (0, 1)]
FULL = dataclasses.replace(TINY, qkv_bias=True, attention_out_bias=True, mlp_bias=True, qk_norm=True)


def test_every_supported_architecture_has_a_class():
    assert set(MODELS) == set(DECODER_FAMILIES)
    assert model_class("Qwen3ForCausalLM") is Decoder


def test_an_unknown_architecture_is_refused_by_name():
    with pytest.raises(ValueError, match="'MambaForCausalLM' is not supported; supported: LlamaForCausalLM, Mistral"):
        model_class("MambaForCausalLM")


def test_specs_of_a_layer():
    specs = {spec.path: spec for spec in Decoder.param_specs(TINY, "bfloat16")}
    assert list(specs)[:8] == [
        "embed.table",
        "layers.0.attention_norm.scale",
        "layers.0.attention.qkv.kernel",
        "layers.0.attention.out.kernel",
        "layers.0.mlp_norm.scale",
        "layers.0.mlp.gate_up.kernel",
        "layers.0.mlp.down.kernel",
        "layers.1.attention_norm.scale",
    ]
    assert list(specs)[-2:] == ["norm.scale", "lm_head.table"]
    assert specs["layers.0.attention.qkv.kernel"] == ParamSpec(
        path="layers.0.attention.qkv.kernel",
        shape=(8, 48),
        dtype="bfloat16",
        axes=(None, "heads"),
        parts=(
            Part("model.layers.0.self_attn.q_proj.weight", (24, 8)),
            Part("model.layers.0.self_attn.k_proj.weight", (12, 8)),
            Part("model.layers.0.self_attn.v_proj.weight", (12, 8)),
        ),
        transpose=True,
    )


def test_each_checkpoint_tensor_is_used_once():
    names = [part.name for spec in Decoder.param_specs(FULL, "float32") for part in spec.parts]
    assert len(names) == len(set(names)) == 3 + 2 * (2 + 3 * 2 + 2 + 2 + 3 * 2)


def test_the_number_of_parameters_is_that_of_the_real_model():
    specs = Decoder.param_specs(SMOLLM2, "float32")
    assert sum(int(np.prod(spec.shape)) for spec in specs) == 134_515_008


def test_ignored_tensors():
    assert any("inv_freq" in pattern for pattern in Decoder.ignored_tensors(TINY))
    assert not any("lm_head" in pattern for pattern in Decoder.ignored_tensors(TINY))
    assert any("lm_head" in pattern for pattern in Decoder.ignored_tensors(dataclasses.replace(TINY, tie_word_embeddings=True)))


def test_kv_cache_specs():
    config = dataclasses.replace(TINY, sliding_windows=(None, 16))
    assert Decoder.kv_cache_specs(config, 32, "bfloat16") == [KVCacheSpec(32, 2, 6, 2), KVCacheSpec(32, 2, 6, 2, 16)]
    assert Decoder.kv_cache_specs(config, 32, "float32", num_stripes=4)[0] == KVCacheSpec(32, 4, 6, 4)


def test_four_devices_repeat_two_kv_heads():
    specs = {spec.path: spec for spec in Decoder.param_specs(FULL, "float32", num_stripes=4)}
    kernel = specs["layers.1.attention.qkv.kernel"]
    assert kernel.shape == (8, (4 + 2 * 4) * 6)
    assert (kernel.num_stripes, kernel.parts[1].repeat, kernel.parts[1].repeat_size) == (4, 2, 6)
    heads = np.repeat(np.arange(2), 6)
    name = "model.layers.1.self_attn"
    packed = pack(
        specs["layers.1.attention.qkv.bias"],
        {
            f"{name}.q_proj.bias": np.repeat(np.arange(4), 6) * 100,
            f"{name}.k_proj.bias": heads,
            f"{name}.v_proj.bias": heads + 10,
        },
    )
    expected = [[0, 0, 10], [100, 0, 10], [200, 1, 11], [300, 1, 11]]
    np.testing.assert_array_equal(packed.reshape(4, 3, 6)[:, :, 0], expected)
    # Ten tokens cannot be shared by four.
    assert specs["embed.table"].axes == (None, None)
    assert Decoder.param_specs(FULL, "float32", num_stripes=2)[0].axes == ("vocab", None)


@pytest.mark.parametrize(
    ("config", "num_stripes", "message"),
    [
        (TINY, 3, "num_heads 4 cannot be shared evenly by 3"),
        (TINY, 0, "num_stripes must be at least 1, got 0"),
        (dataclasses.replace(TINY, intermediate_size=15), 2, "intermediate_size 15"),
        (dataclasses.replace(TINY, num_heads=12, num_kv_heads=6), 4, "num_kv_heads 6 is neither"),
    ],
)
def test_uneven_shares_are_refused(config, num_stripes, message):
    with pytest.raises(ValueError, match=message):
        Decoder.param_specs(config, "float32", num_stripes)
    with pytest.raises(ValueError, match=message):
        build_model_graph(config, "float32", kv_groups=KV_GROUPS, num_stripes=num_stripes)


@pytest.mark.parametrize("config", [TINY, FULL, dataclasses.replace(FULL, tie_word_embeddings=True)])
def test_weights_arrive_where_their_specs_say(config):
    """Each weight filled with its own number comes back from the module at its path, more than ten layers included."""
    config = dataclasses.replace(config, num_layers=12, sliding_windows=())
    graph = build_model_graph(config, "float32", kv_groups=[(0, layer) for layer in range(12)])
    model = graph.bind([jnp.full(spec.shape, number, spec.dtype) for number, spec in enumerate(graph.specs)])
    for number, spec in enumerate(graph.specs):
        part = model
        for key in spec.path.split("."):
            part = part[int(key)] if key.isdigit() else getattr(part, key)
        np.testing.assert_array_equal(part[...], np.full(spec.shape, number))


def test_nothing_is_allocated_for_a_big_model():
    config = dataclasses.replace(TINY, vocab_size=2**20, hidden_size=2**14, num_heads=128, head_dim=128)
    graph = build_model_graph(config, "bfloat16", kv_groups=KV_GROUPS)
    assert sum(int(np.prod(spec.shape)) for spec in graph.specs) > 2**35


def test_wrong_weights_are_refused():
    graph = build_model_graph(TINY, "float32", kv_groups=KV_GROUPS)
    weights = [jax.ShapeDtypeStruct(spec.shape, jnp.float32) for spec in graph.specs]
    with pytest.raises(ValueError, match=r"the model has 15 parameters, got 14 weights"):
        graph.bind(weights[:-1])
    with pytest.raises(ValueError, match=r"embed.table must be float32 \(10, 8\), got float32 \(8, 10\)"):
        graph.bind([jax.ShapeDtypeStruct((8, 10), jnp.float32), *weights[1:]])
    with pytest.raises(ValueError, match="got bfloat16"):
        graph.bind([jax.ShapeDtypeStruct((10, 8), jnp.bfloat16), *weights[1:]])
