"""Arrays of log probabilities to the lists of dicts (or FlatLogprobs) of a RequestOutput."""

from itertools import islice
from typing import TYPE_CHECKING

from jaxllm.core.output import LogprobsLists
from jaxllm.core.types import EngineCoreOutput, EngineCoreRequest
from jaxllm.engine.detokenizer import MAX_OPEN_BYTES, REPLACEMENT
from jaxllm.outputs import FlatLogprobs, Logprob, PromptLogprobs, SampleLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TokenTexts:
    """The text of single tokens, remembered: one for all requests."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self.tokenizer = tokenizer.backend_tokenizer
        self.texts: dict[int, str] = {}

    def get(self, token_id: int, context: list[int]) -> str:
        """The text of a token.

        A token that holds only some bytes of a character has the text of the whole character if it completes it, else none.

        Args:
            context: the tokens before it, at least the last MAX_OPEN_BYTES of them.
        """
        text = self.texts.get(token_id)
        if text is None:
            text = self.tokenizer.decode([token_id], skip_special_tokens=False)
            if text.endswith(REPLACEMENT):
                return self._text_after(context, token_id)
            self.texts[token_id] = text
        return text

    def _text_after(self, context: list[int], token_id: int) -> str:
        for num_tokens in range(1, min(MAX_OPEN_BYTES, len(context)) + 1):
            before = context[-num_tokens:]
            text = self.tokenizer.decode([*before, token_id], skip_special_tokens=False)
            if not text.endswith(REPLACEMENT):
                # What the context leaves open shows as U+FFFD at its own end; what stands before that is not this token's.
                complete = self.tokenizer.decode(before, skip_special_tokens=False).rstrip(REPLACEMENT)
                return text.removeprefix(complete)
        return ""


class LogprobsProcessor:
    """The log probabilities of one request.

    Attributes:
        logprobs: one entry an output token; None if not asked for.
        prompt_logprobs: one entry a prompt token, None for those without; None if not asked for or not there yet.
        cumulative_logprob: sum over the output tokens.
    """

    def __init__(self, token_texts: TokenTexts | None, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        self.token_texts = token_texts if params.detokenize else None
        self.flat = params.flat_logprobs
        self.num_logprobs = params.num_logprobs
        self.num_prompt_logprobs = params.num_prompt_logprobs
        # The ranks of tokens that were asked for by id are not known.
        self.ranked = params.logprob_token_ids is None
        self.prompt_ranked = params.prompt_logprob_token_ids is None
        self.prompt_logprob_start = max(1, params.prompt_logprob_start or 0)
        self.prompt_token_ids = request.prompt_token_ids
        self.context = request.prompt_token_ids[-MAX_OPEN_BYTES:]
        self.cumulative_logprob = 0.0
        self.logprobs: SampleLogprobs | None = self._new_list() if self.num_logprobs is not None else None
        self.prompt_logprobs: PromptLogprobs | None = None

    @classmethod
    def from_new_request(cls, token_texts: TokenTexts | None, request: EngineCoreRequest) -> "LogprobsProcessor | None":
        """None if the request asks for no log probabilities."""
        params = request.sampling_params
        if params.num_logprobs is None and params.num_prompt_logprobs is None:
            return None
        return cls(token_texts, request)

    def _new_list(self) -> "SampleLogprobs":
        return FlatLogprobs() if self.flat else []

    def update(self, output: EngineCoreOutput, num_tokens: int) -> None:
        """Add a step.

        Args:
            num_tokens: how many of the output's tokens to take; the others came after a stop string.
        """
        if output.new_logprobs is not None and self.logprobs is not None:
            self._add_sampled(output.new_logprobs, num_tokens)
        if output.new_prompt_logprobs is not None and self.num_prompt_logprobs is not None:
            self._add_prompt(output.new_prompt_logprobs)

    def _add_sampled(self, lists: LogprobsLists, num_tokens: int) -> None:
        assert self.logprobs is not None
        assert self.num_logprobs is not None
        columns = _columns(lists, self.num_logprobs)
        for token_ids, logprobs, rank in islice(zip(*columns, strict=True), num_tokens):
            self.cumulative_logprob += logprobs[0]
            self._append(self.logprobs, token_ids, logprobs, rank, self.ranked, self.context)
            self.context = [*self.context[1 - MAX_OPEN_BYTES :], token_ids[0]]

    def _add_prompt(self, lists: LogprobsLists) -> None:
        """`lists` are of the last prompt tokens: of all but the first, or fewer where only fewer were wanted."""
        assert self.num_prompt_logprobs is not None
        entries = self._new_list()
        position = len(self.prompt_token_ids) - len(lists.token_ids)
        lists = lists.slice(max(0, self.prompt_logprob_start - position), len(lists.token_ids))
        position = len(self.prompt_token_ids) - len(lists.token_ids)
        for _ in range(position):
            entries.append(None)  # type: ignore[arg-type]
        for token_ids, logprobs, rank in zip(*_columns(lists, self.num_prompt_logprobs), strict=True):
            context = self.prompt_token_ids[max(0, position - MAX_OPEN_BYTES) : position]
            self._append(entries, token_ids, logprobs, rank, self.prompt_ranked, context)
            position += 1
        self.prompt_logprobs = entries  # type: ignore[assignment]

    def _append(
        self, to: SampleLogprobs, token_ids: list[int], logprobs: list[float], rank: int, ranked: bool, context: list[int]
    ) -> None:
        token_id, num_others = token_ids[0], len(token_ids) - 1
        ranks: list[int | None] = [rank, *(range(1, num_others + 1) if ranked else [None] * num_others)]
        if num_others and token_id in token_ids[1:]:  # the token comes first, and is not repeated among the others
            repeated = token_ids.index(token_id, 1)
            del token_ids[repeated], logprobs[repeated], ranks[repeated]
        texts: list[str | None]
        if self.token_texts is None:
            texts = [None] * len(token_ids)
        else:
            get = self.token_texts.get
            texts = [get(token_id, context) for token_id in token_ids]
        if self.flat:
            to.append_lists(token_ids, logprobs, ranks, texts)  # type: ignore[union-attr]
        else:
            to.append(dict(zip(token_ids, map(Logprob, logprobs, ranks, texts), strict=True)))  # type: ignore[arg-type]

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Give the prompt's log probabilities away, so that a stream sends them once."""
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return prompt_logprobs


def _columns(lists: LogprobsLists, num_logprobs: int) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """Python lists of the columns that were asked for. A batch has as many as its most demanding request, or more."""
    token_ids, logprobs = lists.token_ids, lists.logprobs
    if len(token_ids) and num_logprobs != -1 and token_ids.shape[1] != 1 + num_logprobs:
        assert token_ids.shape[1] > num_logprobs, f"{token_ids.shape[1]} columns of logprobs, {1 + num_logprobs} wanted"
        token_ids, logprobs = token_ids[:, : 1 + num_logprobs], logprobs[:, : 1 + num_logprobs]
    return token_ids.tolist(), logprobs.tolist(), lists.ranks.tolist()
