"""Prompts made up to have an exact number of tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# How often a text is mended until it has the length asked for.
_MAX_REPAIRS = 10
# Fewer whole words than this make too monotonous a prompt.
_MIN_WORDS = 256
# What byte-level and SentencePiece vocabularies write for the space before a word.
_WORD_STARTS = ("Ġ", "▁")


class Prompts(Protocol):
    """Makes prompts."""

    num_special_tokens: int

    def token_ids(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` random token ids."""
        ...


class TokenPrompts:
    """Token ids alone, for an engine without a tokenizer.

    Args:
        vocab_size: ids are below it.
    """

    num_special_tokens = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def token_ids(self, rng: np.random.Generator, count: int) -> list[int]:
        return rng.integers(self.vocab_size, size=count).tolist()


class TextPrompts:
    """Token ids whose text a server's tokenizer turns into as many tokens again.

    The tokens are whole words with the space before them, where the vocabulary has enough: put together they stay what they are.

    Attributes:
        num_special_tokens: what the tokenizer adds to every prompt, such as a beginning-of-sequence token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self.tokenizer = tokenizer
        self.num_special_tokens = tokenizer.num_special_tokens_to_add(pair=False)
        special = set(tokenizer.all_special_ids)
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        usable = [(i, token) for i, token in enumerate(tokens) if i not in special and token]
        words = [i for i, token in usable if token[0] in _WORD_STARTS and len(token) > 2 and _is_word(token[1:])]
        if len(words) < _MIN_WORDS:
            words = [i for i, token in usable if token.isascii() and token.isprintable()] or [i for i, _ in usable]
        self.candidates = np.asarray(words)

    def token_ids(self, rng: np.random.Generator, count: int) -> list[int]:
        return rng.choice(self.candidates, count).tolist()

    def encode(self, text: str) -> list[int]:
        """Without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, rng: np.random.Generator, token_ids: Sequence[int]) -> tuple[str, int]:
        """Text of len(token_ids) tokens, these or, where they do not survive being written down, others at the end.

        Returns:
            The text, and how many tokens it has; they differ from len(token_ids) only if no text of that length was found.
        """
        count, ids = len(token_ids), list(token_ids)
        for _ in range(_MAX_REPAIRS):
            text = self.decode(ids)
            found = self.encode(text)
            if len(found) == count:
                break
            ids = [*found[:count], *self.token_ids(rng, max(0, count - len(found)))]
        return text, len(found)


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalpha()
