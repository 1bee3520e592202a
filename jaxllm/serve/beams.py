"""use_beam_search: the beams of a call, each extended by a request of one token."""

from collections.abc import Sequence
from dataclasses import replace

from jaxllm.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence
from jaxllm.engine.input_processor import TokensPrompt
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.serve.context import Call, Context
from jaxllm.serve.errors import not_supported
from jaxllm.serve.protocol.base import GenerationBody
from jaxllm.serve.streams import EngineRequest

# Beams are compared by their log probabilities; these would change them, or end beams in ways that the search does not know.
EXCLUDED = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids",
    "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs", "logprob_token_ids", "repetition_detection",
)  # fmt: skip


def beam_params(body: GenerationBody, max_tokens: int) -> BeamSearchParams:
    """
    Raises:
        ApiError: for a parameter that beam search does not know.
        ValueError: for one that it cannot take.
    """
    for name in EXCLUDED:
        value = getattr(body, name)
        if value not in (None, [], {}, 0) and value != type(body).model_fields[name].default:
            raise not_supported(name, value, "not together with use_beam_search")
    return BeamSearchParams(
        beam_width=1 if body.n is None else body.n,
        max_tokens=max_tokens,
        ignore_eos=body.ignore_eos,
        temperature=1.0 if body.temperature is None else body.temperature,
        length_penalty=body.length_penalty,
        include_stop_str_in_output=body.include_stop_str_in_output,
    )


def placeholder_params(max_tokens: int) -> SamplingParams:
    """What stands in a request that beam search will replace; only its `max_tokens` counts."""
    return SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY)


async def search_beams(
    context: Context, call: Call, requests: Sequence[EngineRequest], body: GenerationBody
) -> list[RequestOutput]:
    """The `n` best continuations of each prompt, as if they were n samples of it."""
    return [await _search(context, call, request, body) for request in requests]


async def _search(context: Context, call: Call, request: EngineRequest, body: GenerationBody) -> RequestOutput:
    max_tokens = request.params.max_tokens
    assert max_tokens is not None
    prompt = request.prompt["prompt_token_ids"]
    search = BeamSearch(context.config.model, [prompt], beam_params(body, max_tokens))
    num_cached = None
    while live := search.live_prompts():
        outputs = await _run(context, call, [_extension(request, search, i, beam) for i, beam in enumerate(live)])
        num_cached = outputs[0].num_cached_tokens if num_cached is None else num_cached
        search.advance(outputs)
    [result] = search.results(None)
    completions = [_completion(context, i, beam, len(prompt), body) for i, beam in enumerate(result.sequences)]
    return RequestOutput(
        request.request_id, request.prompt.get("prompt"), prompt, None, completions, True, num_cached_tokens=num_cached or 0
    )  # fmt: skip


def _extension(request: EngineRequest, search: BeamSearch, position: int, prompt: TokensPrompt) -> EngineRequest:
    params = search.one_token.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return replace(request, request_id=f"{request.request_id}-beam-{position}", prompt=prompt, params=params)


async def _run(context: Context, call: Call, requests: Sequence[EngineRequest]) -> list[RequestOutput]:
    stream = context.open(call, requests)
    try:
        await stream.start()
        outputs = {position: output async for position, output in stream}
    finally:
        await stream.aclose()
    return [outputs[position] for position in range(len(requests))]


def _completion(
    context: Context, index: int, beam: BeamSearchSequence, prompt_len: int, body: GenerationBody
) -> CompletionOutput:  # fmt: skip
    token_ids = beam.tokens[prompt_len:]
    text = ""
    if context.tokenizer is not None:
        text = context.tokenizer.decode(token_ids, skip_special_tokens=body.skip_special_tokens)
    return CompletionOutput(
        index, text, token_ids, beam.cum_logprob, beam.logprobs[: len(token_ids)], beam.finish_reason, beam.stop_reason
    )  # fmt: skip
