"""The engine with a KV cache of 8-bit numbers: close to float32, with the checkpoint's scales, and in a quarter of the memory."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_configs import LAYERS_2

from jaxllm import LLM, SamplingParams
from jaxllm.config import DecoderConfig
from jaxllm.layers.spec import ScalePart
from jaxllm.models.decoder import Decoder

PROMPTS = [list(range(3, 40)), [7, 8, 9], [*range(3, 30), 50, 60]]
K_SCALE, V_SCALE = 0.02, 0.004


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights so small that keys and values without scales would be rounded to nothing."""
    folder = tmp_path_factory.mktemp("scaled")
    rng = np.random.default_rng(0)
    tensors = {}
    for spec in Decoder.param_specs(DecoderConfig.from_hf(LAYERS_2), "float32", fp8_cache=True):
        for part in spec.parts:
            if isinstance(part, ScalePart):
                name = part.other_names[0] if part.name.startswith("model.layers.1.") else part.name
                tensors[name] = np.full(() if name == part.name else (1,), K_SCALE if "k_scale" in name else V_SCALE, np.float32)
            elif len(part.shape) == 1:
                tensors[part.name] = np.ones(part.shape, np.float32)
            else:
                tensors[part.name] = rng.standard_normal(part.shape).astype(np.float32) * np.float32(0.1)
                if "v_proj" in part.name:
                    tensors[part.name] *= np.float32(2e-3)
                elif "o_proj" in part.name:
                    tensors[part.name] *= np.float32(500)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LAYERS_2))
    return str(folder)


def make(checkpoint: str, compiled: str, **kwargs) -> LLM:
    return LLM(
        checkpoint, dtype="float32", skip_tokenizer_init=True, compilation_cache_dir=compiled, use_tqdm_on_load=False,
        cudagraph_capture_sizes=[], compile_sizes=[], max_num_seqs=4, max_num_batched_tokens=24, block_size=4,
        kv_cache_memory_bytes=2**20, **kwargs,
    )  # fmt: skip


def generate(llm: LLM, prompt_logprobs: int | None = 0):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=prompt_logprobs)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)


def prompt_logprobs(outputs) -> np.ndarray:
    return np.array(
        [
            entry[token].logprob
            for output, prompt in zip(outputs, PROMPTS, strict=True)
            for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )


def worker_of(llm: LLM):
    return llm.engine.engine_core.engine_core.executor.worker


def test_close_to_float32_in_a_quarter_of_the_memory(checkpoint, compiled):
    plain = make(checkpoint, compiled)
    try:
        expected, plain_blocks = prompt_logprobs(generate(plain)), worker_of(plain).kv_cache_config.num_blocks
    finally:
        plain.shutdown()
    small = make(checkpoint, compiled, kv_cache_dtype="fp8")
    try:
        first, again = generate(small), generate(small, prompt_logprobs=None)
        worker = worker_of(small)
        assert worker.kv_cache_config.num_blocks == 4 * plain_blocks
        scales = [
            np.asarray(weight) for weight, spec in zip(worker.weights, worker.specs, strict=True) if "kv_scale" in spec.path
        ]
    finally:
        small.shutdown()
    np.testing.assert_array_equal(scales, np.float32([[K_SCALE, K_SCALE, V_SCALE, V_SCALE]] * 2))
    found = prompt_logprobs(first)
    assert 0 < np.abs(found - expected).max() < 0.15
    # The second time most of the prompts come from the prefix cache, which those with log probabilities do not.
    assert again[0].num_cached_tokens > 0
    assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in first]


@pytest.mark.slow
def test_without_the_scales_nothing_of_the_values_is_left(checkpoint, compiled, tmp_path):
    """That the scales matter: without them the smallest numbers of the cache are too large for these values."""
    from safetensors.numpy import load_file

    tensors = {name: value for name, value in load_file(f"{checkpoint}/model.safetensors").items() if "scale" not in name}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LAYERS_2))
    outputs = []
    for folder in (checkpoint, str(tmp_path)):
        llm = make(folder, compiled, kv_cache_dtype="fp8_e4m3")
        try:
            outputs.append(prompt_logprobs(generate(llm)))
        finally:
            llm.shutdown()
    assert np.abs(outputs[0] - outputs[1]).max() > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("value", ["bfloat16", "float16"])
def test_caches_of_sixteen_bits(checkpoint, compiled, value):
    outputs = []
    for dtype in ("float32", value):
        llm = make(checkpoint, compiled, kv_cache_dtype=dtype)
        try:
            outputs.append(prompt_logprobs(generate(llm)))
        finally:
            llm.shutdown()
    assert 0 < np.abs(outputs[0] - outputs[1]).max() < 0.02
