"""Whether a JSON schema can be satisfied by something that ends: one that requires itself within itself cannot.

- A schema has a value if all that it requires has one; whatever is found so, starting from nothing, has one.
- Only what is certain is refused. Every other contradiction is found by whoever compiles the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_ROUNDS = 20
"""Of looking for values, inner schemas before outer ones; a schema that needs more is left to whoever compiles it."""


def is_endless(schema: Any) -> bool:
    """Whether every value of the schema would have to hold another one of its kind, for ever."""
    order = _inner_first(schema)
    have_value = set[int]()
    for _ in range(MAX_ROUNDS):
        num_known = len(have_value)
        for part in order:
            if id(part) not in have_value and _has_value(part, schema, have_value):
                have_value.add(id(part))
        if id(schema) in have_value:
            return False
        if len(have_value) == num_known:
            return True
    return False


def _inner_first(schema: Any) -> list[Any]:
    """All schemas within this one or referred to, each once."""
    seen, outer_first, left = {id(schema)}, list[Any](), [schema]
    while left:
        part = left.pop()
        outer_first.append(part)
        for inner in _parts_of(part, schema):
            if id(inner) not in seen:
                seen.add(id(inner))
                left.append(inner)
    return outer_first[::-1]


def _parts_of(part: Any, root: Any) -> Iterator[Any]:
    if not isinstance(part, Mapping):
        return
    if (target := _target(part, root)) is not None:
        yield target
    for name in ("allOf", "anyOf", "oneOf", "prefixItems"):
        yield from _listed(part, name)
    yield from _required(part)
    if (items := part.get("items")) is not None:
        yield items


def _has_value(part: Any, root: Any, known: set[int]) -> bool:
    """As far as its parts are known to have one."""
    if not isinstance(part, Mapping):
        return True
    if (target := _target(part, root)) is not None and id(target) not in known:
        return False
    if any(id(one) not in known for one in _listed(part, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        if (choices := _listed(part, name)) and all(id(one) not in known for one in choices):
            return False
    match part.get("type"):
        case "object" | ["object"]:
            return all(id(one) in known for one in _required(part))
        case "array" | ["array"]:
            least = part.get("minItems")
            least = least if isinstance(least, int) else 0
            first = _listed(part, "prefixItems")
            rest = [part["items"]] if least > len(first) and isinstance(part.get("items"), Mapping) else []
            return all(id(one) in known for one in [*first[:least], *rest])
    return True


def _listed(part: Mapping[str, Any], name: str) -> list[Any]:
    found = part.get(name)
    return list(found) if isinstance(found, (list, tuple)) else []


def _required(part: Mapping[str, Any]) -> list[Any]:
    """Schemas of the properties that an object of this schema has always."""
    properties = part.get("properties")
    if not isinstance(properties, Mapping):
        return []
    return [properties[name] for name in _listed(part, "required") if isinstance(name, str) and name in properties]


def _target(part: Mapping[str, Any], root: Any) -> Any:
    """What it refers to within the schema; None = nothing, or nothing that is found."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, (list, tuple)) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return None
    return found
