"""/tokenize and /detokenize."""

from typing import Any, TypedDict

from pydantic import Field

from jaxllm.serve.errors import bad_request
from jaxllm.serve.protocol.base import RequestBody
from jaxllm.serve.protocol.chat import ChatMessageBody, Tool


class TokenizeRequest(RequestBody):
    """A prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    messages: list[ChatMessageBody] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: str | None = None

    def check(self) -> None:
        """
        Raises:
            ApiError: unless there is either a prompt or messages.
        """
        self.check_other_fields()
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("either prompt or messages must be given", "prompt")
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request("continue_final_message=true needs add_generation_prompt=false", "continue_final_message", True)


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: list[int] = Field(max_length=2**22)


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    prompt: str
