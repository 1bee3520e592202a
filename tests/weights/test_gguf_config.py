import math

import numpy as np
import pytest
from weight_files import H, K, M, finish, gguf_writer, tiny_tensors, write_gguf

from jaxllm.config import DecoderConfig, RopeConfig
from jaxllm.weights.gguf import GgufFile
from jaxllm.weights.gguf_config import generation_config, hf_config, llama3_divisors


def config_of(path, arch="llama", without=(), rope_freqs=None, **metadata):
    writer = gguf_writer(path / "m.gguf", arch, **metadata)
    for name in ("token_embd.weight", "output.weight"):
        if name not in without:
            writer.add_tensor(name, np.ones((40, M), np.float32))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs))
    finish(writer)
    return hf_config(GgufFile(path / "m.gguf"))


def test_llama(tmp_path):
    config = config_of(tmp_path, tokenizer__ggml__bos_token_id=1, tokenizer__ggml__eos_token_id=2)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 40,
        "hidden_size": M,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": H,
        "num_key_value_heads": K,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert DecoderConfig.from_hf(config).num_kv_heads == K


def test_what_may_be_missing(tmp_path):
    config = config_of(tmp_path, without=["output.weight"], **{"attention__head_count_kv": None, "rope__freq_base": None})
    assert config["tie_word_embeddings"]
    assert config["num_key_value_heads"] == H
    assert config["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    "key", ["embedding_length", "feed_forward_length", "block_count", "context_length", "attention__layer_norm_rms_epsilon"]
)
def test_what_must_be_there(tmp_path, key):
    with pytest.raises(ValueError, match=rf"m\.gguf: the metadata lacks llama\.{key.replace('__', '.')}"):
        config_of(tmp_path, **{key: None})


def test_embedding_must_be_there(tmp_path):
    with pytest.raises(ValueError, match=r"tensor token_embd\.weight is missing"):
        config_of(tmp_path, without=["token_embd.weight"])


@pytest.mark.parametrize(
    ("arch", "name"), [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_architectures(tmp_path, arch, name):
    config = config_of(tmp_path, arch, attention__key_length=24, attention__value_length=24, rope__dimension_count=24)
    decoder = DecoderConfig.from_hf(config)
    assert (decoder.architecture, decoder.head_dim) == (name, 24)
    assert decoder.qkv_bias == (arch == "qwen2")
    assert decoder.qk_norm == (arch == "qwen3")


def test_biases(tmp_path):
    write_gguf(tmp_path / "m.gguf", tiny_tensors())
    config = hf_config(GgufFile(tmp_path / "m.gguf"))
    assert config["attention_bias"]
    assert not config["mlp_bias"]
    tensors = {"model.embed_tokens.weight": np.ones((2, 32)), "model.layers.0.mlp.up_proj.bias": np.ones(32)}
    write_gguf(tmp_path / "m.gguf", tensors)
    config = hf_config(GgufFile(tmp_path / "m.gguf"))
    assert not config["attention_bias"]
    assert config["mlp_bias"]


@pytest.mark.parametrize(("quant", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_0", "bfloat16")])
def test_dtype(tmp_path, quant, dtype):
    write_gguf(tmp_path / "m.gguf", tiny_tensors(), quant)
    assert hf_config(GgufFile(tmp_path / "m.gguf"))["dtype"] == dtype


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_sliding_window(tmp_path, arch):
    assert DecoderConfig.from_hf(config_of(tmp_path, arch)).sliding_windows == (None,)
    config = config_of(tmp_path, arch, attention__sliding_window=32)
    assert DecoderConfig.from_hf(config).sliding_windows == (32,)


def test_layers_that_differ(tmp_path):
    assert config_of(tmp_path, feed_forward_length=[96, 96])["intermediate_size"] == 96
    with pytest.raises(ValueError, match=r"llama\.feed_forward_length differs between layers"):
        config_of(tmp_path, feed_forward_length=[96, 64])
    with pytest.raises(ValueError, match=r"llama\.attention\.head_count_kv differs between layers"):
        config_of(tmp_path, attention__head_count_kv=[2, 4])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention__scale", 0.5),
        ("logit_scale", 2.0),
        ("attention__clamp_kqv", 8.0),
        ("final_logit_softcapping", 30.0),
    ],
)
def test_refused(tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"llama\.{key.replace('__', '.')} = {value} is not supported"):
        config_of(tmp_path, **{key: value})
    config_of(tmp_path, expert_count=0)


def test_values_must_be_as_wide_as_keys(tmp_path):
    with pytest.raises(ValueError, match="value_length 8 differs from the key length 16"):
        config_of(tmp_path, attention__value_length=8)


def test_partial_rotary(tmp_path):
    config = config_of(tmp_path, rope__dimension_count=8)
    assert config["partial_rotary_factor"] == 0.5
    with pytest.raises(ValueError, match=r"partial_rotary_factor 0\.5 is not supported"):
        DecoderConfig.from_hf(config)


class TestRope:
    def rope(self, path, **metadata):
        return RopeConfig.from_hf(config_of(path, **metadata))

    def test_none(self, tmp_path):
        assert self.rope(tmp_path, rope__scaling__type="none") == RopeConfig()
        assert self.rope(tmp_path, rope__freq_base=500000.0) == RopeConfig(theta=500000.0)

    def test_linear(self, tmp_path):
        expected = RopeConfig(type="linear", factor=2.5)
        assert self.rope(tmp_path, rope__scaling__type="linear", rope__scaling__factor=2.5) == expected
        assert self.rope(tmp_path, rope__scale_linear=2.5) == expected
        with pytest.raises(ValueError, match="rope scaling 'linear' without a factor"):
            self.rope(tmp_path, rope__scaling__type="linear")

    def test_yarn(self, tmp_path):
        metadata = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
        assert self.rope(tmp_path, **metadata) == RopeConfig(type="yarn", factor=4.0, original_max_position=64)
        rope = self.rope(tmp_path, **metadata, rope__scaling__yarn_beta_fast=16.0, rope__scaling__yarn_beta_slow=2.0)
        assert (rope.beta_fast, rope.beta_slow) == (16.0, 2.0)
        # Hugging Face's attention factor is the whole of it, the file's is on top of 0.1 ln(factor) + 1.
        rope = self.rope(tmp_path, **metadata, rope__scaling__attn_factor=0.5)
        assert rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
        with pytest.raises(ValueError, match="yarn_ext_factor"):
            self.rope(tmp_path, **metadata, rope__scaling__yarn_ext_factor=0.5)

    def test_refused(self, tmp_path):
        with pytest.raises(ValueError, match="rope scaling 'longrope' is not supported"):
            self.rope(tmp_path, rope__scaling__type="longrope", rope__scaling__factor=2.0)
        with pytest.raises(ValueError, match=r"attn_factor 0\.5 with rope scaling 'linear'"):
            self.rope(tmp_path, rope__scaling__type="linear", rope__scaling__factor=2.0, rope__scaling__attn_factor=0.5)

    def test_divisors_by_hand(self):
        # Frequencies 1, 0.1, 0.01, 0.001 turn 200, 20, 2, 0.2 times in 400 pi tokens; between 4 turns and 1 it goes over:
        # smooth = (2 - 1) / 3, 1 / ((2/3) / 8 + 1/3) = 2.4.
        found = llama3_divisors(10000.0, 8, 8.0, 400 * math.pi)
        assert found == pytest.approx([1.0, 1.0, 2.4, 8.0])

    @pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
    def test_llama3(self, tmp_path, factor, original):
        divisors = llama3_divisors(500000.0, 64, factor, original).astype(np.float32)
        metadata = {"rope__freq_base": 500000.0, "attention__key_length": 64, "attention__value_length": 64}
        expected = RopeConfig(theta=500000.0, type="llama3", factor=factor, original_max_position=original)
        assert self.rope(tmp_path, rope_freqs=divisors, **metadata) == expected
        metadata["rope__scaling__original_context_length"] = original
        assert self.rope(tmp_path, rope_freqs=divisors, **metadata) == expected

    def test_divisors_of_another_kind(self, tmp_path):
        assert self.rope(tmp_path, rope_freqs=np.ones(8, np.float32)) == RopeConfig()
        with pytest.raises(ValueError, match="divisors as such are not supported"):
            self.rope(tmp_path, rope_freqs=np.linspace(1, 3, 8, dtype=np.float32))
        with pytest.raises(ValueError, match=r"rope_freqs\.weight has shape \(4,\), expected \(8,\)"):
            self.rope(tmp_path, rope_freqs=np.ones(4, np.float32))
        with pytest.raises(ValueError, match=r"rope_freqs\.weight must be F32"):
            self.rope(tmp_path, rope_freqs=np.ones(8, np.float16))
        with pytest.raises(ValueError, match="together with rope scaling 'yarn'"):
            self.rope(tmp_path, rope_freqs=np.ones(8, np.float32), rope__scaling__type="yarn", rope__scaling__factor=2.0)


def test_generation_config(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        {"model.embed_tokens.weight": np.ones((2, 32))},
        tokenizer__ggml__bos_token_id=5,
        tokenizer__ggml__eos_token_id=7,
        tokenizer__ggml__eot_token_id=9,
        tokenizer__ggml__eom_token_id=7,
        tokenizer__ggml__padding_token_id=3,
        general__sampling__temp=0.6,
        general__sampling__top_k=20,
    )
    assert generation_config(GgufFile(path)) == {
        "bos_token_id": 5,
        "eos_token_id": [7, 9],
        "pad_token_id": 3,
        "temperature": 0.6,
        "top_k": 20,
    }
