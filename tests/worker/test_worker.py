"""The worker's start: memory plan, compiled programs, errors."""

import json

import numpy as np
import pytest

from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.worker import worker as worker_module
from jaxllm.worker.kv_cache import check_num_blocks, num_blocks_in
from jaxllm.worker.worker import Worker

SPEC = KVCacheSpec(block_size=4, num_kv_heads=2, head_dim=8, itemsize=4)
CONFIG = KVCacheConfig(2, (KVCacheGroup((0, 1, 2), SPEC),))
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def make_worker(folder: str, **kwargs) -> Worker:
    args = EngineArgs(
        folder, load_format="dummy", max_num_seqs=4, max_num_batched_tokens=16, compilation_cache_dir="",
        use_tqdm_on_load=False, cudagraph_capture_sizes=[4], **kwargs,
    )  # fmt: skip
    worker = Worker(args.create_engine_config())
    worker.init_device()
    worker.load_model()
    return worker


def test_blocks_in_a_budget():
    # 3 layers x 2 planes x 2 heads x 4 tokens x 8 x 4 bytes
    assert CONFIG.block_bytes == 1536
    assert num_blocks_in(1536 * 20 + 1000, CONFIG, 1, max_model_len=64) == 20
    assert num_blocks_in(1536 * 20, CONFIG, 2, max_model_len=64) == 40
    with pytest.raises(ValueError, match="one request of max_model_len 64 needs 17 blocks"):
        num_blocks_in(1536 * 16, CONFIG, 1, max_model_len=64)
    with pytest.raises(ValueError, match="num_gpu_blocks_override is 5"):
        check_num_blocks(5, CONFIG, 64, "num_gpu_blocks_override is 5")


def test_override(folder):
    worker = make_worker(folder, num_gpu_blocks_override=40)
    config = worker.determine_available_memory()
    assert config.num_blocks == 40
    # Two kinds of layers share the arrays: groups of the size of the smaller kind.
    assert [group.layers for group in config.groups] == [(0,), (2,), (1,)]
    assert config.num_arrays == 1


def test_bytes(folder):
    worker = make_worker(folder, kv_cache_memory_bytes=MIB, block_size=16)
    assert worker.determine_available_memory().num_blocks == MIB // (2 * 2 * 16 * 8 * 4)


def test_budget_counts_weights_and_temporaries(folder, monkeypatch):
    worker = make_worker(folder, block_size=16, gpu_memory_utilization=0.5)
    total = 2 * 12 * MIB
    monkeypatch.setattr(worker_module.psutil, "virtual_memory", lambda: type("Memory", (), {"total": total}))
    num_blocks = worker.determine_available_memory().num_blocks
    blocks = num_blocks * worker.kv_cache_config.block_bytes
    step = worker._largest_step_bytes()
    fixed = total // 2 - blocks - step - sum(weight.nbytes for weight in worker.weights)
    assert 0 <= fixed < 4 * MIB  # the request rows
    assert step > 0


def test_cache_and_rows_are_updated_in_place(folder):
    worker = make_worker(folder, num_gpu_blocks_override=400)
    config = worker.determine_available_memory()
    worker.init_kv_cache()
    runner = worker.runner
    state_bytes = sum(leaf.nbytes for leaf in __import__("jax").tree.leaves(runner.state))
    cache_bytes = config.num_blocks * config.block_bytes
    for bucket in runner.buckets:
        analysis = runner.compile(bucket).memory_analysis()
        assert analysis.alias_size_in_bytes == cache_bytes + state_bytes
        assert analysis.temp_size_in_bytes < cache_bytes / 2


def test_more_devices_than_there_are(folder):
    args = EngineArgs(folder, load_format="dummy", tensor_parallel_size=64)
    with pytest.raises(ValueError, match="tensor_parallel_size 64 needs 64 devices"):
        Worker(args.create_engine_config()).init_device()


def test_load_format_must_fit(tmp_path, folder):
    config = EngineArgs("smollm2-135m-instruct", load_format="safetensors", max_model_len=64).create_engine_config()
    worker = Worker(config)
    worker.init_device()
    with pytest.raises(ValueError, match="load_format is 'safetensors'"):
        worker.load_model()


def test_kv_cache_starts_as_zeros(folder):
    worker = make_worker(folder, num_gpu_blocks_override=40)
    worker.determine_available_memory()
    worker.init_kv_cache()
    assert not any(np.asarray(cache).any() for cache in worker.runner.kv_caches)
