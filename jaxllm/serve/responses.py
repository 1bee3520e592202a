"""/v1/responses."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.serve.context import Call, Context
from jaxllm.serve.errors import bad_request, not_supported, to_api_error, validation_error
from jaxllm.serve.logprobs import chat_logprobs
from jaxllm.serve.protocol.chat import ChatTemplateBody
from jaxllm.serve.protocol.responses import InputItem, ResponsesRequest, ResponsesUsage
from jaxllm.serve.responses_items import ResponseItems
from jaxllm.serve.streams import EngineRequest, EngineStream, EventStream, JsonResponse, event

# What a request calls the fields of the engine.
FIELD_NAMES = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "prompt": "input", "messages": "input"}
_SHARED = tuple(name for name in ResponsesRequest.model_fields if name in ChatTemplateBody.model_fields and name != "tools")


async def create_response(context: Context, body: ResponsesRequest, request: Request) -> Response:
    """Answer a request.

    Raises:
        ApiError, or an error that `to_api_error` knows.
    """
    body.check()
    context.check_tools(body.wants_tools)
    work = _ResponseWork(context, body, context.begin("resp_", body, request))
    stream = context.open(work.call, [await work.prepare()])
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


class _ResponseWork:
    """One call."""

    def __init__(self, context: Context, body: ResponsesRequest, call: Call) -> None:
        self.context = context
        self.body = body
        self.call = call
        self.items = ResponseItems()
        self.sequence_number = 0
        self.num_tokens = 0

    async def prepare(self) -> EngineRequest:
        """Render, tokenize and check the prompt."""
        context, body = self.context, self.body
        chat = self._chat_body()
        shows_tools = body.tool_choice != "none" or not context.args.exclude_tools_when_tool_choice_none
        prompt = context.renderer.render(chat, shows_tools, "input")
        tokens = await context.encoder.prompt(
            prompt, chat, add_special_tokens=False, max_tokens=body.max_output_tokens, param="input"
        )  # fmt: skip
        self.parser = context.output_parser(prompt, tools=body.wants_tools, parallel=body.parallel_tool_calls is not False)
        recommended = context.generation_defaults.get("max_tokens")
        limit = context.encoder.max_tokens(
            body.max_output_tokens, recommended, len(tokens["prompt_token_ids"]), "max_output_tokens"
        )  # fmt: skip
        logprobs = body.top_logprobs or 0 if body.wants_logprobs else None
        self.params = context.sampling_params(chat, limit, logprobs=logprobs)
        call = self.call
        return EngineRequest(
            call.id, tokens, self.params, body.priority, body.cache_salt, call.trace_headers, call.data_parallel_rank
        )  # fmt: skip

    def _chat_body(self) -> ChatTemplateBody:
        """The same request in the words of chat completions."""
        body = self.body
        messages: list[dict[str, Any]] = []
        if body.instructions:
            messages.append({"role": "system", "content": body.instructions})
        if isinstance(body.input, str):
            messages.append({"role": "user", "content": body.input})
        else:
            for position, item in enumerate(body.input):
                _add_item(messages, f"input[{position}]", item)
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in body.tools or []
        ]
        shared = {name: getattr(body, name) for name in _SHARED if name in body.model_fields_set}
        effort = body.reasoning.effort if body.reasoning is not None else None
        try:
            return ChatTemplateBody(**shared, messages=messages, tools=tools or None, reasoning_effort=effort)  # type: ignore[arg-type]
        except ValidationError as error:
            errors = [{**one, "loc": ("input", *one["loc"][1:])} for one in error.errors()]
            raise validation_error(errors) from None

    def response(self, output: RequestOutput) -> dict[str, Any]:
        for _ in self._take(output.outputs[0]):
            pass  # nobody hears of the events
        return self._body(output)

    def _take(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Events of what an output of the engine adds."""
        self.num_tokens += len(completion.token_ids)
        pieces = self.parser.feed(completion.text)
        reason = completion.finish_reason
        if reason is not None:
            pieces += self.parser.finish()
        logprobs: Sequence[Any] = ()
        if self.body.wants_logprobs and completion.logprobs is not None:
            num_top = self.body.top_logprobs or 0
            as_ids = self.context.args.return_tokens_as_token_ids
            logprobs = chat_logprobs(completion.token_ids, completion.logprobs, num_top, as_ids)["content"]
        events = list(self.items.feed(pieces, logprobs))
        if reason is not None:
            events += self.items.end("incomplete" if reason in ("length", "abort") else "completed")
        return events

    def _body(self, output: RequestOutput | None) -> dict[str, Any]:
        """The response as it stands; `output` is the last one, None at the beginning."""
        reason = output.outputs[0].finish_reason if output is not None else None
        incomplete = {"length": "max_output_tokens", "abort": "abort"}.get(reason or "")
        status = "in_progress" if reason is None else "incomplete" if incomplete else "completed"
        body = self.body
        text = "".join(part["text"] for item in self.items.items if item["type"] == "message" for part in item["content"])
        if reason is not None:
            self.context.log_output(self.call, 0, text, reason)
        return {
            "id": self.call.id,
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": (body.model_extra or {}).get("metadata") or {},
            "model": self.call.model,
            "output": list(self.items.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": self.params.temperature,
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or []],
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": self._usage(output) if reason is not None and output is not None else None,
        }

    def _usage(self, output: RequestOutput) -> ResponsesUsage:
        num_input = len(output.prompt_token_ids)
        reasoning = self.items.reasoning()
        num_reasoning = len(self.context.tokenizer(reasoning, add_special_tokens=False)["input_ids"]) if reasoning else 0
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},  # writing costs nothing
            "output_tokens": self.num_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_input + self.num_tokens,
        }

    async def events(self, stream: EngineStream) -> AsyncGenerator[bytes, None]:
        yield self._event({"type": "response.created", "response": self._body(None)})
        yield self._event({"type": "response.in_progress", "response": self._body(None)})
        last: RequestOutput | None = None
        async for _, last in stream:
            for data in self._take(last.outputs[0]):
                yield self._event(data)
        assert last is not None
        response = self._body(last)
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def _event(self, data: dict[str, Any]) -> bytes:
        data["sequence_number"] = self.sequence_number
        self.sequence_number += 1
        return event(data, data["type"])

    def error_event(self, error: Exception) -> bytes:
        info = to_api_error(error, self.body, FIELD_NAMES).body()["error"]
        code = {"code": info["type"], "message": info["message"], "param": info["param"]}
        return self._event({"type": "error", **code})


def _add_item(messages: list[dict[str, Any]], where: str, item: InputItem) -> None:
    """Append what an item of the input says, in the words of chat completions."""
    extra = item.model_extra or {}
    if item.type in (None, "message"):
        if item.role is None:
            raise bad_request(f"{where}: a message needs a role", "input")
        role = "system" if item.role == "developer" else item.role  # few templates know developers
        messages.append({"role": role, "content": item.content})
    elif item.type == "function_call":
        call = {"id": extra.get("call_id"), "function": {"name": extra.get("name"), "arguments": extra.get("arguments")}}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif item.type == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": extra.get("call_id"), "content": extra.get("output")})
    elif item.type != "reasoning":  # a thought of an earlier turn: templates leave these out
        raise not_supported("input", item.type, f"{where} is no message, function_call or function_call_output")
