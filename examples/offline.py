"""Complete a few prompts."""

from jaxllm import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The three primary colours are"]


def main() -> None:
    llm = LLM("smollm2-135m-instruct", max_model_len=2048)
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
