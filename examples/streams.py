"""Several answers at once, as they come. One is given up half way."""

import asyncio

from jaxllm import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams


async def answer(llm: AsyncLLM, name: str, prompt: str, most_pieces: int = 99) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, output_kind=RequestOutputKind.DELTA)
    pieces = []
    async for output in llm.generate(prompt, params, request_id=name):
        pieces.append(output.outputs[0].text)
        if len(pieces) == most_pieces:
            break  # which ends the request in the engine, too
    print(f"{name}: {'|'.join(pieces)!r}")


async def ask(llm: AsyncLLM) -> None:
    await asyncio.gather(
        answer(llm, "capital", "The capital of France is"),
        answer(llm, "water", "Water boils at"),
        answer(llm, "given up", "Once upon a time", most_pieces=3),
    )


def main() -> None:
    llm = AsyncLLM.from_engine_args(EngineArgs("smollm2-135m-instruct", max_model_len=2048))
    asyncio.run(ask(llm))
    llm.shutdown()


if __name__ == "__main__":
    main()
