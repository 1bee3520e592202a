"""/v1/chat/completions."""

from typing import Any, ClassVar, Literal, NotRequired, TypedDict

from pydantic import BaseModel, ConfigDict

from jaxllm.serve.errors import bad_request, not_supported
from jaxllm.serve.protocol.base import NO_STRUCTURED_OUTPUTS, GenerationBody, RequestMetrics, Usage


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class FunctionCallBody(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallBody(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCallBody


class ChatMessageBody(BaseModel):
    """A message; the template may read more fields than these."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(BaseModel):
    name: str


class NamedToolChoice(BaseModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatTemplateBody(GenerationBody):
    """What /tokenize shares: how messages become a prompt."""

    messages: list[ChatMessageBody]
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatCompletionRequest(ChatTemplateBody):
    REFUSED: ClassVar[dict[str, str]] = {
        **GenerationBody.REFUSED,
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "this server's models make text only",
        "web_search_options": "this server searches nothing",
        "prediction": "this server takes no predicted output",
        "verbosity": "this server's models do not know it",
    }
    IGNORED: ClassVar[frozenset[str]] = GenerationBody.IGNORED | {
        "media_io_kwargs", "mm_processor_kwargs", "metadata", "modalities", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store",
    }  # fmt: skip

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True
    echo: bool | None = False
    return_prompt_text: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and self.top_logprobs < -1:
            raise bad_request(f"top_logprobs must be at least -1, got {self.top_logprobs}", "top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs", self.top_logprobs)
        if self.logprob_token_ids is not None and not self.logprobs:
            raise bad_request("logprob_token_ids needs logprobs=true", "logprob_token_ids", self.logprob_token_ids)
        if self.tools is not None and not self.tools:
            raise bad_request("tools must not be empty", "tools", [])
        if isinstance(self.tool_choice, NamedToolChoice) or self.tool_choice == "required":
            value = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.function.name
            raise not_supported("tool_choice", value, NO_STRUCTURED_OUTPUTS + "; 'auto' and 'none' work")
        if self.tool_choice == "auto" and not self.tools:
            raise bad_request("tool_choice needs tools", "tool_choice", self.tool_choice)
        check_generation_prompt(self)

    @property
    def wants_tools(self) -> bool:
        """Whether tool calls are to be looked for in the output."""
        return bool(self.tools) and self.tool_choice in (None, "auto")


def check_generation_prompt(body: ChatTemplateBody) -> None:
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message=true needs add_generation_prompt=false", "continue_final_message", body.continue_final_message
        )


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


class FunctionCall(TypedDict, total=False):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCall


class Message(TypedDict):
    role: str
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class Delta(TypedDict, total=False):
    role: str
    content: str
    reasoning: str
    tool_calls: list[ToolCallDelta]


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatCompletionResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_text: NotRequired[str]
    metrics: NotRequired[RequestMetrics]


class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    system_fingerprint: NotRequired[str]
    prompt_token_ids: NotRequired[list[int]]
    prompt_text: NotRequired[str]
    metrics: NotRequired[RequestMetrics]
