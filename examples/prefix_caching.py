"""Prompts that begin alike share the blocks of the KV cache: the shared part is computed once."""

import time

from jaxllm import LLM, SamplingParams

DOCUMENT = "The lighthouse stands on a rock north of the harbour. It was built in 1874 and is 31 metres tall. " * 12
QUESTIONS = ["When was the lighthouse built?", "How tall is the lighthouse?", "Where does the lighthouse stand?"]


def main() -> None:
    llm = LLM("smollm2-135m-instruct", max_model_len=2048)
    params = SamplingParams(temperature=0, max_tokens=16)
    for question in QUESTIONS:
        start = time.perf_counter()
        (output,) = llm.chat([{"role": "user", "content": DOCUMENT + question}], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        share = output.num_cached_tokens / len(output.prompt_token_ids)
        print(f"{question} {output.outputs[0].text!r}: {share:.0%} of the prompt was cached, {seconds:.2f} s")


if __name__ == "__main__":
    main()
