"""The real model against recorded outputs of Hugging Face transformers in float32."""

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams

TOLERANCE = 2e-3


def test_greedy_tokens_and_logprobs(smollm2: LLM, golden):
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5)
    outputs = smollm2.generate([{"prompt_token_ids": item["prompt_token_ids"]} for item in golden], params, use_tqdm=False)
    for item, output in zip(golden, outputs, strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == item["output_token_ids"], item["prompt"]
        assert completion.finish_reason == "length"
        assert completion.logprobs is not None
        for found, expected in zip(completion.logprobs, item["top5"], strict=True):
            for token, logprob in expected:
                assert found[token].logprob == pytest.approx(logprob, abs=TOLERANCE)


def test_text_prompts(smollm2: LLM, golden):
    items = [item for item in golden if item["kind"] == "text"][:4]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, skip_special_tokens=False)
    outputs = smollm2.generate([item["prompt"] for item in items], params, use_tqdm=False)
    for item, output in zip(items, outputs, strict=True):
        assert output.prompt_token_ids == item["prompt_token_ids"]
        assert output.outputs[0].text == item["text"]


def test_chat_prompts(smollm2: LLM, golden):
    items = [item for item in golden if item["kind"] == "chat"]
    params = SamplingParams(temperature=0, max_tokens=8)
    conversations = [
        item["prompt"] if isinstance(item["prompt"], list) else [{"role": "user", "content": item["prompt"]}] for item in items
    ]
    for item, output in zip(items, smollm2.chat(conversations, params, use_tqdm=False), strict=True):
        assert output.prompt_token_ids == item["prompt_token_ids"]
        assert list(output.outputs[0].token_ids) == item["output_token_ids"][: len(output.outputs[0].token_ids)]


def test_prompt_logprobs(smollm2: LLM, golden):
    items = [item for item in golden if item.get("prompt_logprobs")]
    assert items
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": item["prompt_token_ids"]} for item in items]
    for item, output in zip(items, smollm2.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        found = [
            entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], item["prompt_token_ids"][1:], strict=True)
        ]
        np.testing.assert_allclose(found, item["prompt_logprobs"][1:], atol=TOLERANCE)
