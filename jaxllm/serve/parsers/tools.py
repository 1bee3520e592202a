"""Tool calls in the formats of two families of models."""

from typing import Protocol

from jaxllm.serve.parsers.pieces import MarkFinder, Piece, new_call_id
from jaxllm.serve.parsers.tool_json import ToolCallReader


class ToolParser(Protocol):
    """Text to pieces."""

    num_calls: int

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """What was held back, now that no more comes."""
        ...


class _Content:
    """Gives content without the white space at its ends that only sets tool calls apart."""

    def __init__(self) -> None:
        self.space = ""

    def feed(self, text: str) -> list[Piece]:
        text = self.space + text
        kept = text.rstrip()
        self.space = text[len(kept) :]
        return [Piece("content", kept)] if kept else []

    def drop_space(self) -> None:
        self.space = ""

    def finish(self) -> list[Piece]:
        space, self.space = self.space, ""
        return [Piece("content", space)] if space else []


class _Call:
    """One tool call, reported once its name is known. What breaks off before that is content."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.reader = ToolCallReader()
        self.is_reported = False

    def feed(self, text: str) -> tuple[list[Piece], str]:
        """(pieces, text that does not belong to the call)"""
        taken = self.reader.feed(text)
        return self._news(), text[taken:]

    def _news(self) -> list[Piece]:
        reader, pieces = self.reader, []
        if reader.name is None:
            return []
        if not self.is_reported:
            self.is_reported = True
            pieces.append(Piece("call", reader.name, self.index, new_call_id()))
        arguments = "{}" if reader.state == "done" and not reader.has_arguments else reader.take_arguments()
        if arguments:
            pieces.append(Piece("arguments", arguments, self.index))
        return pieces


class HermesToolParser:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, as Hermes and Qwen models write it, amid other text."""

    START, END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self.num_calls = 0
        self.start = MarkFinder(self.START)
        self.end = MarkFinder(self.END)
        self.content = _Content()
        self.call: _Call | None = None
        self.is_closing = False  # the call is read; </tool_call> has not come

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        rest: str | None = text
        while rest:
            if self.call is not None:
                news, rest = self._feed_call(rest)
            elif self.is_closing:
                _, rest = self.end.feed(rest)
                self.is_closing = rest is None
                continue
            else:
                before, rest = self.start.feed(rest)
                news = self.content.feed(before)
                if rest is not None:
                    self.call = _Call(self.num_calls)
            pieces += news
        return pieces

    def _feed_call(self, text: str) -> tuple[list[Piece], str]:
        call = self.call
        assert call is not None
        was_reported = call.is_reported
        pieces, rest = call.feed(text)
        if call.is_reported and not was_reported:
            self.num_calls += 1
            self.content.drop_space()
        if call.reader.state != "open":
            self.call = None
            if call.is_reported:
                self.is_closing = True
            else:
                pieces += self.content.feed(self.START + call.reader.text)
        return pieces, rest

    def finish(self) -> list[Piece]:
        text = self.start.flush()
        self.end.flush()
        if self.call is not None and not self.call.is_reported:
            text += self.START + self.call.reader.text
        return self.content.feed(text) + self._last_space()

    def _last_space(self) -> list[Piece]:
        if self.num_calls:
            self.content.drop_space()
        return self.content.finish()


class Llama3JsonToolParser:
    """`{"name": …, "parameters": …}`, several joined by `;`, as Llama 3 writes it, where the answer begins with it. What begins
    otherwise is content. `<|python_tag|>` may come before."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self.num_calls = 0
        self.pending = ""
        self.is_content: bool | None = None  # None as long as it is open
        self.content = _Content()
        self.call: _Call | None = None

    def feed(self, text: str) -> list[Piece]:
        if self.is_content is None:
            text = self.pending + text
            start = text.lstrip()
            if len(start) < len(self.TAG) and self.TAG.startswith(start):
                self.pending = text
                return []
            self.pending = ""
            start = start.removeprefix(self.TAG).lstrip()
            if not start:
                self.pending = self.TAG
                return []
            self.is_content = not start.startswith("{")
            if not self.is_content:
                text = start
        pieces: list[Piece] = []
        while text:
            if self.is_content:
                return pieces + self.content.feed(text)
            if self.call is None:
                text = text.lstrip(" \t\r\n;")
                if not text:
                    break
                self.call = _Call(self.num_calls)
            news, text = self._feed_call(self.call, text)
            pieces += news
        return pieces

    def _feed_call(self, call: _Call, text: str) -> tuple[list[Piece], str]:
        was_reported = call.is_reported
        pieces, rest = call.feed(text)
        self.num_calls += call.is_reported and not was_reported
        if call.reader.state != "open":
            self.call = None
            if not call.is_reported:
                self.is_content = True
                pieces += self.content.feed(call.reader.text)
            elif call.reader.state == "failed":
                self.is_content = True
        return pieces, rest

    def finish(self) -> list[Piece]:
        text = "" if self.pending == self.TAG else self.pending
        self.pending = ""
        if self.call is not None and not self.call.is_reported:
            text += self.call.reader.text
        pieces = self.content.feed(text)
        if self.num_calls:
            self.content.drop_space()
        return pieces + self.content.finish()


TOOL_PARSERS: dict[str, type[HermesToolParser] | type[Llama3JsonToolParser]] = {
    "hermes": HermesToolParser,
    "llama3_json": Llama3JsonToolParser,
}
