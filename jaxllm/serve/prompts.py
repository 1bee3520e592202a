"""Text to token ids, cut and checked against the model's length before anything is queued."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllm.engine.input_processor import TokensPrompt, check_unicode
from jaxllm.serve.errors import ApiError, bad_request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jaxllm.serve.protocol.base import GenerationBody

# Longer texts are tokenized in a thread, so that streams do not wait for them; for shorter ones the way there costs more.
INLINE_CHARACTERS = 4096


class PromptEncoder:
    """
    Args:
        tokenizer: None if prompts are token ids only.
        max_model_len: tokens.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast | None", max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        # No prompt of more characters than this fits, whatever they are; it is not worth tokenizing.
        self.max_characters = max_model_len * max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 0

    async def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt", limited: bool = True) -> list[int]:
        """Token ids.

        Args:
            param: the field of the request that the text comes from.
            limited: refuse at once what is too long for the model.

        Raises:
            ApiError: if it is not Unicode, too long, or there is no tokenizer.
        """
        if self.tokenizer is None:
            raise bad_request(f"{param} must be token ids: this server runs without a tokenizer", param)
        try:
            check_unicode(param, text)
        except ValueError as error:
            raise bad_request(str(error), param) from None
        if limited and len(text) > self.max_characters:
            raise ApiError(
                400,
                "BadRequestError",
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains {len(text)} "
                f"characters, which are more than any {self.max_model_len} tokens have. Please shorten the prompt.",
                "input_text",
            )
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    async def prompt(
        self, prompt: str | Sequence[int], body: "GenerationBody", *, add_special_tokens: bool, max_tokens: int | None, param: str
    ) -> TokensPrompt:
        """The prompt for the engine, cut if the request says so.

        Raises:
            ApiError: if it is empty or leaves no room for an output.
        """
        keep = body.truncate_prompt_tokens
        if isinstance(prompt, str):
            text: str | None = prompt
            token_ids = await self.encode(prompt, add_special_tokens=add_special_tokens, param=param, limited=keep is None)
        else:
            text, token_ids = None, list(prompt)
        if keep is not None:
            if keep == -1:
                keep = max(1, self.max_model_len - max(1, max_tokens or 1))
            if keep < len(token_ids):
                token_ids = token_ids[:keep] if body.truncation_side == "right" else token_ids[len(token_ids) - keep :]
                text = self.decode(token_ids) if text is not None else None
        if not token_ids:
            raise bad_request(f"{param} must not be empty: it has no tokens", param)
        self._check_length(len(token_ids))
        result = TokensPrompt(prompt_token_ids=token_ids)
        if text is not None:
            result["prompt"] = text
        return result

    def _check_length(self, num_tokens: int) -> None:
        longest = self.max_model_len
        if num_tokens > longest:
            raise ApiError(
                400,
                "BadRequestError",
                f"This model's maximum context length is {longest} tokens. However, your prompt contains {num_tokens} input "
                "tokens, which exceeds this limit even without any output tokens. Please shorten the prompt.",
                "input_tokens",
            )
        if num_tokens == longest:
            raise ApiError(
                400,
                "BadRequestError",
                f"max_tokens must be at least 1, got 0: the prompt of {num_tokens} tokens fills this model's maximum context "
                f"length of {longest} tokens.",
                "input_tokens",
            )

    def max_tokens(self, wanted: int | None, default: int | None, prompt_len: int, param: str) -> int:
        """How many tokens to generate: what the request wants, else what the model recommends, else all that fit.

        Raises:
            ApiError: if the request wants less than one, or more than the model has.
        """
        if wanted is not None and wanted > self.max_model_len:
            raise bad_request(f"{param}={wanted} cannot be greater than max_model_len={self.max_model_len}", param, wanted)
        if wanted is not None and wanted < 1:
            raise bad_request(f"{param} must be at least 1, got {wanted}", param, wanted)
        room = self.max_model_len - prompt_len
        return min([room, *(limit for limit in (wanted, default) if limit is not None)])

    def decode(self, token_ids: Sequence[int]) -> str:
        """
        Raises:
            ApiError: without a tokenizer.
        """
        if self.tokenizer is None:
            raise bad_request("text is needed here, and this server runs without a tokenizer")
        return self.tokenizer.decode(token_ids)
