"""Text from token ids, against pairs recorded from vLLM, by hand, and by property."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from toy_engine import IM_END, make_tokenizer
from transformers import PreTrainedTokenizerFast

from jaxllm.core.types import EngineCoreRequest
from jaxllm.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer, WholeTexts, find_stop_string
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

TOY = make_tokenizer()  # for properties, which take no fixtures
ORACLE = Path(__file__).parents[1] / "data" / "oracle"
STOP_STRINGS = json.loads((ORACLE / "stop_strings.json").read_text())
DETOKENIZER = json.loads((ORACLE / "detokenizer.json").read_text())


def request_of(prompt: list[int], **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest("r", prompt, SamplingParams(**{"max_tokens": None, **params}))


class BothWays:
    """A detokenizer that looks whole characters up, where the tokenizer allows it, and one that never does: they must agree."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, request: EngineCoreRequest) -> None:
        whole_texts = WholeTexts.both_of(tokenizer)
        self.first = IncrementalDetokenizer.from_new_request(tokenizer, request, whole_texts)
        self.second = IncrementalDetokenizer.from_new_request(tokenizer, request)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        found = self.first.update(new_token_ids, stop_terminated)
        assert found == self.second.update(new_token_ids, stop_terminated)
        return found

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        text = self.first.get_next_output_text(finished, delta)
        assert text == self.second.get_next_output_text(finished, delta)
        return text

    @property
    def output_text(self) -> str:
        assert self.first.output_text == self.second.output_text
        return self.first.output_text

    @property
    def token_ids(self) -> list[int]:
        assert self.first.token_ids == self.second.token_ids
        return self.first.token_ids


def detokenizer_of(tokenizer: Any, prompt: list[int], **params: Any) -> BothWays:
    return BothWays(tokenizer, request_of(prompt, **params))


@pytest.fixture(scope="module")
def smollm() -> PreTrainedTokenizerFast:
    """A stand-in for the recorded tokenizer: the tokens that the cases use, at their ids."""
    chars = byte_level_alphabet()
    vocab = {"".join(chars[byte] for byte in bytes.fromhex(token)): int(i) for i, token in DETOKENIZER["token_bytes"].items()}
    # An added token keeps its id if the model has it too.
    vocab |= {content: int(i) for i, content in DETOKENIZER["special_tokens"].items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(content, special=True) for content in DETOKENIZER["special_tokens"].values()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level_alphabet() -> list[str]:
    """The character that byte-level BPE writes each byte as: itself if it is printable, else the next one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    chars = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    assert set(chars) == set(pre_tokenizers.ByteLevel.alphabet())
    return chars


@pytest.mark.parametrize("case", STOP_STRINGS["cases"], ids=range(len(STOP_STRINGS["cases"])))
def test_oracle_stop_strings(case: dict[str, Any]) -> None:
    found = find_stop_string(case["output_text"], case["new_char_count"], case["stop"], case["include_in_output"])
    assert (list(found) if found else None) == case["result"]


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
@pytest.mark.parametrize("case", DETOKENIZER["cases"], ids=range(len(DETOKENIZER["cases"])))
def test_oracle_text(smollm: PreTrainedTokenizerFast, case: dict[str, Any], kind: RequestOutputKind) -> None:
    params = {name: case[name] for name in ("skip_special_tokens", "spaces_between_special_tokens") if name in case}
    detokenizer = detokenizer_of(smollm, case["prompt_token_ids"], output_kind=kind, **params)
    deltas = []
    for token_id in case["output_token_ids"]:
        assert detokenizer.update([token_id], False) is None
        deltas.append(detokenizer.get_next_output_text(False, True))
    assert deltas == case["deltas"]
    assert detokenizer.output_text == "".join(deltas) == detokenizer.get_next_output_text(True, False)


@pytest.mark.parametrize("case", DETOKENIZER["stop_cases"], ids=range(len(DETOKENIZER["stop_cases"])))
def test_oracle_stopping(smollm: PreTrainedTokenizerFast, case: dict[str, Any]) -> None:
    names = ("stop", "include_stop_str_in_output", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens")
    detokenizer = detokenizer_of(smollm, case["prompt_token_ids"], **{name: case[name] for name in names if name in case})
    for step in case["steps"]:
        assert detokenizer.update(step["new_token_ids"], step["stop_terminated"]) == step["stop_string"]
        assert detokenizer.get_next_output_text(step["finished"], True) == step["delta"]
    assert detokenizer.output_text == case["output_text"]
    assert detokenizer.token_ids == case["output_token_ids"]


# Here we part from the recorded behaviour, which repeats text of the prompt (deltas[1] of the first case: "ab🙂"). Bytes that
# the output does not complete show as U+FFFD, like any others.
SPLIT_PROMPT_DELTAS = [
    ["", "🙂", "!"],
    ["", "你", "", "好"],
    ["", "", "", "��你", "", "好"],
    ["� ok", "\n\n", "\n", " ok", "", "", "👩", "", "\u200d", "", "", "🔬", "e", "", "́"],
]


@pytest.mark.parametrize(
    ("case", "deltas"), list(zip(DETOKENIZER["split_prompt_cases"], SPLIT_PROMPT_DELTAS, strict=True)), ids=range(4)
)
def test_prompt_that_ends_inside_a_character(smollm: PreTrainedTokenizerFast, case: dict[str, Any], deltas: list[str]) -> None:
    detokenizer = detokenizer_of(smollm, case["prompt_token_ids"])
    got = []
    for token_id in case["output_token_ids"]:
        detokenizer.update([token_id], False)
        got.append(detokenizer.get_next_output_text(False, True))
    assert got == deltas


@pytest.fixture(scope="module")
def real_tokenizer() -> PreTrainedTokenizerFast:
    """The recorded tokenizer itself, where the demo model is installed."""
    pytest.importorskip("jaxllm.tokenizer")
    from jaxllm.tokenizer import load_tokenizer
    from jaxllm.weights.source import resolve_model

    try:
        source = resolve_model("smollm2-135m-instruct")
    except ValueError as error:
        pytest.skip(str(error))
    return load_tokenizer(source)


def test_oracle_with_the_real_tokenizer(real_tokenizer: PreTrainedTokenizerFast) -> None:
    for case in DETOKENIZER["cases"]:
        for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
            test_oracle_text(real_tokenizer, case, kind)
    for case in DETOKENIZER["stop_cases"]:
        test_oracle_stopping(real_tokenizer, case)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def token_of_byte(tokenizer: PreTrainedTokenizerFast, byte: int) -> int:
    return tokenizer.convert_tokens_to_ids(byte_level_alphabet()[byte])


def test_ids_only(tokenizer: PreTrainedTokenizerFast) -> None:
    for detokenizer in (detokenizer_of(None, [5]), detokenizer_of(tokenizer, [5], detokenize=False)):
        assert detokenizer.update([7, 8], False) is None
        assert detokenizer.update([9], True) is None
        assert detokenizer.token_ids == [7, 8, 9]
        assert (detokenizer.output_text, detokenizer.get_next_output_text(True, True)) == ("", "")


def test_stop_token_has_no_text_unless_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(tokenizer, "ab!")
    for include, text in ((False, "ab"), (True, "ab!")):
        detokenizer = detokenizer_of(tokenizer, [5], include_stop_str_in_output=include)
        assert detokenizer.update(ids, True) is None
        assert detokenizer.output_text == text
        assert detokenizer.token_ids == ids


def test_text_is_held_back_only_until_it_cannot_be_a_stop_string(tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = detokenizer_of(tokenizer, [5], stop=["wxyz"])
    sent = []
    for char in "abcwxyd":
        detokenizer.update(encode(tokenizer, char), False)
        sent.append(detokenizer.get_next_output_text(False, True))
    assert sent == ["", "", "", "a", "b", "c", "w"]
    assert detokenizer.get_next_output_text(False, False) == "abcw"
    assert detokenizer.get_next_output_text(True, True) == "xyd"


@given(st.text(max_size=30), st.text(min_size=1, max_size=12), st.data())
def test_prompt_and_output_join(text: str, prompt: str, data: st.DataObject) -> None:
    """Cut anywhere between two tokens, the output is the text after the cut; a character that is cut is the output's."""
    tokenizer = TOY
    ids = encode(tokenizer, prompt + text)
    cut = data.draw(st.integers(1, len(ids)))
    before = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
    if "\ufffd" in prompt + text:
        return  # cannot be told from an unfinished character
    detokenizer = detokenizer_of(tokenizer, ids[:cut], skip_special_tokens=False)
    while cut < len(ids):
        step = data.draw(st.integers(1, 3))
        detokenizer.update(ids[cut : cut + step], False)
        assert "\ufffd" not in detokenizer.output_text
        cut += step
    assert before + detokenizer.output_text == prompt + text


@given(st.lists(st.integers(3, 310), max_size=40), st.lists(st.text("abc ", min_size=1, max_size=3), max_size=3), st.booleans())
def test_stop_strings_do_not_depend_on_how_tokens_come(token_ids: list[int], stop: list[str], include: bool) -> None:
    """One at a time or all at once: the same text, the same tokens, the same reason; deltas add up; nothing comes too soon."""
    results = []
    for size in (1, 3, max(1, len(token_ids))):
        detokenizer = detokenizer_of(TOY, [5], stop=stop, include_stop_str_in_output=include)
        sent, found = "", None
        for start in range(0, len(token_ids), size):
            found = detokenizer.update(token_ids[start : start + size], False)
            sent += detokenizer.get_next_output_text(found is not None, True)
            assert detokenizer.output_text.startswith(sent)
            if found is not None:
                break
        sent += detokenizer.get_next_output_text(True, True)
        assert sent == detokenizer.output_text
        assert include or not any(one in sent for one in stop)
        assert (found is not None) or not any(one in sent for one in stop)
        results.append((sent, detokenizer.token_ids, found))
    assert results[0] == results[1] == results[2]


def test_prompt_without_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """Special tokens only, many of them, or half a character and nothing before it."""
    hello = encode(tokenizer, "hello")
    half, rest = "é".encode()
    for prompt, output, text in (
        ([IM_END] * 30, hello, "hello"),
        ([token_of_byte(tokenizer, half)], [token_of_byte(tokenizer, rest)], "é"),
        ([IM_END, token_of_byte(tokenizer, half)], [token_of_byte(tokenizer, rest), *hello], "éhello"),
        ([token_of_byte(tokenizer, half), IM_END], [token_of_byte(tokenizer, rest), *hello], "éhello"),
        ([token_of_byte(tokenizer, rest)] * 30, hello, "hello"),
    ):
        detokenizer = detokenizer_of(tokenizer, prompt)
        detokenizer.update(output, False)
        assert detokenizer.output_text == text


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A decoder as Llama 2 has it: the first space of a text is dropped."""
    vocab = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "!": 3, "<0xF0>": 4, "<0x9F>": 5, "<0x99>": 6, "<0x82>": 7}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("prompt", [[1], [1] * 20, [1] + [8] * 7, [1] + [8] * 20])
def test_spaces_depend_on_the_prompt_and_bytes_wait(prompt: list[int]) -> None:
    """Also where special tokens without text stand between."""
    tokenizer = sentencepiece_like()
    detokenizer = detokenizer_of(tokenizer, prompt)
    deltas = []
    for token_id in [2, 3, 4, 5, 6, 7, 1]:
        detokenizer.update([token_id], False)
        deltas.append(detokenizer.get_next_output_text(False, True))
    assert deltas == [" world", "!", "", "", "", "🙂", " Hello"]


def test_stream_is_reset_when_its_prefix_changes(caplog: pytest.LogCaptureFixture, tokenizer: PreTrainedTokenizerFast) -> None:
    """A decoder that rewrites what it has said: "a" becomes "b" once a "!" follows."""
    rewriting = make_tokenizer()
    rewriting.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Fuse(), decoders.Replace("a!", "b!x")]
    )
    detokenizer = detokenizer_of(rewriting, encode(tokenizer, "x"))
    for char in "qa!z":
        detokenizer.update(encode(tokenizer, char), False)
    assert detokenizer.output_text == "qa!z"
    assert "reset" in caplog.text


def test_undecodable_token_gives_no_text(caplog: pytest.LogCaptureFixture, tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = detokenizer_of(tokenizer, [5])
    detokenizer.update([*encode(tokenizer, "a"), 2**40, *encode(tokenizer, "b")], False)
    assert detokenizer.output_text == "ab"
    assert len(detokenizer.token_ids) == 3
    assert str(2**40) in caplog.text


def test_texts_are_looked_up_only_where_decoders_join_bytes(tokenizer: PreTrainedTokenizerFast) -> None:
    assert WholeTexts.both_of(None) is None
    assert WholeTexts.both_of(sentencepiece_like()) is None
    tables = WholeTexts.both_of(tokenizer)
    assert tables is not None
    with_special, without = tables
    assert (with_special[IM_END], without[IM_END]) == ("<|im_end|>", "")
    (letter,), half = encode(tokenizer, "a"), token_of_byte(tokenizer, "é".encode()[0])
    assert (without[letter], without[half]) == ("a", None)


def test_no_decode_stream_where_characters_are_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    request = request_of(encode(tokenizer, "x"))
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request, WholeTexts.both_of(tokenizer))
    assert isinstance(detokenizer, FastIncrementalDetokenizer)
    half, rest = (token_of_byte(tokenizer, byte) for byte in "é".encode())
    streams = []
    for token_id in (*encode(tokenizer, "a"), half, rest, *encode(tokenizer, "b")):
        detokenizer.update([token_id], False)
        streams.append(detokenizer.stream is not None)
    assert streams == [False, True, False, False]
    assert detokenizer.output_text == "aéb"
