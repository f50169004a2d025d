"""Calls of tools in a model's text: where they begin, what they say, and what is text after all.

A parser reads an output in pieces of any size and gives what is certain. Cutting the text elsewhere changes nothing but
the sizes of pieces, and nothing of the text is lost: what began like a call and is none is content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure import AsyncLLM, PerdureError
from perdure.server.protocol.chat import Tool
from perdure.server.tools.base import Parser
from perdure.server.tools.hermes import read_json_call
from perdure.server.tools.llama3_json import Llama3JsonParser
from perdure.server.tools.marked import MarkedParser
from perdure.server.tools.qwen import call_reader

CONVENTIONS = ("hermes", "llama3_json", "qwen")

_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_0000", "type": "function", "function": {"name": "probe", "arguments": {"key": "value"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_0000", "name": "probe", "content": "1"},
]


def parser_for(convention: str, tools: Sequence[Tool]) -> Parser:
    if convention == "llama3_json":
        return Llama3JsonParser()
    return MarkedParser(read_json_call if convention == "hermes" else call_reader(tools))


def found_convention(llm: AsyncLLM, wanted: str) -> str | None:
    """How this model writes calls: as it was said, or as its template writes those of the past; None = it has none."""
    if wanted != "auto":
        return None if wanted == "none" else wanted
    if llm.tokenizer is None:
        return None
    try:
        text = llm.tokenizer.decode(llm.lay_out(_PROBE), False)
    except PerdureError:
        return None
    if "<function=probe>" in text:
        return "qwen"
    if "<tool_call>" in text:
        return "hermes"
    return "llama3_json" if '"name": "probe", "parameters"' in text else None
