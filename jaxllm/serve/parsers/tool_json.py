"""Reads one tool call, a JSON object with a name and arguments, as it is written."""

import json
from collections.abc import Sequence

_SPACE = " \t\r\n"


class ToolCallReader:
    """Reads `{"name": "f", "arguments": {…}}`, character by character; other keys are read over.

    The arguments are given verbatim, as soon as the name is known. If they are a string, its content is given, once it is whole:
    some models write JSON within JSON.

    Args:
        argument_keys: what the arguments may be called.

    Attributes:
        name: the function's; None as long as it is not known.
        has_arguments: whether any have come.
        text: all that was read.
        state: "open", "done" or "failed": what was read is no such object.
    """

    def __init__(self, argument_keys: Sequence[str] = ("arguments", "parameters")) -> None:
        self.argument_keys = argument_keys
        self.name: str | None = None
        self.has_arguments = False
        self.text = ""
        self.state = "open"
        self._arguments: list[str] = []  # not yet taken
        self._expect = "{"
        self._key = ""
        self._token: list[str] = []  # the string or value that is being read
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """Read on. Returns how many characters were taken; the rest comes after the object, or after what made it fail."""
        taken = 0
        for char in text:
            taken += 1
            getattr(self, _STEPS[self._expect])(char)
            if self.state != "open":
                break
        self.text += text[:taken]
        return taken

    def take_arguments(self) -> str:
        """The arguments that came since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _fail(self) -> None:
        self.state = "failed"

    def _open(self, char: str) -> None:
        if char == "{":
            self._expect = "key or end"
        elif char not in _SPACE:
            self._fail()

    def _key_or_end(self, char: str) -> None:
        if char == "}" and self._expect == "key or end":
            self.state = "done"
        elif char == '"':
            self._token, self._expect, self._escaped = [char], "in key", False
        elif char not in _SPACE:
            self._fail()

    def _in_key(self, char: str) -> None:
        self._token.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            key = _decoded(self._token)
            if not isinstance(key, str):
                self._fail()
                return
            self._key, self._expect = key, ":"

    def _colon(self, char: str) -> None:
        if char == ":":
            self._token, self._depth, self._in_string, self._escaped, self._expect = [], 0, False, False, "value"
        elif char not in _SPACE:
            self._fail()

    def _value(self, char: str) -> None:
        if not self._token and char in _SPACE:
            return
        if self._in_string:
            self._take(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if not self._depth:
                    self._end_value()
            return
        if not self._depth and (char in ",}]" or char in _SPACE):  # ends a number, true, false or null
            if not self._token or char == "]":
                self._fail()
                return
            self._end_value()
            if self.state == "open":
                self._comma_or_end(char)
            return
        if not self._depth and self._token and char in '"{[':
            self._fail()
            return
        self._take(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if not self._depth:
                self._end_value()

    def _take(self, char: str) -> None:
        self._token.append(char)
        if self._key in self.argument_keys and self._token[0] != '"':
            self._arguments.append(char)
            self.has_arguments = True

    def _end_value(self) -> None:
        self._expect = ", or end"
        value = _decoded(self._token)
        if value is _BROKEN:
            self._fail()
        elif self._key == "name":
            if isinstance(value, str) and value:
                self.name = value
            else:
                self._fail()
        elif self._key in self.argument_keys and isinstance(value, str):
            self._arguments.append(value)
            self.has_arguments = True

    def _comma_or_end(self, char: str) -> None:
        if char == ",":
            self._expect = "key"
        elif char == "}":
            self.state = "done"
        elif char not in _SPACE:
            self._fail()


_STEPS = {
    "{": "_open",
    "key or end": "_key_or_end",
    "key": "_key_or_end",
    "in key": "_in_key",
    ":": "_colon",
    "value": "_value",
    ", or end": "_comma_or_end",
}
_BROKEN = object()


def _decoded(token: Sequence[str]) -> object:
    try:
        return json.loads("".join(token), strict=False)
    except (ValueError, RecursionError):
        return _BROKEN
