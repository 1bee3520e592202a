"""The real model on several devices against recorded outputs of Hugging Face transformers in float32."""

import json
from pathlib import Path

import pytest
from devices import need_devices

from jaxllm import LLM, SamplingParams

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]


@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 1), (2, 1), (1, 2), (4, 2)])
def test_golden_tokens(compiled, tensor, pipeline):
    need_devices(tensor * pipeline)
    path = Path(__file__).parents[1] / "data" / "golden" / "smollm2_f32.json"
    golden = json.loads(path.read_text())["items"]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with LLM(
        "smollm2-135m-instruct",
        dtype="float32",
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        cudagraph_capture_sizes=[],
        compile_sizes=[],
        compilation_cache_dir=compiled,
        use_tqdm_on_load=False,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": item["prompt_token_ids"]} for item in golden], params, use_tqdm=False)
    for item, output in zip(golden, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == item["output_token_ids"], item["prompt"]
