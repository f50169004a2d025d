"""End ids that a grammar names, and whether there is a way through it that does not go on after one.

Of Lark's notation it reads rules, alternatives, brackets and signs of repetition. What it does not know (a pattern,
what is imported or written in JSON) it takes for a text that may be empty: only what certainly goes on is found out.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|\#[^\n]*|[ \t\r]+|\n(?=\s*\|))|(?P<line>\n)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)|(?P<pattern>/(?:\\.|[^/\\\n])+/[a-z]*)|(?P<special><[^<>\s]+>)
    |(?P<repeat>[*+?]|\{[\d,\s]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?)|(?P<sign>[|():\[\]])
    |(?P<attributes>\[[^\]\n]*\](?=\s*:))|(?P<name>[?!]?[A-Za-z_][\w.-]*)|(?P<other>.)""",
    re.X,
)
_ATTRIBUTES = re.compile(r"\[[^\]\n]*\](?=\s*:)")
_IS_LARK = re.compile(r"^[ \t]*start\b[^\n:]*:", re.M)


class _Lexeme(NamedTuple):
    kind: str
    text: str


Kind = Literal["text", "end", "unknown", "name", "all", "any", "optional", "repeated"]


@dataclass(frozen=True, slots=True)
class Part:
    """Of a rule. all: its parts one after the other; any: one of them; optional: its one part, or nothing."""

    kind: Kind
    name: str = ""
    parts: tuple[Part, ...] = ()


class _Can(NamedTuple):
    """What can be written without going on after an end id. plain: something without one. ending: something that has at
    most one, at its end. be_empty: for all that is known."""

    plain: bool
    ending: bool
    be_empty: bool


def goes_on_after(grammar: str, end_names: Container[str]) -> bool:
    """Whether every way through the grammar certainly goes on after an end id. end_names: as a grammar writes them,
    `</s>` or `<[2]>`. False where the grammar cannot be read."""
    if not _IS_LARK.search(grammar):
        return False
    ends, texts = _rules(grammar, end_names), _rules(grammar, ())
    return "start" in ends and not _can_be_written(ends) and _can_be_written(texts)


def _can_be_written(rules: dict[str, Part]) -> bool:
    known = {name: _Can(False, False, False) for name in rules}
    while True:
        found = {name: _can(part, known) for name, part in rules.items()}
        if found == known:
            return found["start"].ending
        known = found


def _can(part: Part, rules: dict[str, _Can]) -> _Can:
    inner = [_can(one, rules) for one in part.parts]
    match part.kind:
        case "text":
            return _Can(True, True, False)
        case "end":
            return _Can(False, True, False)
        case "name":
            return rules.get(part.name, _Can(True, True, True))
        case "all":
            plain = all(one.plain for one in inner)
            ends = any(
                one.ending and all(p.plain for p in inner[:at]) and all(r.be_empty for r in inner[at + 1 :])
                for at, one in enumerate(inner)
            )
            return _Can(plain, plain or ends, all(one.be_empty for one in inner))
        case "any":
            return _Can(*(any(column) for column in zip(*inner, strict=True)))
        case "optional":
            return _Can(True, True, True)
        case "repeated":
            return inner[0]
    return _Can(True, True, True)


def _rules(grammar: str, end_names: Container[str]) -> dict[str, Part]:
    """By name: what follows a name and a colon at the beginning of a line."""
    lexemes = [_Lexeme(found.lastgroup or "", found[0]) for found in _TOKEN.finditer(_ATTRIBUTES.sub("", grammar))]
    lexemes = [one for one in lexemes if one.kind != "skip"]
    lines: list[list[_Lexeme]] = [[]]
    for one in lexemes:
        if one.kind == "line":
            lines.append([])
        else:
            lines[-1].append(one)
    found: dict[str, Part] = {}
    for line in lines:
        if len(line) > 2 and line[0].kind == "name" and line[1].text == ":":
            found[line[0].text.lstrip("?!")] = _any(iter(line[2:]), end_names)
    return found


def _any(lexemes: Iterator[_Lexeme], end_names: Container[str]) -> Part:
    """Up to the bracket that closes it, or the end."""
    ways: list[list[Part]] = [[]]
    for one in lexemes:
        parts = ways[-1]
        match one:
            case ("sign", "|"):
                ways.append([])
            case ("sign", "("):
                parts.append(_any(lexemes, end_names))
            case ("sign", "["):
                parts.append(Part("optional", parts=(_any(lexemes, end_names),)))
            case ("sign", ")" | "]"):
                break
            case ("repeat", sign) if parts:
                may_be_none = sign[0] in "*?" or (not re.match(r"\D*[1-9]", sign) and sign != "+")
                parts[-1] = Part("optional" if may_be_none else "repeated", parts=(parts[-1],))
            case ("text", text):
                parts.append(Part("text" if text.strip('i"') else "unknown"))
            case ("special", name):
                parts.append(Part("end" if name in end_names else "text"))
            case ("name", name):
                parts.append(Part("name", name))
            case _:
                parts.append(Part("unknown"))
    return Part("any", parts=tuple(Part("all", parts=tuple(way)) for way in ways))
