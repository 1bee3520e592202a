"""One batch, different sampling parameters for each prompt. None of them makes anything compile."""

from jaxllm import LLM, SamplingParams

PROMPT = "Once upon a time, there was a"

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=16),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=42, max_tokens=16),
    "the same seed again": SamplingParams(temperature=0.8, top_p=0.95, seed=42, max_tokens=16),
    "three at once": SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=16),
    "no repetition": SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=16),
    "until a full stop": SamplingParams(temperature=0, stop=["."], include_stop_str_in_output=True, max_tokens=64),
    "without some words": SamplingParams(temperature=0, bad_words=["little", "young"], max_tokens=16),
}


def main() -> None:
    llm = LLM("smollm2-135m-instruct", max_model_len=2048)
    for name, output in zip(PARAMS, llm.generate([PROMPT] * len(PARAMS), list(PARAMS.values())), strict=True):
        for completion in output.outputs:
            print(f"{name}: {completion.text!r} ({completion.finish_reason})")


if __name__ == "__main__":
    main()
