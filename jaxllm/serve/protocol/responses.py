"""/v1/responses: text in, text and function calls out; nothing is stored."""

from typing import Any, ClassVar, Literal, TypedDict

from pydantic import BaseModel, ConfigDict

from jaxllm.serve.errors import bad_request, not_supported
from jaxllm.serve.protocol.base import NO_STRUCTURED_OUTPUTS, Int64, RequestBody

LOGPROBS = "message.output_text.logprobs"
NOT_STORED = "this server stores no responses; send the whole conversation as input"


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str


class TextConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None


class ReasoningConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    effort: str | None = None


class InputItem(BaseModel):
    """A message, a function call of the model's, or its result."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    role: str | None = None
    content: str | list[Any] | None = None


class ResponsesRequest(RequestBody):
    REFUSED: ClassVar[dict[str, str]] = {
        "background": NOT_STORED,
        "previous_response_id": NOT_STORED,
        "conversation": NOT_STORED,
        "prompt": "this server has no prompt templates",
        "structured_outputs": NO_STRUCTURED_OUTPUTS,
        "previous_input_messages": "send them as input",
        "enable_response_messages": "this server knows no such messages",
        "kv_transfer_params": "this server does not hand KV blocks to another",
        "context_management": "this server changes no conversation",
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({
        "max_tool_calls", "metadata", "mm_processor_kwargs", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store", "stream_options", "user",
    })  # fmt: skip

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[str, float] | None = None
    top_logprobs: int | None = 0
    include: list[str] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    truncation: Literal["auto", "disabled"] | None = "disabled"
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    request_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None

    def check(self) -> None:
        """The rules that types cannot say.

        Raises:
            ApiError: naming the field.
        """
        self.check_other_fields()
        if not self.input:
            raise bad_request("input must not be empty", "input", self.input)
        for entry in self.include or []:
            if entry not in (LOGPROBS, "reasoning.encrypted_content"):
                raise not_supported("include", entry, f"only {LOGPROBS} can be had")
        if self.text is not None and self.text.format is not None and self.text.format.type != "text":
            raise not_supported("text", self.text.format.type, NO_STRUCTURED_OUTPUTS)
        if self.truncation == "auto":
            raise not_supported("truncation", "auto", "this server drops no part of a conversation")
        for tool in self.tools or []:
            if tool.type != "function" or not tool.name:
                raise not_supported("tools", tool.type, "only functions with a name can be called")
        if self.tool_choice not in (None, "auto", "none"):
            raise not_supported("tool_choice", self.tool_choice, NO_STRUCTURED_OUTPUTS + "; 'auto' and 'none' work")
        if self.top_logprobs and self.top_logprobs < 0:
            raise bad_request(f"top_logprobs must be at least 0, got {self.top_logprobs}", "top_logprobs", self.top_logprobs)

    @property
    def wants_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice in (None, "auto")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or [])


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponsesUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesResponse(TypedDict):
    """`output`: items of type reasoning, message and function_call, in the order in which the model wrote them."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: str
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    usage: ResponsesUsage | None
