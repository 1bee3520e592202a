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
    # Ten tokens become a block of 128 for each device.
    assert (specs["embed.table"].axes, specs["embed.table"].shape) == (("vocab", None), (4 * 128, 8))


HEADS_OF_9_AND_3 = dataclasses.replace(TINY, num_heads=9, num_kv_heads=3)


@pytest.mark.parametrize(
    ("num_stripes", "heads"),
    [
        # Each device's query heads, and between bars its KV heads; "." is a zero head.
        (1, "0 1 2 3 4 5 6 7 8 | 0 1 2"),
        (2, "0 1 2 3 4 5 | 0 1 / 6 7 8 . . . | 2 ."),
        (3, "0 1 2 | 0 / 3 4 5 | 1 / 6 7 8 | 2"),
        (4, "0 1 2 | 0 / 3 4 5 | 1 / 6 7 8 | 2 / . . . | ."),
        (6, "0 1 | 0 / 2 . | 0 / 3 4 | 1 / 5 . | 1 / 6 7 | 2 / 8 . | 2"),
        (8, "0 1 | 0 / 2 . | 0 / 3 4 | 1 / 5 . | 1 / 6 7 | 2 / 8 . | 2 / . . | . / . . | ."),
        (9, "0 | 0 / 1 | 0 / 2 | 0 / 3 | 1 / 4 | 1 / 5 | 1 / 6 | 2 / 7 | 2 / 8 | 2"),
    ],
)
def test_heads_that_do_not_divide(num_stripes, heads):
    config, size = HEADS_OF_9_AND_3, TINY.head_dim
    specs = {spec.path: spec for spec in Decoder.param_specs(config, "float32", num_stripes)}
    name = "model.layers.0.self_attn"
    # Each head filled with its number, from 1 on: a zero head is 0.
    q, kv = (np.repeat(np.arange(1, count + 1), size) for count in (9, 3))
    qkv = {f"{name}.q_proj.weight": q, f"{name}.k_proj.weight": kv, f"{name}.v_proj.weight": kv + 100 * (kv > 0)}
    columns = {key: np.repeat(rows[:, None], config.hidden_size, 1) for key, rows in qkv.items()}
    packed = pack(specs["layers.0.attention.qkv.kernel"], columns)
    out = pack(specs["layers.0.attention.out.kernel"], {f"{name}.o_proj.weight": np.repeat(q[None], config.hidden_size, 0)})
    for array in (packed, out.T):
        assert (array == array[0]).all()
    found = packed[0].reshape(num_stripes, -1, size)[:, :, 0].astype(int)
    out_heads = out[:, 0].reshape(num_stripes, -1, size)[:, :, 0].astype(int)
    for device, expected in enumerate(heads.split(" / ")):
        q_heads, kv_heads = ([0 if head == "." else int(head) + 1 for head in part.split()] for part in expected.split("|"))
        value_heads = [head + 100 * (head > 0) for head in kv_heads]
        assert found[device].tolist() == q_heads + kv_heads + value_heads
        assert out_heads[device].tolist() == q_heads


def test_what_is_filled_up_is_told():
    config = dataclasses.replace(HEADS_OF_9_AND_3, intermediate_size=15, vocab_size=1024)
    assert Decoder.padding(config, 1) == ""
    assert Decoder.padding(config, 2) == "9 query heads to 12, 15 feed-forward columns to 16, 3 KV heads to 4"
    assert Decoder.padding(config, 8) == "9 query heads to 16, 15 feed-forward columns to 16, 6 KV heads, 2 copies of each, to 8"
    assert Decoder.padding(config, 3) == "1024 tokens of the vocabulary to 1152"


def test_fewer_than_one_device():
    with pytest.raises(ValueError, match="num_stripes must be at least 1, got 0"):
        Decoder.param_specs(TINY, "float32", 0)
    with pytest.raises(ValueError, match="num_stripes must be at least 1, got 0"):
        build_model_graph(TINY, "float32", kv_groups=KV_GROUPS, num_stripes=0)


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
