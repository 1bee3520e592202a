"""Compiled steps of a pipeline in a folder to ship."""

from pathlib import Path

import jax
import pytest
from devices import need_devices

from jaxllm import LLM, EngineArgs, SamplingParams
from jaxllm.build import build
from jaxllm.worker.pipeline_runner import PipelineRunner

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]


def test_a_pipeline_finds_the_programs_of_all_stages(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_devices(2)
    args = {
        "load_format": "dummy", "skip_tokenizer_init": True, "use_tqdm_on_load": False, "dtype": "float32", "block_size": 4,
        "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 8, "num_gpu_blocks_override": 36,
        "cudagraph_capture_sizes": [], "compile_sizes": [], "pipeline_parallel_size": 2,
    }  # fmt: skip
    folder = build(EngineArgs(tiny_model, **args), str(tmp_path)).parent
    assert len(list(folder.glob("*.program"))) == 4
    jax.clear_caches()  # as in another process

    def lower(self: PipelineRunner, *args: object) -> None:
        raise AssertionError(f"{args} is compiled")

    monkeypatch.setattr(PipelineRunner, "_lower_stage", lower)
    with LLM(tiny_model, **args, compiled_dir=str(folder)) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        assert len(llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0].token_ids) == 4
        assert llm.collective_rpc("num_compiles_after_warm_up") == [0]
    with pytest.raises(ValueError, match=r"stage 1: built for .*range\(2, 3\).*, here it is nothing"):
        LLM(tiny_model, **{**args, "pipeline_parallel_size": 1}, compiled_dir=str(folder))
