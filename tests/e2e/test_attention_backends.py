"""The engine with the GPU's kernels in the interpreter, and with the CPU's, gives what it gives with the reference."""

import json

import pytest

from jaxllm import LLM, SamplingParams
from kernels_pallas.llvm.library import unavailable_reason as llvm_unavailable_reason
from kernels_pallas.triton_call import unavailable_reason

CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "sliding_window": 20,
    "layer_types": ["full_attention", "sliding_attention"],
}
PROMPTS = [list(range(3, 40)), [7, 8, 9]]


def generate(folder, backend, kv_cache_dtype="auto"):
    llm = LLM(
        str(folder), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, compilation_cache_dir="",
        use_tqdm_on_load=False, attention_backend=backend, block_size=16, num_gpu_blocks_override=24, max_num_seqs=2,
        max_num_batched_tokens=24, cudagraph_capture_sizes=[], compile_sizes=[], kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    try:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    finally:
        llm.shutdown()
    return [output.outputs[0] for output in outputs]


TRITON = [pytest.mark.slow, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]
LLVM = pytest.mark.skipif(llvm_unavailable_reason("bfloat16") is not None, reason=str(llvm_unavailable_reason("bfloat16")))


@pytest.mark.parametrize(
    ("backend", "kv_cache_dtype"),
    [
        ("mosaic", "auto"),
        pytest.param("llvm", "auto", marks=[pytest.mark.slow, LLVM]),
        pytest.param("mosaic", "fp8", marks=pytest.mark.slow),
        pytest.param("triton", "auto", marks=TRITON),
        pytest.param("triton", "fp8", marks=TRITON),
    ],
)
def test_kernels_give_the_tokens_of_the_reference(tmp_path, backend, kv_cache_dtype):
    """A prompt in two chunks beside a decode, then decodes: both kernels, with and without a window."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    expected, found = (generate(tmp_path, name, kv_cache_dtype) for name in ("reference", backend))
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    for output, same in zip(found, expected, strict=True):
        assert output.cumulative_logprob == pytest.approx(same.cumulative_logprob, abs=0.1)
