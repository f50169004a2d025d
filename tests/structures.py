"""Random things to be held to, and whether a text is one: by `jsonschema` and `re`, which know nothing of grammars."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import strategies as st
from jsonschema import Draft202012Validator

KEYS = ("a", "b", "long name", "\u00e9")


def _bounds(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(lambda pair: (min(pair), max(pair)))


LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    _bounds(-300, 300).map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[1]}),
    _bounds(0, 6).map(lambda b: {"type": "string", "minLength": b[0], "maxLength": b[1]}),
    st.lists(
        st.sampled_from(["red", "dark green", 'q"uote', 7, None, True]), min_size=1, max_size=4, unique_by=str
    ).map(lambda values: {"enum": values}),
    st.sampled_from(["^[a-z]{1,4}$", "^(on|off)$", "^[0-9]{2}-[xyz]$"]).map(lambda p: {"type": "string", "pattern": p}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 1.5}, {"type": ["boolean", "null"]}]),
)


def _object(properties: dict[str, Any], optional: set[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, _bounds(0, 3)).map(
            lambda it: {"type": "array", "items": it[0], "minItems": it[1][0], "maxItems": it[1][1]}
        ),
        st.builds(
            _object,
            st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
            st.sets(st.sampled_from(KEYS), max_size=2),
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=5,
)
"""Bounded ones: every value of them has a bounded length."""

PATTERNS: st.SearchStrategy[str] = st.recursive(
    st.sampled_from(["a", "b", "xy", "[0-9]", "[^a-y ]", "\\.", " ", "\u00e9", "(?:\u4e16|\U0001f680)", "[A-C]"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda some: f"(?:{'|'.join(some)})"),
        st.tuples(inner, st.sampled_from(["?", "{0,3}", "{2}", "{1,2}"])).map(lambda it: f"(?:{it[0]}){it[1]}"),
    ),
    max_leaves=6,
)
"""Bounded ones."""

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="z"), min_size=1, max_size=5)
"""Without the letter that is an end id of one of the tokenizers: where nothing else spells it, there is no way on."""

ASKED: st.SearchStrategy[dict[str, Any]] = st.one_of(
    SCHEMAS.map(lambda schema: {"json": schema}),
    st.tuples(SCHEMAS, st.booleans()).map(lambda it: {"json": json.dumps(it[0]), "disable_any_whitespace": it[1]}),
    PATTERNS.map(lambda pattern: {"regex": pattern}),
    st.lists(TEXTS, min_size=1, max_size=4).map(lambda choices: {"choice": choices}),
)


def satisfies(text: str, asked: dict[str, Any]) -> bool:
    """Whether the whole text is what was asked."""
    if "choice" in asked:
        return text in asked["choice"]
    if "regex" in asked:
        return re.fullmatch(asked["regex"], text) is not None
    schema = json.loads(asked["json"]) if isinstance(asked["json"], str) else asked["json"]
    if asked.get("disable_any_whitespace") and text != _compact(text):
        return False
    return bool(Draft202012Validator(schema).is_valid(json.loads(text)))


def _compact(text: str) -> str:
    """The same without what stands outside of strings."""
    return re.sub(r'("(?:[^"\\]|\\.)*")|\s+', lambda match: match[1] or "", text)
