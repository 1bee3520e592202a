"""Reasoning between <think> and </think>, told apart from the answer."""

from jaxllm.serve.parsers.pieces import MarkFinder, Piece, held_back

START, END = "<think>", "</think>"


class ThinkParser:
    """Text as pieces of reasoning and content.

    Args:
        prompt: the rendered prompt. Many templates open the thought in it, or open and close it at once to forbid one.
        assume_thinking: whether a text that does not begin with <think> is a thought all the same, up to </think>.
    """

    def __init__(self, prompt: str, assume_thinking: bool) -> None:
        tail = prompt[-256:].rstrip()
        closed = tail.endswith(END)
        opened = tail.endswith(START)
        self.is_undecided = not closed
        self.is_thinking = opened or (assume_thinking and not closed)
        self.pending = ""
        self.finder = MarkFinder(END)

    def feed(self, text: str) -> list[Piece]:
        if self.is_undecided:
            text = self.pending + text
            start = text.lstrip()
            if len(start) < len(START) and START.startswith(start):
                self.pending = text  # may still become <think>
                return []
            self.is_undecided, self.pending = False, ""
            if start.startswith(START):
                self.is_thinking, text = True, start[len(START) :]
        if not self.is_thinking:
            return _pieces("content", text)
        thought, answer = self.finder.feed(text)
        if answer is None:
            return _pieces("reasoning", thought)
        self.is_thinking = False
        return _pieces("reasoning", thought) + _pieces("content", answer)

    def finish(self) -> list[Piece]:
        """What was held back, now that no more comes."""
        kind = "reasoning" if self.is_thinking else "content"
        text, self.pending = self.pending + self.finder.flush(), ""
        return _pieces(kind, text)


def _pieces(kind: str, text: str) -> list[Piece]:
    return [Piece(kind, text)] if text else []  # type: ignore[arg-type]


# Name → whether an output without <think> begins with a thought. DeepSeek-R1 always thinks; Qwen 3 only if it says so.
REASONING_PARSERS: dict[str, bool] = {"deepseek_r1": True, "qwen3": False}

__all__ = ["REASONING_PARSERS", "ThinkParser", "held_back"]
