"""/v1/completions."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxllm.engine.input_processor import TokensPrompt
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.serve.beams import beam_params, placeholder_params, search_beams
from jaxllm.serve.context import Call, Context
from jaxllm.serve.errors import to_api_error
from jaxllm.serve.logprobs import CompletionLogprobsBuilder, join_logprobs, prompt_logprobs_json
from jaxllm.serve.protocol.completion import DEFAULT_MAX_TOKENS, CompletionChoice, CompletionLogprobs, CompletionRequest
from jaxllm.serve.streams import DONE, EngineRequest, EngineStream, EventStream, JsonResponse, event


async def create_completion(context: Context, body: CompletionRequest, request: Request) -> Response:
    """Answer a request.

    Raises:
        ApiError, or an error that `to_api_error` knows.
    """
    body.check()
    call = context.begin("cmpl-", body, request)
    work = _Completion(context, body, call)
    await work.prepare()
    if body.use_beam_search:
        return JsonResponse(work.response(await search_beams(context, call, work.requests, body)))
    stream = context.open(call, work.requests)
    try:
        await stream.start()
        if body.stream:
            return EventStream(work.events(stream), stream, work.error_event, context.args.sse_keep_alive_interval)
        outputs = [item async for item in stream]
    except BaseException:
        await stream.aclose()
        raise
    await stream.aclose()
    return JsonResponse(work.response([output for _, output in sorted(outputs, key=lambda item: item[0])]))


class _Choice:
    """What is known of a choice so far."""

    def __init__(self, as_ids: bool) -> None:
        self.is_new = True
        self.num_tokens = 0
        self.text = ""
        self.logprobs = CompletionLogprobsBuilder(as_ids)


class _Completion:
    """One call.

    A choice of prompt p and sample i has the index p * n + i.
    """

    def __init__(self, context: Context, body: CompletionRequest, call: Call) -> None:
        self.context = context
        self.body = body
        self.call = call
        self.n = 1 if body.n is None else body.n
        self.requests: list[EngineRequest] = []
        self.as_ids = bool(body.return_tokens_as_token_ids or context.args.return_tokens_as_token_ids)
        self.echo = bool(body.echo)
        # The engine generates a token at least; with max_tokens=0 nobody hears of it.
        self.echo_only = self.echo and body.max_tokens == 0

    async def prepare(self) -> None:
        """Tokenize and check every prompt."""
        for prompt in self.body.prompts():
            self.requests.append(await self._request(len(self.requests), prompt))
        if len(self.requests) > 1:
            self.context.check_requests(self.requests)

    async def _request(self, position: int, prompt: str | list[int]) -> EngineRequest:
        body, encoder = self.body, self.context.encoder
        recommended = self.context.generation_defaults.get("max_tokens")
        wanted = 1 if self.echo_only else body.max_tokens
        if wanted is None and recommended is None:
            wanted = DEFAULT_MAX_TOKENS
        tokens = await encoder.prompt(
            prompt, body, add_special_tokens=body.add_special_tokens, max_tokens=wanted, param="prompt"
        )  # fmt: skip
        limit = encoder.max_tokens(wanted, recommended, len(tokens["prompt_token_ids"]), "max_tokens")
        if self.echo and "prompt" not in tokens and self.context.tokenizer is not None:
            tokens["prompt"] = encoder.decode(tokens["prompt_token_ids"])
        request_id, call = f"{self.call.id}-{position}", self.call
        return EngineRequest(
            request_id, tokens, self._params(limit), body.priority, body.cache_salt, call.trace_headers, call.data_parallel_rank
        )

    def _params(self, max_tokens: int) -> SamplingParams:
        body = self.body
        if body.use_beam_search:
            beam_params(body, max_tokens)
            return placeholder_params(max_tokens)
        # The prompt's own log probabilities are part of what echo gives.
        prompt_logprobs = body.prompt_logprobs
        if prompt_logprobs is None and self.echo:
            prompt_logprobs = body.logprobs
        return self.context.sampling_params(
            body,
            max_tokens,
            logprobs=body.logprobs if body.logprob_token_ids is None else None,
            prompt_logprobs=prompt_logprobs,
            detokenize=None if self.context.tokenizer is not None else False,
        )

    def _prompt_text(self, prompt: TokensPrompt) -> str:
        return prompt.get("prompt") or ""

    def _index(self, position: int, completion: CompletionOutput) -> int:
        return position * self.n + completion.index

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices, num_completion = [], 0
        for position, output in enumerate(outputs):
            for completion in output.outputs:
                state = _Choice(self.as_ids)
                num_completion += 0 if self.echo_only else len(completion.token_ids)
                choice = self._choice(position, output, completion, state)
                if self.body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs) or []
                choices.append(choice)
                self.context.log_output(self.call, choice["index"], choice["text"], choice["finish_reason"])
        return {
            "id": self.call.id,
            "object": "text_completion",
            "created": self.call.created,
            "model": self.call.model,
            "choices": choices,
            "usage": self._usage(outputs, num_completion),
            "system_fingerprint": self.context.fingerprint,
            **self.context.request_metrics(outputs[0]),
        }

    def _usage(self, outputs: Sequence[RequestOutput], num_completion: int) -> dict[str, Any]:
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        return self.context.usage(num_prompt, num_completion, sum(output.num_cached_tokens for output in outputs))  # type: ignore[return-value]

    def _choice(self, position: int, output: RequestOutput, completion: CompletionOutput, state: _Choice) -> CompletionChoice:
        """A choice, or what is new of it; the first one brings the prompt if the request wants it echoed."""
        text = "" if self.echo_only else completion.text
        if self.echo and state.is_new:
            text = self._prompt_text(self.requests[position].prompt) + text
        choice: CompletionChoice = {
            "index": self._index(position, completion),
            "text": text,
            "logprobs": self._logprobs(output, completion, state),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.echo_only and completion.finish_reason == "stop":
            choice["finish_reason"], choice["stop_reason"] = "length", None
        if self.body.return_token_ids:
            choice["token_ids"] = [] if self.echo_only else completion.token_ids
            if state.is_new:
                choice["prompt_token_ids"] = output.prompt_token_ids
        state.is_new = False
        return choice

    def _logprobs(self, output: RequestOutput, completion: CompletionOutput, state: _Choice) -> CompletionLogprobs | None:
        if self.body.logprobs is None and self.body.logprob_token_ids is None:
            return None
        prompt = None
        if self.echo and state.is_new and output.prompt_logprobs is not None:
            first = [self.context.tokenizer.decode(output.prompt_token_ids[:1])] if self.context.tokenizer is not None else None
            texts = None if first is None else first + [""] * (len(output.prompt_token_ids) - 1)
            prompt = state.logprobs.build(output.prompt_token_ids, list(output.prompt_logprobs), texts)
        if self.echo_only:
            return prompt
        assert completion.logprobs is not None
        new = state.logprobs.build(completion.token_ids, list(completion.logprobs))
        return new if prompt is None else join_logprobs(prompt, new)

    async def events(self, stream: EngineStream) -> AsyncGenerator[bytes, None]:
        include_usage, on_every_chunk = self.context.wants_usage(self.body)
        choices = [_Choice(self.as_ids) for _ in range(len(self.requests) * self.n)]
        last: dict[int, RequestOutput] = {}
        base = {
            "id": self.call.id, "object": "text_completion", "created": self.call.created, "model": self.call.model,
        }  # fmt: skip
        async for position, output in stream:
            last[position] = output
            for completion in output.outputs:
                index = self._index(position, completion)
                state = choices[index]
                state.num_tokens += 0 if self.echo_only else len(completion.token_ids)
                choice = self._choice(position, output, completion, state)
                if self.context.args.enable_log_outputs:
                    state.text += choice["text"]
                if choice["finish_reason"] is not None:
                    self.context.log_output(self.call, index, state.text, choice["finish_reason"])
                elif not choice["text"] and choice["logprobs"] is None and not choice.get("token_ids"):
                    continue  # a token whose text is not complete
                chunk = {**base, "choices": [choice]}
                if choice["finish_reason"] is not None:
                    chunk["system_fingerprint"] = self.context.fingerprint
                if on_every_chunk:
                    chunk["usage"] = self.context.usage(len(output.prompt_token_ids), state.num_tokens, output.num_cached_tokens)
                yield event(chunk)
        if include_usage:
            usage = self._usage(list(last.values()), sum(state.num_tokens for state in choices))
            metrics = self.context.request_metrics(next(iter(last.values())))
            yield event({**base, "choices": [], "usage": usage, **metrics})
        yield DONE

    def error_event(self, error: Exception) -> bytes:
        return b"data: " + to_api_error(error, self.body).json() + b"\n\n" + DONE
