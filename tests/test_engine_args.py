import json
import logging

import pytest

from jaxllm.engine import engine_args
from jaxllm.engine.cli_args import ArgumentParser, add_engine_args, engine_args_of
from jaxllm.engine.engine_args import EngineArgs, default_batch_sizes, detect_platform
from jaxllm.engine.headless import headless_config
from jaxllm.engine.machine_wire import comparable

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": [7, 8],
}


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    generation = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [8, 9], "max_new_tokens": 33, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return str(tmp_path)


def make(model: str, **kwargs):
    return EngineArgs.from_kwargs(model=model, **{"load_format": "dummy", **kwargs}).create_engine_config()


def test_defaults(model):
    config = make(model)
    assert config.model.dtype == "float32"
    assert config.model.max_model_len == 512
    assert config.model.eos_token_ids == (7, 8, 9)
    assert config.model.generation_defaults == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 33}
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (128, 512)
    assert config.cache.block_size == 32
    assert config.scheduler.full_sequence_must_fit


def test_generation_config(model, tmp_path_factory):
    assert make(model, generation_config="vllm").model.generation_defaults == {}
    override = make(model, override_generation_config={"temperature": 0.1}).model.generation_defaults
    assert override["temperature"] == 0.1
    other = tmp_path_factory.mktemp("other")
    (other / "config.json").write_text(json.dumps(CONFIG))
    (other / "generation_config.json").write_text('{"top_k": 5}')
    assert make(model, generation_config=str(other)).model.generation_defaults == {"top_k": 5}


def test_unknown_argument_names_the_nearest(model):
    with pytest.raises(TypeError, match="unknown argument 'max_num_seq'; did you mean 'max_num_seqs'"):
        make(model, max_num_seq=3)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_model_len": 513}, "max_model_len 513 is greater than the 512"),
        ({"max_model_len": 0}, "max_model_len must be an integer of at least 1, got 0"),
        ({"dtype": "int8"}, "dtype must be one of .* got 'int8'"),
        ({"load_format": "pt"}, "load_format must be one of .* got 'pt'"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be in .* got 1.5"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"scheduling_policy": "random"}, "scheduling_policy must be one of 'fcfs', 'priority', got 'random'"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens 32 must be at least max_num_seqs 64"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}, "without chunked prefill"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override must be an integer of at least 2, got 1"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\), got 1.0"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode must be one of"),
        ({"max_logprobs": -2}, "max_logprobs must be an integer of at least -1, got -2"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1, got 0"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer of at least 1, got 0"),
        ({"pipeline_parallel_size": 99}, "pipeline_parallel_size 99 is greater than the model's [0-9]+ layers"),
        (
            {"pipeline_parallel_size": 4, "devices_per_worker": 2, "distributed_executor_backend": "mp"},
            "devices_per_worker 2 does not divide tensor_parallel_size 1",
        ),
        ({"enable_expert_parallel": True}, "enable_expert_parallel needs a model with experts; [A-Za-z0-9]+ has none"),
        ({"compile_sizes": [0]}, "compile_sizes must be an integer of at least 1, got 0"),
        ({"hf_overrides": {"architectures": ["GPT2LMHeadModel"]}}, "architecture 'GPT2LMHeadModel' is not supported"),
    ],
)
def test_wrong_values_are_named(model, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(model, **kwargs)


def test_limits_follow_each_other(model):
    assert make(model, max_num_batched_tokens=16).scheduler.max_num_seqs == 16
    small = make(model, max_num_seqs=2, max_model_len=100)
    assert small.scheduler.max_num_batched_tokens == 200
    whole = make(model, enable_chunked_prefill=False, max_num_seqs=8)
    assert whole.scheduler.max_num_batched_tokens >= 512


def test_bucket_sizes_end_at_the_limits(model):
    config = make(model, max_num_seqs=24, cudagraph_capture_sizes=[8, 64, 1], compile_sizes=[128])
    assert config.cudagraph_capture_sizes == (1, 8, 24)
    assert config.compile_sizes == (128, 512)


def test_enforce_eager_is_noted(model, caplog):
    with caplog.at_level(logging.INFO):
        make(model, enforce_eager=True)
    assert "enforce_eager has no effect" in caplog.text


def test_engines_on_headless_machines(model, caplog):
    given = {"data_parallel_size": 4, "data_parallel_address": "10.0.0.1", "data_parallel_rpc_port": 5000}
    parallel = make(model, data_parallel_size_local=1, **given).parallel
    assert (parallel.data_parallel_size, parallel.num_local_engines, parallel.data_parallel_start_rank) == (4, 1, 0)
    assert (parallel.data_parallel_address, parallel.data_parallel_rpc_port) == ("10.0.0.1", 5000)
    assert not parallel.has_one_engine
    one = make(model, data_parallel_size_local=0).parallel
    assert (one.data_parallel_size, one.num_local_engines, one.has_one_engine) == (1, 0, False)
    assert (one.data_parallel_address, one.data_parallel_rpc_port) == ("127.0.0.1", 29550)
    # As the other machine makes it.
    args = EngineArgs(model=model, load_format="dummy", data_parallel_size_local=3, data_parallel_start_rank=1, **given)
    assert comparable(headless_config(args)) == comparable(make(model, data_parallel_size_local=1, **given))
    assert headless_config(args).parallel.data_parallel_address == "10.0.0.1"
    assert caplog.text == ""
    assert make(model, **given).parallel.num_local_engines == 4
    assert make(model, data_parallel_rank=3, data_parallel_size=4).parallel.num_local_engines == 1
    for name in ("data_parallel_address", "data_parallel_rpc_port"):
        assert f"{name} has no effect: no engine of this server is on a headless machine" in caplog.text
    for wrong, message in (
        ({"data_parallel_rpc_port": 0}, r"data_parallel_rpc_port must be in \[1, 65535\], got 0"),
        ({"data_parallel_backend": "ray"}, "data_parallel_size_local 1 needs data_parallel_backend 'mp', got 'ray'"),
        ({"nnodes": 2}, "nnodes 2 needs one engine"),
    ):
        with pytest.raises(ValueError, match=message):
            make(model, **{**given, "data_parallel_size_local": 1, **wrong})


def test_platform(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert detect_platform() == "cuda"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert detect_platform() == "cpu"


def test_batch_sizes_by_device(monkeypatch):
    monkeypatch.setattr(engine_args, "_device_names", lambda: ["NVIDIA H200"])
    assert default_batch_sizes("cuda", "llm") == (16384, 1024)
    assert default_batch_sizes("cuda", "server") == (8192, 1024)
    monkeypatch.setattr(engine_args, "_device_names", lambda: ["NVIDIA A100-SXM4-80GB"])
    assert default_batch_sizes("cuda", "server") == (2048, 256)


def test_dtype_on_a_gpu(model, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert make(model).model.dtype == "bfloat16"
    assert make(model, hf_overrides={"torch_dtype": "float32"}).model.dtype == "bfloat16"
    assert make(model, dtype="half").model.dtype == "float16"


def test_cache_folder(model, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert make(model).compilation_cache_dir == str(tmp_path / "jaxllm" / "compiled")
    assert make(model, compilation_cache_dir="").compilation_cache_dir is None


def test_flags_of_scheduling_and_profiling(model):
    parser = ArgumentParser()
    add_engine_args(parser)
    flags = ["--no-async-scheduling", "--num-decode-steps", "4", "--max-itl", "37.5", "--profile", "traces"]
    args = engine_args_of(parser.parse_args(["--model", model, "--load-format", "dummy", *flags]))
    config = args.create_engine_config()
    scheduler = config.scheduler
    assert (scheduler.async_scheduling, scheduler.num_decode_steps, scheduler.max_itl) == (False, 4, 37.5)
    assert config.profile_dir == "traces"
    default = make(model)
    assert (default.scheduler.async_scheduling, default.scheduler.num_decode_steps, default.profile_dir) == (True, 1, None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_decode_steps": 0}, "num_decode_steps must be an integer of at least 1, got 0"),
        ({"max_itl": 0.0}, "max_itl must be a positive number of milliseconds, got 0.0"),
        ({"num_decode_steps": 2, "max_logprobs": -1}, "max_logprobs must not be -1"),
    ],
)
def test_wrong_multi_step_arguments(model, wrong, message):
    with pytest.raises(ValueError, match=message):
        make(model, **wrong)


KV_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}


def quantized(**fields) -> dict:
    return {
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": KV_SCHEME, **fields}
    }


@pytest.mark.parametrize(
    ("kv_cache_dtype", "expected"),
    [("auto", "bfloat16"), ("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("float16", "float16")],
)
def test_the_type_of_the_kv_cache(model, kv_cache_dtype, expected):
    assert make(model, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype).kv_cache_dtype == expected


def test_a_checkpoint_for_an_fp8_kv_cache_gets_one(model):
    overrides = quantized()
    assert make(model, hf_overrides=overrides).kv_cache_dtype == "float8_e4m3fn"
    assert make(model, hf_overrides=overrides, kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize(
    "fields",
    [{"config_groups": {"group_0": {}}}, {"kv_cache_scheme": None}, {"kv_cache_scheme": {**KV_SCHEME, "num_bits": 4}}],
)
def test_other_quantized_checkpoints_are_refused(model, fields):
    with pytest.raises(ValueError, match="quantized checkpoints are not supported"):
        make(model, hf_overrides=quantized(**fields))


@pytest.mark.parametrize("value", ["fp8_e5m2", "int8", "float8_e4m3fn", ""])
def test_other_types_of_the_kv_cache_are_refused(model, value):
    with pytest.raises(ValueError, match=f"kv_cache_dtype must be one of 'auto', .*'fp8_e4m3', got '{value}'"):
        make(model, kv_cache_dtype=value)
