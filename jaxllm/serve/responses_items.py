"""The items of a response, built piece by piece, and the events that tell of them."""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from jaxllm.serve.parsers import Piece

Event = dict[str, Any]


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


class ResponseItems:
    """Takes pieces, keeps items, gives events without their sequence numbers.

    Attributes:
        items: as `output` of a response lists them.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.kind: str | None = None  # of the pieces that go into the last item
        self.logprobs: list[Any] = []  # of tokens whose text has not come

    def feed(self, pieces: Sequence[Piece], logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Add pieces.

        Args:
            logprobs: of the tokens that the pieces come from; they go to the next text of a message.
        """
        self.logprobs += logprobs
        for piece in pieces:
            kind = "call" if piece.kind == "arguments" else piece.kind
            if kind != self.kind or piece.kind == "call":
                yield from self.end()
                yield from self._begin(piece)
            if piece.kind != "call":
                yield self._extend(piece)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """End the last item, if one is open."""
        if self.kind is None:
            return
        kind, self.kind = self.kind, None
        item = self.items[-1]
        item["status"] = status
        if kind == "call":
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            [part] = item["content"]
            if kind == "content":
                part["logprobs"] += self._take_logprobs()
                yield self._event("response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"])
            else:
                yield self._event("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}

    def reasoning(self) -> str:
        return "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")

    def _take_logprobs(self) -> list[Any]:
        taken, self.logprobs = self.logprobs, []
        return taken

    def _event(self, type: str, /, **fields: Any) -> Event:
        return {"type": type, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _begin(self, piece: Piece) -> Iterator[Event]:
        item: dict[str, Any]
        part: dict[str, Any] | None = None
        if piece.kind == "call":
            self.kind = "call"
            item = {
                "id": new_id("fc_"), "type": "function_call", "status": "in_progress", "call_id": piece.call_id,
                "name": piece.text, "arguments": "",
            }  # fmt: skip
        elif piece.kind == "reasoning":
            self.kind, part = "reasoning", {"type": "reasoning_text", "text": ""}
            item = {"id": new_id("rs_"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        else:
            self.kind, part = "content", {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": new_id("msg_"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copy(item)}
        if part is not None:
            item["content"].append(part)
            yield self._event("response.content_part.added", content_index=0, part=_copy(part))

    def _extend(self, piece: Piece) -> Event:
        item = self.items[-1]
        if piece.kind == "arguments":
            item["arguments"] += piece.text
            return self._event("response.function_call_arguments.delta", delta=piece.text)
        [part] = item["content"]
        part["text"] += piece.text
        if piece.kind == "reasoning":
            return self._event("response.reasoning_text.delta", content_index=0, delta=piece.text)
        logprobs = self._take_logprobs()
        part["logprobs"] += logprobs
        return self._event("response.output_text.delta", content_index=0, delta=piece.text, logprobs=logprobs)


def _copy(fields: dict[str, Any]) -> dict[str, Any]:
    """So that what was told does not change with what comes."""
    return {name: list(value) if isinstance(value, list) else value for name, value in fields.items()}
