"""Reading Hugging Face configs: shapes of real models, in the form that transformers 4 writes and in that of transformers 5."""

import dataclasses

import pytest

from jaxllm.config import DecoderConfig, RopeConfig

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
MISTRAL_7B_V1 = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN_2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MODELS = [LLAMA_2_7B, LLAMA_3_2_1B, SMOLLM2_135M, MISTRAL_7B_V1, QWEN_2_5_7B, QWEN_3_0_6B]


def as_transformers_5(hf):
    """The same config as transformers 5 saves it: all of rope in rope_parameters, layer types spelled out."""
    hf = dict(hf)
    scaling = dict(hf.pop("rope_scaling", None) or {"rope_type": "default"})
    hf["rope_parameters"] = {"rope_theta": hf.pop("rope_theta", 10000.0), **scaling}
    if hf["architectures"] != ["MistralForCausalLM"]:
        hf["layer_types"] = ["full_attention"] * hf["num_hidden_layers"]
    hf["dtype"] = "bfloat16"
    return hf


@pytest.mark.parametrize("hf", MODELS, ids=lambda hf: f"{hf['architectures'][0]}-{hf['hidden_size']}")
def test_both_forms_of_a_config_are_the_same_model(hf):
    assert DecoderConfig.from_hf(hf) == DecoderConfig.from_hf(as_transformers_5(hf))


def test_llama_2():
    assert DecoderConfig.from_hf(LLAMA_2_7B) == DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        hidden_act="silu",
        tie_word_embeddings=False,
        sliding_windows=(None,) * 32,
    )


def test_llama_3_2():
    config = DecoderConfig.from_hf(LLAMA_3_2_1B)
    assert (config.head_dim, config.num_kv_heads, config.tie_word_embeddings) == (64, 8, True)
    assert config.rope == RopeConfig(
        theta=500000.0, type="llama3", factor=32.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert config.rope.max_position(config.max_position_embeddings) == 131072


def test_smollm2():
    config = DecoderConfig.from_hf(SMOLLM2_135M)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rope) == (9, 3, 64, RopeConfig(theta=100000.0))
    assert not config.qkv_bias


def test_mistral_slides_in_every_layer_unless_its_window_is_null():
    assert DecoderConfig.from_hf(MISTRAL_7B_V1).sliding_windows == (4096,) * 32
    assert DecoderConfig.from_hf({**MISTRAL_7B_V1, "sliding_window": None}).sliding_windows == (None,) * 32


def test_qwen_2_5_has_biases_on_qkv_alone_and_no_window():
    config = DecoderConfig.from_hf(QWEN_2_5_7B)
    assert (config.qkv_bias, config.attention_out_bias, config.mlp_bias, config.qk_norm) == (True, False, False, False)
    assert config.sliding_windows == (None,) * 28


def test_qwen_windows_begin_after_max_window_layers():
    small = {**QWEN_2_5_7B, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 3}
    assert DecoderConfig.from_hf(small).sliding_windows == (None, None, None, 128)
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert DecoderConfig.from_hf({**small, "layer_types": kinds}).sliding_windows == (128, None, None, 128)


def test_qwen_3_has_norms_of_q_and_k_and_a_head_size_of_its_own():
    config = DecoderConfig.from_hf(QWEN_3_0_6B)
    assert (config.qk_norm, config.qkv_bias, config.head_dim) == (True, False, 128)
    without = {name: value for name, value in QWEN_3_0_6B.items() if name != "head_dim"}
    assert DecoderConfig.from_hf(without).head_dim == 128


def test_a_window_in_a_llama_config_means_nothing():
    assert DecoderConfig.from_hf({**LLAMA_2_7B, "sliding_window": 64}).sliding_windows == (None,) * 32


def test_attention_bias_of_llama_is_on_all_four_products():
    config = DecoderConfig.from_hf({**LLAMA_2_7B, "attention_bias": True, "mlp_bias": True})
    assert (config.qkv_bias, config.attention_out_bias, config.mlp_bias) == (True, True, True)


def test_yarn_as_qwen_2_5_documents_it():
    hf = {**QWEN_2_5_7B, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    config = DecoderConfig.from_hf(hf)
    assert config.rope == RopeConfig(theta=1e6, type="yarn", factor=4.0, original_max_position=32768)
    assert config.rope.max_position(config.max_position_embeddings) == 131072


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths():
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8192}
    assert DecoderConfig.from_hf({**QWEN_2_5_7B, "rope_scaling": scaling}).rope.factor == 4.0


def test_linear_and_dynamic_lengthen_the_context():
    for kind in ("linear", "dynamic"):
        config = DecoderConfig.from_hf({**LLAMA_2_7B, "rope_scaling": {"type": kind, "factor": 2.0}})
        assert config.rope.type == kind
        assert config.rope.max_position(config.max_position_embeddings) == 8192


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba' is not supported"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "at least 1, got 0.5"),
        ({"hidden_act": "relu"}, "hidden_act.*'relu'"),
        ({"num_attention_heads": 30}, "hidden_size 4096 is no multiple of num_attention_heads 30"),
        ({"num_key_value_heads": 5}, "32 is no multiple of num_key_value_heads 5"),
        ({"head_dim": 63}, "even.*63"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps.*-1.0"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_hidden_layers": 0}, "num_layers.*0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf({**LLAMA_2_7B, **change})


def test_windows_are_checked():
    config = DecoderConfig.from_hf(LLAMA_2_7B)
    with pytest.raises(ValueError, match="at least 1"):
        dataclasses.replace(config, sliding_windows=(0,) * 32)
    with pytest.raises(ValueError, match="2 sliding windows for 32 layers"):
        dataclasses.replace(config, sliding_windows=(8, 8))
