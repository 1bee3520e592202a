"""The arithmetic of `jaxllm.plan`, on a model and a device with round numbers."""

import dataclasses

import pytest

from jaxllm.config import CacheConfig, DecoderConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxllm.models.graph import build_model_graph
from jaxllm.parallel_config import ParallelConfig
from jaxllm.plan.known_models import KNOWN_MODELS
from jaxllm.plan.roofline import Roofline
from kernels_pallas.aot import TARGETS

# Two layers of qkv 8x16, out 8x8, gate and up 8x32, down 16x8, and a head of 256x8, which two devices share without padding.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LAYERS = 2 * (8 * 16 + 8 * 8 + 8 * 32 + 16 * 8)
HEAD = 256 * 8
# A byte a second, an operation a second.
SLOW = dataclasses.replace(TARGETS["h200"], memory_bandwidth=1.0, bf16_flops=1.0, link_bandwidth=1.0)
WIDE = dataclasses.replace(SLOW, bf16_flops=1e12)
QUICK = dataclasses.replace(SLOW, memory_bandwidth=1e12)


def roofline(
    target=SLOW, devices: int = 1, hf=TINY, dtype: str = "bfloat16", cache: CacheConfig | None = None, **fields
) -> Roofline:
    decoder = dataclasses.replace(DecoderConfig.from_hf(hf), **fields)
    config = EngineConfig(
        model=ModelConfig("tiny", "", decoder, dtype, 64),
        cache=cache or CacheConfig(),
        scheduler=SchedulerConfig(max_model_len=64),
        parallel=ParallelConfig(devices),
    )
    groups = [(0, layer) for layer in range(decoder.num_layers)]
    graph = build_model_graph(decoder, dtype, kv_groups=groups, num_stripes=devices)
    return Roofline.of(config, graph.specs, target)


def test_what_a_step_reads_and_computes():
    r = roofline()
    assert r.weight_bytes == 2 * (LAYERS + HEAD)  # not the embedding, of which a step reads a row a token
    assert (r.layer_flops, r.head_flops) == (2 * LAYERS, 2 * HEAD)
    assert r.kv_bytes == 2 * 2 * 2 * 2 * 2  # layers, K and V, heads, head size, bytes
    assert r.attention_flops == 2 * 4 * 4 * 2  # layers, two multiply-adds, heads, head size


def test_devices_share_the_work():
    r = roofline(devices=2)
    assert r.weight_bytes == LAYERS + HEAD
    assert (r.layer_flops, r.head_flops, r.kv_bytes) == (LAYERS, HEAD, 16)
    # Two sums a layer: of 8 values of 2 bytes, half of them out and half back.
    assert r._exchange(3) == 2 * 2 * 3 * 16


def test_more_devices_than_kv_heads_repeat_them():
    assert roofline(devices=4).kv_bytes == roofline(devices=2).kv_bytes


def test_an_fp8_cache_halves_what_attention_reads():
    assert roofline(cache=CacheConfig(cache_dtype="fp8")).kv_bytes == roofline().kv_bytes / 2
    assert roofline(dtype="float32", cache=CacheConfig(cache_dtype="bfloat16")).kv_bytes == roofline().kv_bytes


def test_tied_embeddings_are_the_head():
    assert roofline(tie_word_embeddings=True).weight_bytes == roofline().weight_bytes


def test_decode_is_bound_by_bytes_or_by_operations():
    # Three rows with 10 tokens each: the weights once, and 30 tokens of cache.
    assert roofline(WIDE).decode_seconds(3, 10) == pytest.approx(2 * (LAYERS + HEAD) + 30 * 32)
    assert roofline(QUICK).decode_seconds(3, 10) == pytest.approx(3 * (2 * LAYERS + 2 * HEAD) + 30 * 64)


def test_a_window_limits_what_is_read():
    r = roofline(WIDE, sliding_windows=(4, None))
    assert r.decode_seconds(1, 10) == pytest.approx(2 * (LAYERS + HEAD) + (4 + 10) / 2 * 32)
    # Four queries see 1, 2, 2, 2 keys in one layer and 1, 2, 3, 4 in the other; each layer does 32 operations a pair.
    r = roofline(QUICK, sliding_windows=(2, None))
    assert r.prefill_seconds(4) == pytest.approx(4 * 2 * LAYERS + 2 * HEAD + (7 + 10) * 32)


def test_saturation_is_where_both_bounds_meet():
    r = roofline(dataclasses.replace(SLOW, bf16_flops=100.0))
    assert r.saturation_rows == pytest.approx(100)  # a weight of 2 bytes takes 2 operations
    below, above = (r._products(rows, rows) for rows in (99, 101))
    assert below == r.weight_bytes
    assert above > r.weight_bytes


def test_float32_does_not_use_the_tensor_cores():
    assert roofline(TARGETS["h200"], dtype="float32").peak_flops == pytest.approx(66.9e12, rel=0.01)


@pytest.mark.parametrize("name", sorted(KNOWN_MODELS))
def test_known_models_are_supported(name: str):
    DecoderConfig.from_hf(KNOWN_MODELS[name])


def test_known_sizes():
    # From the models' names: parameters of Llama 3.1 8B without its embedding, 7.5 thousand million.
    r = roofline(TARGETS["h200"], hf=KNOWN_MODELS["llama-3.1-8b"])
    assert r.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert r.kv_bytes == 128 * 1024
    # A step of one request reads all of it: 3.1 ms at 4.8 TB/s.
    assert r.decode_seconds(1, 1024) == pytest.approx(3.15e-3, rel=0.02)
