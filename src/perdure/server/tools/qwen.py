"""Qwen 3 Coder's convention: a call's arguments stand between tags, each as text that the tool's schema gives a type.

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

Calls as JSON, which other models of the family write between the same marks, are understood too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.server.protocol.chat import Tool
from perdure.server.tools.hermes import read_json_call
from perdure.server.tools.marked import ReadCall

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def call_reader(tools: Sequence[Tool]) -> ReadCall:
    types = {tool.function.name: _types(tool.function.parameters) for tool in tools}

    def read(inside: str) -> tuple[str, str] | None:
        found = _FUNCTION.fullmatch(inside)
        if found is None:
            return read_json_call(inside)
        name, body = found[1].strip(), found[2]
        if _PARAMETER.sub("", body).strip():
            return None  # a parameter that is not whole
        kinds = types.get(name, {})
        arguments = {key.strip(): _value(text, kinds.get(key.strip())) for key, text in _PARAMETER.findall(body)}
        return name, json.dumps(arguments, ensure_ascii=False)

    return read


def _types(schema: Mapping[str, Any] | None) -> dict[str, object]:
    properties = (schema or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: one.get("type") for name, one in properties.items() if isinstance(one, Mapping)}


def _value(text: str, kind: object) -> object:
    """Text stays text where the schema says so, or where it is no JSON."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
