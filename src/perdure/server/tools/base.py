"""What a parser of calls gives, and how JSON values are taken from a text that may go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Said(NamedTuple):
    """Text of the answer."""

    text: str


class Called(NamedTuple):
    """A call, or more of one: the first of a number has a name, each has further JSON text of its arguments."""

    number: int
    name: str | None
    arguments: str


Piece = Said | Called


class Parser(Protocol):
    def push(self, text: str) -> list[Piece]:
        """What became certain with this further text."""
        ...

    def end(self) -> list[Piece]:
        """The rest, when no text comes any more."""
        ...


_DECODER = json.JSONDecoder()


def json_value(text: str, start: int) -> tuple[Any, int] | None:
    """The value that begins there and where it ends; None = it is not whole, or none."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def call_of(value: Any, names: Sequence[str] = ("arguments", "parameters")) -> tuple[str, str] | None:
    """Name and arguments, if this value says a call."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments: Any = next((value[name] for name in names if name in value), {})
    if not isinstance(arguments, Mapping):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def overlap(text: str, mark: str) -> int:
    """Length of the longest proper beginning of the mark that the text ends with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
