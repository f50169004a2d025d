"""`StructuredOutputsParams`: what the output must be, said in one of four ways. Plain values; names are vLLM's.

- Wrong by itself is refused here: none or several given, no JSON, an empty list, more than `grammar_limits` allows.
  Whether a grammar can be compiled, and whether anything satisfies it, is found out beside the engine's loop, before
  the request gets its first page.
- Equal ones are compiled once: they are compared and hashed by value.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from perdure.api.endless import is_endless
from perdure.api.errors import InvalidValue
from perdure.api.grammar_limits import MAX_BYTES, check_grammar, check_pattern, check_schema

Kind = Literal["json", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar")
SHOWN_LENGTH = 120
_SHORT = reprlib.Repr()
_SHORT.maxstring = SHOWN_LENGTH
"""For messages: bounded in length and depth."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of json, regex, choice, grammar, json_object.

    json: a JSON schema, a dictionary, a bool or text. json_object=True: any object, which is json={"type": "object"}.
    regex: a pattern that the whole output matches. choice: the output is one of these texts. grammar: in Lark's or in
    GBNF's notation, where the start rule is `start`, or `root`.
    disable_any_whitespace: JSON without space between its parts. Else a space may stand there, or a line break with an
    indent of at most 32 characters.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValue(f"structured_outputs.{name}={getattr(self, name)!r} is not a bool")
        given = [name for name in KINDS if getattr(self, name) is not None] + ["json_object"] * self.json_object
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidValue(f"structured_outputs takes one of {', '.join(KINDS)}, json_object; {found} given")
        self._freeze("json", _schema(self.json))
        self._freeze("choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidValue(f"structured_outputs.{name}={_SHORT.repr(value)} is not a non-empty string")
        texts = self.choice if self.choice is not None else (self.text,)
        size = sum(_num_bytes(self.kind, text) for text in texts)
        if size > MAX_BYTES[self.kind]:
            raise InvalidValue(f"structured_outputs.{self.kind} has {size} bytes, more than {MAX_BYTES[self.kind]}")
        if self.regex is not None:
            check_pattern(self.regex)
        if self.grammar is not None:
            check_grammar(self.grammar)

    @property
    def kind(self) -> Kind:
        return "json" if self.json_object else next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """What was given, as one text."""
        if self.json_object:
            return '{"type": "object"}'
        value = getattr(self, self.kind)
        return json.dumps(list(value), ensure_ascii=False) if isinstance(value, tuple) else str(value)

    @property
    def shown(self) -> str:
        """Field and value for a message, not too long."""
        text = self.text
        text = text if len(text) <= SHOWN_LENGTH else f"{text[:SHOWN_LENGTH]}... ({len(text)} characters)"
        return f"structured_outputs.{self.kind}={text if self.kind in ('json', 'choice') else repr(text)}"

    def _freeze(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)


def structured(given: Any) -> StructuredOutputsParams | None:
    """The form that is kept of what a caller gave: itself, or a dictionary of its fields."""
    if given is None or isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, Mapping):
        shown = _SHORT.repr(given)
        raise InvalidValue(f"structured_outputs={shown} is neither a StructuredOutputsParams nor a dictionary")
    known = StructuredOutputsParams.__struct_fields__
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InvalidValue(f"structured_outputs has no field {unknown[0]!r}; its fields: {', '.join(known)}")
    return StructuredOutputsParams(**given)


def _schema(given: Any) -> str | None:
    """As JSON. The order of its keys stays: it is the order in which an object's properties are written."""
    if given is None:
        return None
    if not isinstance(given, (str, bool, Mapping)):
        raise InvalidValue(f"structured_outputs.json={_SHORT.repr(given)} is neither a dictionary, a bool nor text")
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValue(f"structured_outputs.json={_SHORT.repr(given)} is no JSON: {error}") from None
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidValue(f"structured_outputs.json={text[:SHOWN_LENGTH]} is no JSON schema, which is an object")
    check_schema(schema)
    if is_endless(schema):
        raise InvalidValue(f"structured_outputs.json={text[:SHOWN_LENGTH]} requires itself within itself, without end")
    return given if isinstance(given, str) else text


def _choices(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidValue(f"structured_outputs.choice={_SHORT.repr(given)} is not a list of texts")
    if not given:
        raise InvalidValue("structured_outputs.choice=[] leaves nothing to choose")
    for one in given:
        if not isinstance(one, str) or not one:
            raise InvalidValue(f"structured_outputs.choice holds {_SHORT.repr(one)}, which is not a non-empty string")
    return tuple(given)


def _num_bytes(kind: Kind, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidValue(f"structured_outputs.{kind} holds {text[:SHOWN_LENGTH]!r}: not valid Unicode") from None
