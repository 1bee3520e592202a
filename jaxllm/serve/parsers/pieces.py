"""Pieces, and the search for a mark that may come in parts."""

import uuid
from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True, frozen=True)
class Piece:
    """A part of an answer.

    Attributes:
        kind: "call" opens a tool call, whose arguments come as pieces of kind "arguments".
        text: of the content, of the reasoning or of the arguments; the function's name for "call".
        call: which tool call of the answer, from 0.
        call_id: of a "call".
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = 0
    call_id: str = ""


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


class MarkFinder:
    """Text up to a mark.

    Args:
        mark: what to look for.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.pending = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text before the mark, text after it); the second is None as long as the mark has not come."""
        text = self.pending + text
        before, mark, after = text.partition(self.mark)
        if mark:
            self.pending = ""
            return before, after
        keep = held_back(text, self.mark)
        self.pending = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, now that no more comes."""
        text, self.pending = self.pending, ""
        return text
