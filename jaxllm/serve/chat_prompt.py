"""Messages to the text of a prompt: what the chat template of a model expects."""

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jaxllm.serve.errors import ApiError, bad_request, shown
from jaxllm.serve.protocol.chat import ChatMessageBody, ChatTemplateBody, ContentPart, ToolCallBody
from jaxllm.tokenizer import apply_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

ContentFormat = Literal["string", "openai"]
TEXT_PARTS = ("text", "input_text", "output_text")
_RESERVED = ("messages", "tokenizer", "kwargs")
_PROBE = "jaxllm-probe"


class ChatRenderer:
    """Renders conversations with one template.

    Args:
        chat_template: a Jinja template, instead of the tokenizer's own.
        content_format: what the template gets as the content of a message: "string", "openai" (a list of parts), or "auto", which
            tries lists out.
        default_kwargs: variables of the template that a request can override.
        trust_request_templates: whether a request may bring a template of its own.

    Raises:
        ValueError: for default variables that no template has.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast | None",
        *,
        chat_template: str | None = None,
        content_format: Literal["auto", "string", "openai"] = "auto",
        default_kwargs: Mapping[str, Any] | None = None,
        trust_request_templates: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.default_kwargs = dict(default_kwargs or {})
        self.trust_request_templates = trust_request_templates
        self._check_variables("--default-chat-template-kwargs", self.default_kwargs)
        self.content_format: ContentFormat = self._detect_format() if content_format == "auto" else content_format

    def render(self, body: ChatTemplateBody, tools: bool = True, param: str = "messages") -> str:
        """The prompt.

        Args:
            tools: whether the template hears of the request's tools.
            param: the field of the request that the messages come from.

        Raises:
            ApiError: naming the message or the field at fault.
        """
        if self.tokenizer is None:
            raise bad_request("messages need a tokenizer, and this server runs without one; use /v1/completions with token ids")
        if body.chat_template is not None and not self.trust_request_templates:
            raise bad_request(
                "chat_template is taken from requests only if the server runs with --trust-request-chat-template", "chat_template"
            )
        template = body.chat_template or self.chat_template
        if template is None and not self.tokenizer.chat_template:
            raise bad_request("The model has no chat template; start the server with --chat-template", param)
        if not body.messages:
            raise bad_request("messages must not be empty", "messages", [])
        messages = []
        for position, message in enumerate(body.messages):
            try:
                messages.append(self._message(message))
            except ValueError as error:
                # Positions are those of the field only if it is the list of messages itself.
                where = f"messages[{position}]" if param == "messages" else param
                raise bad_request(f"{where}{error}", param) from None
        return self._apply(
            messages,
            template,
            param,
            tools=[tool.model_dump(exclude_unset=True) for tool in body.tools] if body.tools and tools else None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            **self._kwargs(body),
        )

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], template: str | None, param: str = "messages", **kwargs: Any
    ) -> str:  # fmt: skip
        assert self.tokenizer is not None
        try:
            return apply_chat_template(self.tokenizer, messages, chat_template=template, **kwargs)
        except (ValueError, AttributeError, ArithmeticError, LookupError) as error:
            # Whatever a template trips over in these messages.
            raise bad_request(str(error), param) from error

    def _kwargs(self, body: ChatTemplateBody) -> dict[str, Any]:
        kwargs: dict[str, Any] = {**self.default_kwargs, **(body.chat_template_kwargs or {})}
        for name in ("documents", "reasoning_effort"):
            if (value := getattr(body, name)) is not None:
                kwargs[name] = value
        try:
            self._check_variables("chat_template_kwargs", body.chat_template_kwargs or {})
        except ValueError as error:
            raise bad_request(str(error), "chat_template_kwargs") from None
        return kwargs

    def _check_variables(self, field: str, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError for what steers the rendering itself and is no variable of the template."""
        if self.tokenizer is None:
            return
        for name in kwargs:
            if name in _RESERVED or name in inspect.signature(self.tokenizer.apply_chat_template).parameters:
                raise ValueError(f"{field} must not hold {name!r}: it is no variable of a template")

    # What is wrong with a message is a ValueError here; `render` knows where it stands.

    def _message(self, message: ChatMessageBody) -> dict[str, Any]:
        fields = message.model_dump(exclude_unset=True, exclude={"content", "tool_calls"})
        fields["content"] = self._content(message.content)
        if message.tool_calls:
            fields["tool_calls"] = [self._tool_call(call) for call in message.tool_calls]
        return fields

    def _content(self, content: Any) -> str | list[dict[str, Any]]:
        if content is None:
            return ""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self.content_format == "openai" else content
        texts = [part if isinstance(part, str) else _text_of(i, part) for i, part in enumerate(content)]
        if self.content_format == "openai":
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def _tool_call(self, call: ToolCallBody) -> dict[str, Any]:
        # Templates write the arguments as JSON themselves, so they get an object.
        arguments = call.function.arguments or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f".tool_calls: arguments must be JSON: {error}") from None
        fields = call.model_dump(exclude_unset=True, exclude={"function"})
        return {"type": "function", **fields, "function": {"name": call.function.name, "arguments": arguments}}

    def _detect_format(self) -> ContentFormat:
        """Lists, if the template makes text of them."""
        if self.tokenizer is None or (self.chat_template is None and not self.tokenizer.chat_template):
            return "string"
        try:
            text = self._apply([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}], self.chat_template)
        except ApiError:
            return "string"
        return "openai" if _PROBE in text and "'text'" not in text and '"text"' not in text else "string"


def _text_of(position: int, part: ContentPart) -> str:
    if part.type == "refusal":
        return str((part.model_extra or {}).get("refusal", ""))
    if part.type not in TEXT_PARTS:
        raise ValueError(f".content[{position}]: {shown(part.type)} parts are not supported, only text")
    if part.text is None:
        raise ValueError(f".content[{position}]: a part of type {part.type!r} needs 'text'")
    return part.text


def load_chat_template(path_or_template: str) -> str:
    """A template from a file, or as it stands if it holds Jinja.

    Raises:
        ValueError: if it is neither.
    """
    if any(mark in path_or_template for mark in ("{{", "{%", "\n")):
        return path_or_template
    try:
        with open(path_or_template, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"--chat-template {path_or_template!r} is no template, and no file: {error.strerror}") from error
