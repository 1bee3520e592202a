"""How sure the model is: of each token that it sampled, and of each token of the prompt."""

import math

from jaxllm import LLM, SamplingParams


def main() -> None:
    llm = LLM("smollm2-135m-instruct", max_model_len=2048)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=0)
    (output,) = llm.generate(["The capital of France is"], params, use_tqdm=False)

    print("prompt:")
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        print(f"  {entry[token].decoded_token!r:12} {math.exp(entry[token].logprob):7.2%}, rank {entry[token].rank}")
    print("output:")
    for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        best = ", ".join(f"{choice.decoded_token!r} {math.exp(choice.logprob):.1%}" for choice in entry.values())
        print(f"  {entry[token].decoded_token!r:12} of {best}")


if __name__ == "__main__":
    main()
