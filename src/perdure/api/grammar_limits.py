"""How large and how deep a schema, pattern or grammar may be. Checked where it is built, on its text alone.

- What compiles them follows nesting and references by recursion, on a stack of a fixed size, and unfolds counted
  repetitions. Within these limits it has room and time.
- A text is read only as far as brackets, names and counts go; what else is wrong is found by whoever compiles it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from perdure.api.errors import InvalidValue

MAX_BYTES = {"json": 4_000_000, "choice": 4_000_000, "regex": 100_000, "grammar": 400_000}
"""Of one schema, pattern or grammar, or of all choices together."""
MAX_DEPTH = 100
"""Of objects and lists of a schema, or groups of a pattern, within each other."""
MAX_PARTS = 10_000
"""Objects and lists of a schema: no way through its references is longer."""
MAX_BRACKETS = 25
"""Of a grammar within each other."""
MAX_RULES = 1000
"""Rules and terminals of a grammar."""
MAX_REPEATS = 2000
"""Signs of repetition (*, +, ?, {}) in a pattern or a grammar."""
MAX_UNFOLDED = 10_000
"""Letters and classes of a pattern, each as often as the counts around it say."""

_PATTERN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|(?P<open>\((?:\?[\w<>-]*:?)?)|(?P<close>\))|(?P<repeat>[*+?]|\{[\d,\s]+\})|.", re.S
)
"""A pattern's parts: an escape, a class, a bracket, a repetition, a letter."""
_LARK = re.compile(
    r'//[^\n]*|"(?:\\.|[^"\\\n])*"|(?P<regex>/(?:\\.|[^/\\\n])+/)|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<repeat>[*+?])'
)
_GBNF = re.compile(
    r'#[^\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|(?P<open>[({])|(?P<close>[)}])|(?P<repeat>[*+?])|(?P<regex>(?!))'
)
_IS_LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*:)", re.M)
_RULE = re.compile(r'^[ \t]*[?!]?[A-Za-z_][\w.-]*[^\n"/:|(]*:', re.M)


def check_schema(schema: Any) -> None:
    """Raises `InvalidValue`."""
    num_parts = 0
    level: list[Any] = [schema]
    for depth in range(1, MAX_DEPTH + 2):
        level = [part for part in level if isinstance(part, (Mapping, list, tuple))]
        num_parts += len(level)
        if not level:
            return
        if depth > MAX_DEPTH:
            raise InvalidValue(f"structured_outputs.json is nested more than {MAX_DEPTH} levels deep")
        if num_parts > MAX_PARTS:
            raise InvalidValue(f"structured_outputs.json has more than {MAX_PARTS} objects and lists")
        for part in level:
            for pattern in _patterns_of(part):
                check_pattern(pattern, "structured_outputs.json has a pattern that")
        level = [inner for part in level for inner in (part.values() if isinstance(part, Mapping) else part)]


def _patterns_of(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        if isinstance(pattern := part.get("pattern"), str):
            yield pattern
        if isinstance(named := part.get("patternProperties"), Mapping):
            yield from named


def check_pattern(pattern: str, named: str = "structured_outputs.regex") -> None:
    """named: the beginning of what is said. Raises `InvalidValue`."""
    num_repeats = 0
    around, size, last = list[int](), 0, 0
    """Sizes of the groups begun, of the one that is open, and of its last part, which is in it already."""
    for part in _PATTERN.finditer(pattern):
        match part.lastgroup:
            case "open":
                around.append(size)
                size, last = 0, 0
            case "close":
                last = size
                size += around.pop() if around else 0
            case "repeat":
                num_repeats += 1
                size += last * (times := _times(part[0]) - 1)
                last += last * times
            case _:
                last = 1
                size += 1
        if len(around) > MAX_DEPTH:
            raise InvalidValue(f"{named} is nested more than {MAX_DEPTH} groups deep")
        if size > MAX_UNFOLDED:
            raise InvalidValue(f"{named} unfolds to more than {MAX_UNFOLDED} parts, counted repetitions written out")
        if num_repeats > MAX_REPEATS:
            raise InvalidValue(f"{named} has more than {MAX_REPEATS} repetitions")


def _times(repeat: str) -> int:
    """How often at most, or at least where there is no most."""
    counts = [int(number) for number in re.findall(r"\d{1,9}", repeat)]
    return max([1, *counts])


def check_grammar(text: str) -> None:
    """In Lark's notation or in GBNF's. Raises `InvalidValue`."""
    num_rules = sum(1 for _ in _RULE.finditer(text))
    if num_rules > MAX_RULES:
        raise InvalidValue(f"structured_outputs.grammar has {num_rules} rules and terminals, more than {MAX_RULES}")
    depth, num_repeats, num_parts = 0, 0, 0
    for part in (_LARK if _IS_LARK.search(text) else _GBNF).finditer(text):
        match part.lastgroup:
            case "open":
                depth, num_parts = depth + 1, num_parts + 1
            case "close":
                depth -= 1
            case "repeat":
                num_repeats += 1
            case "regex":
                check_pattern(part[0][1:-1], "structured_outputs.grammar has a pattern that")
        if depth > MAX_BRACKETS:
            raise InvalidValue(f"structured_outputs.grammar is nested more than {MAX_BRACKETS} brackets deep")
        if num_repeats > MAX_REPEATS:
            raise InvalidValue(f"structured_outputs.grammar has more than {MAX_REPEATS} repetitions")
        if num_parts > MAX_PARTS:
            raise InvalidValue(f"structured_outputs.grammar has more than {MAX_PARTS} brackets")
