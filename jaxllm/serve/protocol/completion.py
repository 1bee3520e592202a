"""/v1/completions."""

from typing import Any, ClassVar, Literal, NotRequired, TypedDict

from jaxllm.serve.errors import bad_request, not_supported
from jaxllm.serve.protocol.base import GenerationBody, RequestMetrics, Usage

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024


class CompletionRequest(GenerationBody):
    REFUSED: ClassVar[dict[str, str]] = {
        **GenerationBody.REFUSED,
        "suffix": "this server's models do not fill in the middle",
        "prompt_embeds": "this server takes text and token ids only",
        "mm_payload": "this server takes text and token ids only",
    }

    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    max_tokens: int | None = None  # the model's recommendation, else DEFAULT_MAX_TOKENS
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = False
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, 1, self.n):
            raise not_supported("best_of", self.best_of, "use n, or use_beam_search")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens must be at least 1, got 0, unless echo is true", "max_tokens", 0)
        if self.logprobs is not None and self.logprobs < -1:
            raise bad_request(f"logprobs must be at least -1, got {self.logprobs}", "logprobs", self.logprobs)

    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts of the request.

        Raises:
            ApiError: if there is none, or there are too many.
        """
        if not self.prompt:
            raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        if len(self.prompt) > MAX_PROMPTS:
            raise bad_request(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(self.prompt)}", "prompt")
        return self.prompt  # type: ignore[return-value]


class CompletionLogprobs(TypedDict):
    """One entry a token; `text_offset` counts characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]


class CompletionResponse(TypedDict):
    """Also a chunk of a stream, where `text` is what is new."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    system_fingerprint: NotRequired[str]
    metrics: NotRequired[RequestMetrics]
