"""An fp8 KV cache on several devices: each has the scales of its own heads, repeated and filled up as these are."""

import json

import numpy as np
import pytest
from devices import need_devices
from safetensors.numpy import save_file
from tiny import TINY

from jaxllm import LLM, SamplingParams
from jaxllm.config import DecoderConfig
from jaxllm.layers.spec import ScalePart
from jaxllm.models.decoder import Decoder

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]

PROMPTS = [list(range(5, 40)), [7, 8, 9, 10], [*range(5, 30), 50, 60]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Each head's values are of another size, and fit the cache with its own scale alone."""
    folder, rng = tmp_path_factory.mktemp("scaled"), np.random.default_rng(0)
    sizes = np.float32([1e-4, 1.0, 1e4])
    tensors = {}
    for spec in Decoder.param_specs(DecoderConfig.from_hf(TINY), "float32", fp8_cache=True):
        for part in spec.parts:
            if isinstance(part, ScalePart):
                tensors[part.name] = sizes / 20 if "v_scale" in part.name else np.float32([0.01, 0.02, 0.05])
            elif len(part.shape) == 1:
                tensors[part.name] = (np.zeros if part.name.endswith("bias") else np.ones)(part.shape, np.float32)
            else:
                tensors[part.name] = rng.standard_normal(part.shape, np.float32) * np.float32(0.1)
                if "v_proj" in part.name:
                    tensors[part.name] *= np.repeat(sizes, 16)[:, None]
                elif "o_proj" in part.name:
                    tensors[part.name] /= np.repeat(sizes, 48)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


def logprobs(checkpoint: str, compiled: str, **kwargs) -> np.ndarray:
    """Of the prompts."""
    llm = LLM(
        checkpoint, dtype="float32", skip_tokenizer_init=True, compilation_cache_dir=compiled, use_tqdm_on_load=False,
        cudagraph_capture_sizes=[], compile_sizes=[], max_num_seqs=4, max_num_batched_tokens=24, block_size=4,
        num_gpu_blocks_override=64, max_model_len=128, **kwargs,
    )  # fmt: skip
    try:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    finally:
        llm.shutdown()
    return np.array(
        [
            entry[token].logprob
            for output, prompt in zip(outputs, PROMPTS, strict=True)
            for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )


def test_devices_give_what_one_gives(checkpoint, compiled):
    """Two devices fill three KV heads up to four, eight have copies of them; stages have scales of their own layers."""
    need_devices(8)
    exact = logprobs(checkpoint, compiled)
    expected = logprobs(checkpoint, compiled, kv_cache_dtype="fp8")
    assert 0 < np.abs(expected - exact).max() < 0.5
    for parallel in ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 8}, {"pipeline_parallel_size": 2}):
        found = logprobs(checkpoint, compiled, kv_cache_dtype="fp8", **parallel)
        # A sum in another order can round a number of the cache the other way.
        np.testing.assert_allclose(found, expected, atol=0.05, err_msg=str(parallel))
