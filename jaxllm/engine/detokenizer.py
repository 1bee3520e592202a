"""Token ids to text, a few at a time, and stop strings.

Text only ever grows by whole characters: bytes of an unfinished one are held back until the rest has come.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import ByteLevel, DecodeStream

from jaxllm.core.types import EngineCoreRequest
from jaxllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"  # what a decoder gives for bytes that are no UTF-8, or not yet
MAX_OPEN_BYTES = 3  # of a UTF-8 character that is not complete
PROMPT_CONTEXT = 8  # prompt tokens that usually suffice to decode what follows them


def find_stop_string(text: str, num_new_chars: int, stop: Sequence[str], include: bool) -> tuple[str, int] | None:
    """The stop string that is complete first in the last `num_new_chars` characters of `text`, the earlier in `stop` on a tie.

    Args:
        include: whether the stop string stays in the text.

    Returns:
        The stop string and the length to cut the text to, -1 if there is nothing to cut; None if no stop string ends in the
        new characters.
    """
    if num_new_chars <= 0:
        return None
    found, found_end = None, len(text) + 1
    for string in stop:
        # The last character of the stop string must be a new one.
        start = text.find(string, max(0, len(text) - num_new_chars - len(string) + 1))
        if start >= 0 and start + len(string) < found_end:
            found, found_end = string, start + len(string)
    if found is None:
        return None
    if not include:
        return found, found_end - len(found)
    return found, found_end if found_end < len(text) else -1


class WholeTexts(dict[int, str | None]):
    """Token id → its text, found when it is first asked for; None if the token holds a part of a character.

    Only for tokenizers whose decoder puts the bytes of tokens one after the other and does nothing else: there the text of a
    token that begins and ends with whole characters is the same behind every text that does. To look it up costs a tenth of a
    step of a decode stream.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special_tokens: bool) -> None:
        super().__init__()
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens

    @classmethod
    def both_of(cls, tokenizer: "PreTrainedTokenizerFast | None") -> "tuple[WholeTexts, WholeTexts] | None":
        """Those with special tokens, and those without; None if the tokenizer is not of that kind."""
        if tokenizer is None or type(tokenizer.backend_tokenizer.decoder) is not ByteLevel:
            return None
        return cls(tokenizer.backend_tokenizer, False), cls(tokenizer.backend_tokenizer, True)

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self.tokenizer.decode([token_id], skip_special_tokens=self.skip_special_tokens)
        except OverflowError:  # no tokenizer has such an id; the decode stream tells what is wrong with it
            return None
        self[token_id] = None if REPLACEMENT in text else text
        return self[token_id]


class IncrementalDetokenizer:
    """Collects the token ids of one request; this class makes no text of them.

    Attributes:
        token_ids: output tokens up to the one that completed a stop string.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @staticmethod
    def from_new_request(
        tokenizer: "PreTrainedTokenizerFast | None",
        request: EngineCoreRequest,
        whole_texts: tuple[WholeTexts, WholeTexts] | None = None,
    ) -> "IncrementalDetokenizer":
        """The detokenizer that the request asks for.

        Args:
            whole_texts: of `tokenizer`, shared by all requests.
        """
        if tokenizer is None or not request.sampling_params.detokenize:
            return IncrementalDetokenizer()
        return FastIncrementalDetokenizer(tokenizer, request, whole_texts)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Add tokens.

        Args:
            stop_terminated: whether the engine core ended the request at the last of them, for EOS or a stop token. That
                token makes no text, unless the request asked for it.

        Returns:
            The stop string that they complete, if any; tokens after it are dropped.
        """
        self.token_ids += new_token_ids
        return None

    @property
    def output_text(self) -> str:
        """All text so far, stop string cut off."""
        return ""

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text to send: all of it, or with `delta` what has not been sent yet.

        Until `finished`, characters that may turn out to be the beginning of a stop string are held back.
        """
        return ""


class FastIncrementalDetokenizer(IncrementalDetokenizer):
    """Makes text with the decode stream of the tokenizers library, which costs the same however long the text is; with
    `whole_texts` only while a character is incomplete.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        request: EngineCoreRequest,
        whole_texts: tuple[WholeTexts, WholeTexts] | None = None,
    ) -> None:
        super().__init__()
        params = request.sampling_params
        assert isinstance(params.stop, list)
        self.request_id = request.request_id
        self.tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self.skip_special_tokens = params.skip_special_tokens
        self.stop = params.stop
        self.include_stop = params.include_stop_str_in_output
        self.min_tokens = params.min_tokens
        self.num_held_back = max(map(len, params.stop)) - 1 if params.stop and not self.include_stop else 0
        self.num_sent_chars = 0
        self._text = ""
        self._pieces: list[str] = []  # text not yet joined to `_text`
        # A stream without stop strings sends each piece once and needs no text as a whole, which would be copied at every token:
        # its pieces stay as they are, and this many have been sent.
        self._sends_pieces = params.output_kind is RequestOutputKind.DELTA and not self.stop
        self._num_sent_pieces = 0
        # With skip_special_tokens there is nothing to put a space between.
        joined = not params.skip_special_tokens and not params.spaces_between_special_tokens
        self.added_tokens = {i: t.content for i, t in self.tokenizer.get_added_tokens_decoder().items()} if joined else {}
        self.after_added_token = False
        self.whole_texts = None if whole_texts is None else whole_texts[params.skip_special_tokens]
        # None: the text so far ends with a whole character, and whole_texts says what the next token adds.
        self.stream: DecodeStream | None = None
        last = request.prompt_token_ids[-1:]
        if self.whole_texts is None or not (last and self.whole_texts[last[0]]):
            self.stream = prompt_stream(self.tokenizer, request.prompt_token_ids, params.skip_special_tokens)

    @property
    def output_text(self) -> str:
        if self._sends_pieces:
            return "".join(self._pieces)
        if self._pieces:
            self._text += "".join(self._pieces)
            self._pieces.clear()
        return self._text

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        silent = new_token_ids[-1:] if stop_terminated and not self.include_stop else []
        token_ids = new_token_ids[: len(new_token_ids) - len(silent)] if silent else new_token_ids
        for token_id in token_ids:
            self.token_ids.append(token_id)
            text = self.whole_texts[token_id] if self.stream is None else None
            if text is None:
                text = self._step(token_id)
            if self.added_tokens:
                text = self._without_space(token_id, text)
            if not text:
                continue
            self._pieces.append(text)
            if self.stop and len(self.token_ids) > self.min_tokens:
                found = find_stop_string(self.output_text, len(text), self.stop, self.include_stop)
                if found is not None:
                    string, length = found
                    if length != -1:
                        self._text = self._text[:length]
                    return string
        self.token_ids += silent
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        if self._sends_pieces and delta:
            start, self._num_sent_pieces = self._num_sent_pieces, len(self._pieces)
            # Nearly always it is one piece.
            return self._pieces[start] if self._num_sent_pieces == start + 1 else "".join(self._pieces[start:])
        text = self.output_text
        end = len(text)
        if self.num_held_back and not finished:
            end = max(0, end - self.num_held_back)
        if not delta:
            return text[:end]
        start, self.num_sent_chars = self.num_sent_chars, end
        return text[start:end]

    def _without_space(self, token_id: int, text: str | None) -> str | None:
        """The text of a token, but for the space that decoders put between tokens that are no bytes.

        The bare content of an added token has none.
        """
        content = self.added_tokens.get(token_id)
        if content is not None and self.after_added_token:
            text = content
        self.after_added_token = content is not None
        return text

    def _step(self, token_id: int) -> str | None:
        if self.stream is None:
            self.stream = DecodeStream(skip_special_tokens=self.skip_special_tokens)
        try:
            text = self.stream.step(self.tokenizer, token_id)
        except Exception as error:
            # The library raises bare Exception. One request's text must not end the others.
            if not str(error).startswith("Invalid prefix"):
                logger.exception("request %s: token %d cannot be decoded and gives no text", self.request_id, token_id)
                return None
            # The text of the tokens that the stream remembers has changed with this one: begin afresh after it.
            logger.warning("request %s: the decode stream was reset at token %d", self.request_id, token_id)
            self.stream = DecodeStream(skip_special_tokens=self.skip_special_tokens)
            text = self.stream.step(self.tokenizer, token_id)
        if text and self.whole_texts is not None:
            self.stream = None
        return text


def prompt_stream(tokenizer: "Tokenizer", prompt_token_ids: list[int], skip_special_tokens: bool) -> DecodeStream:
    """A decode stream that stands at the end of the prompt.

    The text of a token may depend on those before it (a leading space is dropped at the start of a text), so the stream must
    know some of the prompt: its last tokens, as many as it takes for them to have text. If the prompt ends inside a character,
    the tokens of that character are fed to the stream, which then gives it, whole, with the token that completes it.
    """

    num_tokens = min(PROMPT_CONTEXT, len(prompt_token_ids))
    while True:
        context = prompt_token_ids[len(prompt_token_ids) - num_tokens :]
        whole = num_tokens == len(prompt_token_ids)
        for num_open in range(min(MAX_OPEN_BYTES, num_tokens) + 1):
            known, rest = context[: num_tokens - num_open], context[num_tokens - num_open :]
            text = tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
            if text.endswith(REPLACEMENT):
                continue
            if not text and not whole:
                break
            stream = DecodeStream(ids=known, skip_special_tokens=skip_special_tokens)
            for token_id in rest:
                stream.step(tokenizer, token_id)
            return stream
        if whole:  # its end is no text at all: start as if there were no prompt
            return DecodeStream(skip_special_tokens=skip_special_tokens)
        num_tokens = min(2 * num_tokens, len(prompt_token_ids))
