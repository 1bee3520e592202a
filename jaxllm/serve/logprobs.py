"""Log probabilities in the two formats of the OpenAI API."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.outputs import Logprob, LogprobsOnePosition, PromptLogprobs, SampleLogprobs
from jaxllm.serve.protocol.chat import ChatLogprobs, TopLogprob
from jaxllm.serve.protocol.completion import CompletionLogprobs

# JSON has no minus infinity.
LEAST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """NaN, too, has no place in JSON; it comes of a model gone wrong, and is the least probable thing."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def token_text(token_id: int, entry: Logprob, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id or entry.decoded_token is None else entry.decoded_token


def chat_logprobs(token_ids: Sequence[int], logprobs: SampleLogprobs, num_top: int, as_ids: bool) -> ChatLogprobs:
    """
    Args:
        num_top: how many of the most probable tokens to list; -1 for all. Tokens asked for by id have no rank and are all listed.
    """

    def entry(token_id: int, logprob: Logprob) -> TopLogprob:
        text = token_text(token_id, logprob, as_ids)
        return {"token": text, "logprob": finite(logprob.logprob), "bytes": list(text.encode("utf-8", "replace"))}

    content = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        top = [
            (other, logprob)
            for other, logprob in entries.items()
            if (other != token_id if logprob.rank is None else num_top == -1 or logprob.rank <= num_top)
        ]
        top.sort(key=lambda item: item[1].rank or 0)
        content.append({
            **entry(token_id, entries[token_id]),
            "top_logprobs": [entry(other, logprob) for other, logprob in top],
        })  # fmt: skip
    return {"content": content}  # type: ignore[typeddict-item]


class CompletionLogprobsBuilder:
    """Log probabilities of one choice, in the format of /v1/completions; knows how much text came before.

    Args:
        as_ids: write tokens as token_id:N.
    """

    def __init__(self, as_ids: bool) -> None:
        self.as_ids = as_ids
        self.offset = 0

    def build(
        self, token_ids: Sequence[int], logprobs: Sequence[LogprobsOnePosition | None], texts: Sequence[str] | None = None
    ) -> CompletionLogprobs:
        """
        Args:
            logprobs: one a token; None for the first of a prompt.
            texts: of tokens without log probabilities.
        """
        result: CompletionLogprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for i, (token_id, entries) in enumerate(zip(token_ids, logprobs, strict=True)):
            if entries:
                text = token_text(token_id, entries[token_id], self.as_ids)
                top: dict[str, float] | None = {}
                for other, logprob in entries.items():
                    # Several tokens may read alike; the more probable one comes first, and stays.
                    top.setdefault(token_text(other, logprob, self.as_ids), finite(logprob.logprob))
                result["token_logprobs"].append(finite(entries[token_id].logprob))
            else:
                text = f"token_id:{token_id}" if self.as_ids or texts is None else texts[i]
                top = None
                result["token_logprobs"].append(None)
            result["tokens"].append(text)
            result["top_logprobs"].append(top)
            result["text_offset"].append(self.offset)
            self.offset += len(text)
        return result


def prompt_logprobs_json(logprobs: PromptLogprobs | None) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` of a response: one a prompt token, by token id; null for the first."""
    if logprobs is None:
        return None
    return [_position_json(entries) if entries else None for entries in logprobs]


def _position_json(entries: Mapping[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token_id, entry in entries.items()
    }


def join_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Of a prompt and of what came after it."""
    return {name: first[name] + second[name] for name in first}  # type: ignore[literal-required,return-value]
