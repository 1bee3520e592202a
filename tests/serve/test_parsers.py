"""Reasoning and tool calls out of text, however the text is cut."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.serve.parsers import OutputParser, Piece
from jaxllm.serve.parsers.pieces import held_back


def parse(pieces_of_text: Sequence[str], prompt: str = "", **kwargs) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, [(name, arguments)])"""
    parser = OutputParser(prompt, **kwargs)
    pieces: list[Piece] = []
    for text in pieces_of_text:
        pieces += parser.feed(text)
    pieces += parser.finish()
    assert all(piece.text for piece in pieces)
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "call":
            assert piece.call == len(calls)
            assert piece.call_id
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[piece.call][1] += piece.text
    joined = {kind: "".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("reasoning", "content")}
    return joined["reasoning"], joined["content"], [(name, arguments) for name, arguments in calls]


HERMES = [
    ("Hello", ("Hello", [])),
    ("", ("", [])),
    ("  \n", ("  \n", [])),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ("", [("f", '{"a": 1}')])),
    ('<tool_call>{"arguments": {"a": [1, "}"]}, "name": "f"}</tool_call>', ("", [("f", '{"a": [1, "}"]}')])),
    (
        'Let me see.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {"b": null}}'
        "</tool_call>\n",
        ("Let me see.", [("f", "{}"), ("g", '{"b": null}')]),
    ),
    ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    ('<tool_call>{"type": "function", "name": "f", "arguments": {"q": "a \\" b"}}', ("", [("f", '{"q": "a \\" b"}')])),
    ('<tool_call>{"name": "f", "arguments": {"a": "unfini', ("", [("f", '{"a": "unfini')])),
    ("<tool_call>nonsense</tool_call>", ("<tool_call>nonsense</tool_call>", [])),
    ('<tool_call>{"nam', ('<tool_call>{"nam', [])),
    ("a < b <tool", ("a < b <tool", [])),
    ("<tool_call>", ("<tool_call>", [])),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call> Done.', (" Done.", [("f", "{}")])),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', [])),
    ('<tool_call>{"name": "f", "arguments": {"ü": "\\u00fc–"}}</tool_call>', ("", [("f", '{"ü": "\\u00fc–"}')])),
    ('<tool_call>{"name": "f", "arguments": tru}</tool_call>', ("", [("f", "tru")])),
]

LLAMA = [
    ("Hello {", ("Hello {", [])),
    ("", ("", [])),
    ('{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    ('{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"b": 2}}', ("", [("f", "{}"), ("g", '{"b": 2}')])),
    ('{"answer": 42}', ('{"answer": 42}', [])),
    ('{"answer": 42} indeed', ('{"answer": 42} indeed', [])),
    ('{"na', ('{"na', [])),
    ("<|python", ("<|python", [])),
    ("<|python_tag|>", ("", [])),
    ("   ", ("   ", [])),
    ('{"name": "f", "parameters": {"a": 1}} and more', ("and more", [("f", '{"a": 1}')])),
]


@pytest.mark.parametrize(("text", "expected"), HERMES)
def test_hermes(text: str, expected):
    assert parse([text], tool_parser="hermes")[1:] == expected
    assert parse(list(text), tool_parser="hermes")[1:] == expected


@pytest.mark.parametrize(("text", "expected"), LLAMA)
def test_llama3_json(text: str, expected):
    assert parse([text], tool_parser="llama3_json")[1:] == expected
    assert parse(list(text), tool_parser="llama3_json")[1:] == expected


def test_arguments_stream_as_they_come():
    parser = OutputParser("", tool_parser="hermes")
    parser.feed('<tool_call>{"name": "f", "arguments": {"city": ')
    pieces = parser.feed('"Par')
    assert [(piece.kind, piece.text) for piece in pieces] == [("arguments", '"Par')]


def test_only_the_first_call_without_parallel_calls():
    text = '{"name": "f", "parameters": {}};{"name": "g", "parameters": {}}'
    assert parse([text], tool_parser="llama3_json", parallel_tool_calls=False)[2] == [("f", "{}")]


THINK = [
    # text, prompt, deepseek_r1, qwen3
    ("<think>\nhm\n</think>\n\nYes", "", ("\nhm\n", "\n\nYes"), ("\nhm\n", "\n\nYes")),
    ("hm</think>Yes", "", ("hm", "Yes"), ("", "hm</think>Yes")),
    ("hm</think>Yes", "…<think>\n", ("hm", "Yes"), ("hm", "Yes")),
    ("Yes", "…<think>\n\n</think>\n\n", ("", "Yes"), ("", "Yes")),
    ("Yes", "", ("Yes", ""), ("", "Yes")),
    ("<think>never ends", "", ("never ends", ""), ("never ends", "")),
    ("<thi", "", ("<thi", ""), ("", "<thi")),
    ("<think>a</thin", "", ("a</thin", ""), ("a</thin", "")),
    ("  <think>a</think>b", "", ("a", "b"), ("a", "b")),
    ("", "", ("", ""), ("", "")),
]


@pytest.mark.parametrize(("text", "prompt", "deepseek", "qwen"), THINK)
def test_reasoning(text: str, prompt: str, deepseek, qwen):
    for name, expected in (("deepseek_r1", deepseek), ("qwen3", qwen)):
        assert parse([text], prompt, reasoning_parser=name)[:2] == expected
        assert parse(list(text), prompt, reasoning_parser=name)[:2] == expected


def test_reasoning_can_be_left_out():
    assert parse(["<think>a</think>b"], reasoning_parser="qwen3", include_reasoning=False) == ("", "b", [])


def test_calls_are_looked_for_outside_of_thoughts_only():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>{call}</think>{call}"
    assert parse([text], reasoning_parser="qwen3", tool_parser="hermes") == (call, "", [("f", "{}")])


SNIPPETS = st.sampled_from([
    "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": {"a": "x y"}}',
    '{"name": "g", "parameters": ', "[1, 2]", "}", "{", '"', "\\", " ", "\n", ";", ",", ":", "<", "|", "<|python_tag|>", "text",
    "ü", '"name"', '"arguments"', "3", "null",
])  # fmt: skip


@given(
    st.lists(SNIPPETS, max_size=12).map("".join),
    st.data(),
    st.sampled_from([None, "hermes", "llama3_json"]),
    st.sampled_from([None, "deepseek_r1", "qwen3"]),
)
def test_cuts_do_not_matter(text: str, data: st.DataObject, tools: str | None, reasoning: str | None):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse([text], tool_parser=tools, reasoning_parser=reasoning)
    assert parse(parts, tool_parser=tools, reasoning_parser=reasoning) == whole
    if tools is None and reasoning is None:
        assert whole == ("", text, [])


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
        ),
    ),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_every_call_that_json_can_say_is_read(name: str, value, indent: int | None, ascii: bool):
    arguments = {"value": value}
    text = json.dumps({"name": name, "arguments": arguments}, indent=indent, ensure_ascii=ascii)
    [(read, read_arguments)] = parse([f"<tool_call>{text}</tool_call>"], tool_parser="hermes")[2]
    assert (read, json.loads(read_arguments)) == (name, arguments)
    [(read, read_arguments)] = parse([text], tool_parser="llama3_json")[2]
    assert (read, json.loads(read_arguments)) == (name, arguments)


def test_held_back():
    assert held_back("abc<to", "<tool_call>") == 3
    assert held_back("abc", "<tool_call>") == 0
    assert held_back("<tool_call", "<tool_call>") == 10
    assert held_back("", "<tool_call>") == 0
