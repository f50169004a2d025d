"""Hermes' convention, also of Qwen 2.5 and 3: <tool_call> {"name": ..., "arguments": {...}} </tool_call>."""

from __future__ import annotations

from perdure.server.tools.base import call_of, json_value


def read_json_call(inside: str) -> tuple[str, str] | None:
    text = inside.strip()
    found = json_value(text, 0)
    return call_of(found[0]) if found is not None and found[1] == len(text) else None
