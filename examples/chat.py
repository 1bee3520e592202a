"""Hold a conversation: each turn sends all that was said before, and the prefix cache makes that cheap."""

from jaxllm import LLM, SamplingParams

QUESTIONS = ["What is the capital of France?", "Name one famous building there."]


def main() -> None:
    llm = LLM("smollm2-135m-instruct", max_model_len=2048)
    params = SamplingParams(temperature=0, max_tokens=48)
    messages = [{"role": "system", "content": "You answer in one short sentence."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, params, use_tqdm=False)
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(f"user: {question}\nassistant: {answer}\n({output.num_cached_tokens} prompt tokens came from the cache)\n")


if __name__ == "__main__":
    main()
