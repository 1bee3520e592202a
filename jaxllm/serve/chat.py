"""/v1/chat/completions."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.serve.beams import beam_params, placeholder_params, search_beams
from jaxllm.serve.context import Call, Context
from jaxllm.serve.errors import to_api_error
from jaxllm.serve.logprobs import chat_logprobs, prompt_logprobs_json
from jaxllm.serve.parsers import OutputParser, Piece
from jaxllm.serve.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionRequest,
    ChatLogprobs,
    Delta,
    Message,
    ToolCall,
    ToolCallDelta,
)
from jaxllm.serve.streams import DONE, EngineRequest, EngineStream, EventStream, JsonResponse, event


async def create_chat_completion(context: Context, body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a request.

    Raises:
        ApiError, or an error that `to_api_error` knows.
    """
    body.check()
    context.check_tools(body.wants_tools)
    call = context.begin("chatcmpl-", body, request)
    work = _Chat(context, body, call)
    prepared = await work.prepare()
    if body.use_beam_search:
        [output] = await search_beams(context, call, [prepared], body)
        return JsonResponse(work.response(output))
    stream = context.open(call, [prepared])
    try:
        await stream.start()
        if body.stream:
            return EventStream(work.events(stream), stream, work.error_event, context.args.sse_keep_alive_interval)
        [output] = [output async for _, output in stream]
    except BaseException:
        await stream.aclose()
        raise
    await stream.aclose()
    return JsonResponse(work.response(output))


# What a request calls the fields of the engine.
FIELD_NAMES = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs", "prompt": "messages"}


class _Choice:
    """What is known of a choice so far."""

    def __init__(self, parser: OutputParser) -> None:
        self.parser = parser
        self.num_tokens = 0
        self.text = ""


class _Chat:
    """One call."""

    def __init__(self, context: Context, body: ChatCompletionRequest, call: Call) -> None:
        self.context = context
        self.body = body
        self.call = call
        self.n = 1 if body.n is None else body.n
        self.as_ids = bool(body.return_tokens_as_token_ids or context.args.return_tokens_as_token_ids)
        self.prompt_text = ""
        self.role = context.args.response_role
        if not body.add_generation_prompt and body.messages:
            self.role = body.messages[-1].role

    async def prepare(self) -> EngineRequest:
        """Render, tokenize and check the prompt."""
        body, context = self.body, self.context
        shows_tools = not (body.tool_choice == "none" and context.args.exclude_tools_when_tool_choice_none)
        self.prompt_text = context.renderer.render(body, shows_tools)
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        tokens = await context.encoder.prompt(
            self.prompt_text, body, add_special_tokens=body.add_special_tokens, max_tokens=wanted, param="messages"
        )  # fmt: skip
        recommended = context.generation_defaults.get("max_tokens")
        limit = context.encoder.max_tokens(wanted, recommended, len(tokens["prompt_token_ids"]), param)
        call = self.call
        return EngineRequest(
            call.id, tokens, self._params(limit), body.priority, body.cache_salt, call.trace_headers, call.data_parallel_rank
        )  # fmt: skip

    def _params(self, max_tokens: int) -> SamplingParams:
        body = self.body
        if body.use_beam_search:
            beam_params(body, max_tokens)
            return placeholder_params(max_tokens)
        logprobs = None
        if body.logprobs and body.logprob_token_ids is None:
            logprobs = body.top_logprobs or 0
        return self.context.sampling_params(body, max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)

    def _parser(self) -> OutputParser:
        return self.context.output_parser(
            self.prompt_text,
            tools=self.body.wants_tools,
            include_reasoning=self.body.include_reasoning,
            parallel=self.body.parallel_tool_calls is not False,
        )

    def _echoed(self) -> str:
        """The text of the message that the model goes on with."""
        last = self.body.messages[-1]
        if not self.body.echo or last.role != self.role:
            return ""
        return last.content if isinstance(last.content, str) else ""

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self.body.logprobs or completion.logprobs is None:
            return None
        num_top = self.body.top_logprobs or 0
        return chat_logprobs(completion.token_ids, completion.logprobs, num_top, self.as_ids)

    def _finish_reason(self, completion: CompletionOutput, parser: OutputParser) -> str | None:
        return "tool_calls" if completion.finish_reason == "stop" and parser.num_calls else completion.finish_reason

    def response(self, output: RequestOutput) -> dict[str, Any]:
        choices: list[ChatChoice] = []
        for completion in output.outputs:
            parser = self._parser()
            message = self._message(parser.feed(completion.text) + parser.finish())
            choice: ChatChoice = {
                "index": completion.index,
                "message": message,
                "logprobs": self._logprobs(completion),
                "finish_reason": self._finish_reason(completion, parser),
                "stop_reason": completion.stop_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = completion.token_ids
            choices.append(choice)
            self.context.log_output(self.call, completion.index, completion.text, choice["finish_reason"])
        num_completion = sum(len(completion.token_ids) for completion in output.outputs)
        response: dict[str, Any] = {
            "id": self.call.id,
            "object": "chat.completion",
            "created": self.call.created,
            "model": self.call.model,
            "choices": choices,
            "usage": self.context.usage(len(output.prompt_token_ids), num_completion, output.num_cached_tokens),
            "system_fingerprint": self.context.fingerprint,
            **self._prompt_fields(output),
            **self.context.request_metrics(output),
        }
        if self.body.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        return response

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if self.body.return_prompt_text:
            fields["prompt_text"] = self.prompt_text
        return fields

    def _message(self, pieces: Sequence[Piece]) -> Message:
        content = self._echoed() + "".join(piece.text for piece in pieces if piece.kind == "content")
        calls: list[ToolCall] = []
        for piece in pieces:
            if piece.kind == "call":
                calls.append({"id": piece.call_id, "type": "function", "function": {"name": piece.text, "arguments": ""}})
            elif piece.kind == "arguments":
                calls[-1]["function"]["arguments"] += piece.text
        message: Message = {"role": self.role, "content": content if content or not calls else None, "refusal": None}
        if reasoning := "".join(piece.text for piece in pieces if piece.kind == "reasoning"):
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    async def events(self, stream: EngineStream) -> AsyncGenerator[bytes, None]:
        include_usage, on_every_chunk = self.context.wants_usage(self.body)
        choices = [_Choice(self._parser()) for _ in range(self.n)]
        base = {
            "id": self.call.id, "object": "chat.completion.chunk", "created": self.call.created, "model": self.call.model,
        }  # fmt: skip

        def chunk(choice: ChatChunkChoice, output: RequestOutput, **more: Any) -> bytes:
            data = {**base, "choices": [choice], **more}
            if on_every_chunk:
                num_tokens = choices[choice["index"]].num_tokens
                data["usage"] = self.context.usage(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens)
            return event(data)

        last: RequestOutput | None = None
        async for _, output in stream:
            if last is None:
                fields = self._prompt_fields(output)
                for index in range(self.n):
                    yield chunk(_chunk_choice(index, {"role": self.role, "content": ""}), output, **fields)
                    fields = {}
                    if echoed := self._echoed():
                        yield chunk(_chunk_choice(index, {"content": echoed}), output)
            last = output
            for completion in output.outputs:
                for choice in self._new_choices(choices[completion.index], completion):
                    ended = choice["finish_reason"] is not None
                    yield chunk(choice, output, **({"system_fingerprint": self.context.fingerprint} if ended else {}))
        assert last is not None
        if include_usage:
            num_completion = sum(choice.num_tokens for choice in choices)
            usage = self.context.usage(len(last.prompt_token_ids), num_completion, last.num_cached_tokens)
            yield event({**base, "choices": [], "usage": usage, **self.context.request_metrics(last)})
        yield DONE

    def _new_choices(self, state: _Choice, completion: CompletionOutput) -> list[ChatChunkChoice]:
        """What an output of the engine adds to a choice. Nothing, if its text is held back."""
        state.num_tokens += len(completion.token_ids)
        pieces = state.parser.feed(completion.text)
        ended = completion.finish_reason is not None
        if ended:
            pieces += state.parser.finish()
        if self.context.args.enable_log_outputs:
            state.text += completion.text
        deltas = [_delta(piece) for piece in pieces]
        logprobs = self._logprobs(completion)
        if not deltas and (ended or logprobs is not None or self.body.return_token_ids):
            deltas = [{}]
        new = [_chunk_choice(completion.index, delta) for delta in deltas]
        if new:
            new[0]["logprobs"] = logprobs
            if self.body.return_token_ids:
                new[0]["token_ids"] = completion.token_ids
        if ended:
            new[-1]["finish_reason"] = self._finish_reason(completion, state.parser)
            new[-1]["stop_reason"] = completion.stop_reason
            self.context.log_output(self.call, completion.index, state.text, new[-1]["finish_reason"])
        return new

    def error_event(self, error: Exception) -> bytes:
        return b"data: " + to_api_error(error, self.body, FIELD_NAMES).json() + b"\n\n" + DONE


def _chunk_choice(index: int, delta: Delta) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(piece: Piece) -> Delta:
    if piece.kind == "call":
        call: ToolCallDelta = {
            "index": piece.call, "id": piece.call_id, "type": "function", "function": {"name": piece.text, "arguments": ""},
        }  # fmt: skip
        return {"tool_calls": [call]}
    if piece.kind == "arguments":
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
    if piece.kind == "reasoning":
        return {"reasoning": piece.text}
    return {"content": piece.text}
