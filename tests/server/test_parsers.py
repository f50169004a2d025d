"""Parsers of calls and of reasoning: however the text is cut, the same is read, and nothing of it is lost."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.server.answer import Answer, joined
from perdure.server.protocol.chat import ChatMessage, Function, Tool
from perdure.server.reasoning import ThinkSplitter, begins_inside
from perdure.server.tools import parser_for
from perdure.server.tools.base import Parser
from perdure.server.tools.forced import ListParser, NamedParser

ADD = Tool(
    function=Function(name="add", parameters={"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}})
)
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)
JSON = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'

Calls = list[tuple[str, object]]

READ: list[tuple[str, str, str, Calls]] = [
    ("hermes", "no call", "no call", []),
    ("hermes", "spaces  \n", "spaces  \n", []),
    ("hermes", JSON, "", [("add", {"a": 1})]),
    ("hermes", f"so\n{JSON}\n{JSON}\n", "so", [("add", {"a": 1})] * 2),
    ("hermes", JSON.removesuffix("</tool_call>"), "", [("add", {"a": 1})]),
    ("hermes", f"{JSON}then", "then", [("add", {"a": 1})]),
    ("hermes", 'x <tool_call>{"name": "add", "argu', 'x <tool_call>{"name": "add", "argu', []),
    ("hermes", "x <tool_call>{}</tool_call> y", "x <tool_call>{}</tool_call> y", []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("qwen", XML, "", [("add", {"a": 1, "s": "2"})]),
    ("qwen", f"{JSON}{XML}", "", [("add", {"a": 1}), ("add", {"a": 1, "s": "2"})]),
    ("qwen", XML[: XML.index("</parameter>")], XML[: XML.index("</parameter>")], []),
    ("llama3_json", LLAMA, "", [("add", {"a": 1})]),
    ("llama3_json", f" <|python_tag|>{LLAMA}; {LLAMA}\n", "", [("add", {"a": 1})] * 2),
    ("llama3_json", "plain {}", "plain {}", []),
    ("llama3_json", '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    ("llama3_json", LLAMA[:-2], LLAMA[:-2], []),
    ("llama3_json", f"{LLAMA} and more", " and more", [("add", {"a": 1})]),
    ("list", f"[{LLAMA}, {LLAMA}]", "", [("add", {"a": 1})] * 2),
    ("list", f"[{LLAMA}, {LLAMA[:9]}", f", {LLAMA[:9]}", [("add", {"a": 1})]),
    ("named", '{"a": 1}', "", [("add", {"a": 1})]),
]


def make(kind: str) -> Parser:
    if kind == "list":
        return ListParser()
    return NamedParser("add") if kind == "named" else parser_for(kind, [ADD])


def read(answer: Answer, pieces: list[str]) -> ChatMessage:
    deltas = [delta for piece in pieces for delta in answer.push(piece)]
    return joined([*deltas, *answer.end()])


def cut(text: str, at: list[int]) -> list[str]:
    ends = sorted({min(one, len(text)) for one in at} | {0, len(text)})
    return [text[first:end] for first, end in pairwise(ends)]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), READ)
def test_what_is_read(kind: str, text: str, content: str, calls: Calls) -> None:
    whole = read(Answer("x", make(kind), None), [text])
    letters = read(Answer("x", make(kind), None), list(text))
    assert whole == letters
    found = [(call.function.name, json.loads(call.function.arguments)) for call in whole.tool_calls or []]
    assert found == calls and (whole.content or "") == content


@given(
    kind=st.sampled_from(["hermes", "qwen", "llama3_json", "list"]),
    parts=st.lists(
        st.sampled_from(
            [JSON, XML, LLAMA, "<think>", "</think>", "<tool_call>", "</tool_call>", "; ", "\n", "text", "[", "{"]
        )
    ),
    at=st.lists(st.integers(0, 200)),
    is_inside=st.booleans(),
)
def test_cutting_a_text_elsewhere_changes_nothing(kind: str, parts: list[str], at: list[int], is_inside: bool) -> None:
    text = "".join(parts)
    whole = read(Answer("x", make(kind), ThinkSplitter(is_inside)), [text])
    assert read(Answer("x", make(kind), ThinkSplitter(is_inside)), cut(text, at)) == whole


@pytest.mark.parametrize(
    ("is_inside", "text", "reasoning", "content"),
    [
        (False, "<think>a\n</think>\n\nb", "a", "b"),
        (False, "b <think>a</think>", "", "b <think>a</think>"),
        (False, "<thi", "", "<thi"),
        (True, "a</think>b</think>", "a", "b</think>"),
        (True, "\na </thin", "a </thin", ""),
        (True, "</think>\n", "", ""),
    ],
)
def test_reasoning(is_inside: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        message = read(Answer("x", None, ThinkSplitter(is_inside)), pieces)
        assert (message.reasoning_content or "", message.content) == (reasoning, content)


def test_where_a_prompt_ends() -> None:
    assert begins_inside("x<think>\n") and not begins_inside("<think>\n\n</think>\n") and not begins_inside("x")
