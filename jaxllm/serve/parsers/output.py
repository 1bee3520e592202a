"""The parsers of one answer, one behind the other."""

from collections.abc import Sequence

from jaxllm.serve.parsers.pieces import Piece
from jaxllm.serve.parsers.reasoning import REASONING_PARSERS, ThinkParser
from jaxllm.serve.parsers.tools import TOOL_PARSERS, ToolParser


class OutputParser:
    """Text to pieces: reasoning first, then tool calls in what is left.

    Args:
        prompt: the rendered prompt, for the reasoning parser.
        reasoning_parser: a name of REASONING_PARSERS; None to leave thoughts in the content.
        tool_parser: a name of TOOL_PARSERS; None to look for no calls.
        include_reasoning: False drops the thoughts.
        parallel_tool_calls: False drops all tool calls but the first.
    """

    def __init__(
        self,
        prompt: str,
        reasoning_parser: str | None = None,
        tool_parser: str | None = None,
        include_reasoning: bool = True,
        parallel_tool_calls: bool = True,
    ) -> None:
        self.reasoning = ThinkParser(prompt, REASONING_PARSERS[reasoning_parser]) if reasoning_parser is not None else None
        self.tools: ToolParser | None = TOOL_PARSERS[tool_parser]() if tool_parser is not None else None
        self.include_reasoning = include_reasoning
        self.parallel_tool_calls = parallel_tool_calls

    @property
    def is_plain(self) -> bool:
        """Whether text goes through as it is."""
        return self.reasoning is None and self.tools is None

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self.tools.num_calls if self.tools is not None else 0

    def feed(self, text: str) -> list[Piece]:
        if self.is_plain:
            return [Piece("content", text)] if text else []
        pieces = self.reasoning.feed(text) if self.reasoning is not None else [Piece("content", text)]
        return self._through_tools(pieces)

    def finish(self) -> list[Piece]:
        """What was held back, now that no more comes."""
        pieces = self._through_tools(self.reasoning.finish()) if self.reasoning is not None else []
        if self.tools is not None:
            pieces += self._wanted(self.tools.finish())
        return pieces

    def _through_tools(self, pieces: Sequence[Piece]) -> list[Piece]:
        result: list[Piece] = []
        for piece in pieces:
            if piece.kind == "content" and self.tools is not None:
                result += self.tools.feed(piece.text)
            else:
                result.append(piece)
        return self._wanted(result)

    def _wanted(self, pieces: list[Piece]) -> list[Piece]:
        return [
            piece
            for piece in pieces
            if (self.include_reasoning or piece.kind != "reasoning")
            and (self.parallel_tool_calls or piece.kind not in ("call", "arguments") or piece.call == 0)
        ]
