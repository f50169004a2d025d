"""Calls that the caller forces: the output is made to be JSON of their schema, whatever the model's own convention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure import InvalidValue
from perdure.server.protocol.chat import Tool
from perdure.server.tools.base import Called, Piece, Said, call_of, json_value

ANY_ARGUMENTS = {"type": "object"}


def schema_of(tool: Tool) -> dict[str, Any]:
    return {"json": tool.function.parameters or ANY_ARGUMENTS}


def schema_of_any(tools: Sequence[Tool], most: int | None) -> dict[str, Any]:
    """A list of calls, `most` at most. Definitions that schemas share by name are one place's."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.function.parameters or ANY_ARGUMENTS)
        for place in ("$defs", "definitions"):
            for name, one in parameters.pop(place, {}).items():
                known = definitions.setdefault(place, {})
                if known.setdefault(name, one) != one:
                    raise InvalidValue(
                        f"tools define {place}/{name} in two ways: with tool_choice='required' it is one"
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    limit = {} if most is None else {"maxItems": most}
    return {"json": {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, **definitions}}


class NamedParser:
    """All the text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        name, self._name = self._name, None
        return [Called(0, name, text)]

    def end(self) -> list[Piece]:
        return []


class ListParser:
    """A JSON list of calls. One that the length limit cut off is text."""

    def __init__(self) -> None:
        self._left = ""
        self._num_calls = 0

    def push(self, text: str) -> list[Piece]:
        self._left += text
        found: list[Piece] = []
        while True:
            rest = self._left.lstrip(" \t\r\n" + (",]" if self._num_calls else "["))
            value = json_value(rest, 0) if rest.startswith("{") else None
            call = None if value is None else call_of(value[0], ("parameters",))
            if value is None or call is None:
                break
            found.append(Called(self._num_calls, *call))
            self._num_calls += 1
            self._left = rest[value[1] :]
        return found

    def end(self) -> list[Piece]:
        left, self._left = self._left, ""
        return [Said(left)] if left.strip(" \t\r\n,]") else []
