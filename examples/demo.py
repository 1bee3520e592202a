"""What `make demo` runs: a real model answers a batch of chat prompts."""

import time

from jaxllm import LLM, SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "Give me three tips for a good night's sleep.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "What is 7 times 8?",
    "Translate 'good morning' into Spanish.",
    "Name four planets of the solar system.",
    "Who wrote Romeo and Juliet?",
]
SYSTEM = (
    "You are a helpful assistant. Answer briefly and correctly, in plain English. If a question has one right answer, give it in "
    "one sentence. If it asks for a list, give a short list. If you do not know, say so."
)


def main() -> None:
    start = time.perf_counter()
    llm = LLM("smollm2-135m-instruct", max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=512)
    print(f"ready after {time.perf_counter() - start:.1f} s")

    conversations = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in QUESTIONS]
    start = time.perf_counter()
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=96))
    seconds = time.perf_counter() - start

    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\n\033[1m{question}\033[0m\n{output.outputs[0].text.strip()}")
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    hit_rate = values["jaxllm:prefix_cache_hits"] / values["jaxllm:prefix_cache_queries"]
    print(
        f"\n{len(outputs)} requests, {prompt_tokens} prompt tokens, {output_tokens} output tokens in {seconds:.1f} s: "
        f"{output_tokens / seconds:.1f} output tokens/s, prefix cache hit rate {hit_rate:.1%}"
    )


if __name__ == "__main__":
    main()
