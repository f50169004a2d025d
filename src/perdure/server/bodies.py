"""Bodies of requests: limited in size, decoded into their struct, and what is wrong said by field and value."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request

from perdure.api.errors import shown
from perdure.server.errors import HTTPError
from perdure.server.front import is_id

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r"(.*?) - at `\$([^`]*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
SHOWN_LENGTH = 100


async def read(request: Request, kind: type[T], max_bytes: int) -> T:
    """Raises `HTTPError`: 413, or 400 with the field. The name that the body gives its request is kept for answers that
    refuse it."""
    body = decode(await content(request, max_bytes), kind)
    name = getattr(body, "request_id", None)
    if is_id(name):
        request.state.request_id = name
    return body


async def content(request: Request, max_bytes: int) -> bytes:
    """The body, and never more of it in memory than is allowed."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(announced, max_bytes)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(f"more than {max_bytes}", max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise HTTPError(400, "the client went before its request was whole") from None
    return b"".join(parts)


def decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(data, str(error), kind) from None
    except RecursionError:
        raise HTTPError(400, "the body is nested more deeply than is read here") from None
    except msgspec.DecodeError as error:
        raise HTTPError(400, f"the body is no JSON: {error}") from None


def _refusal(data: bytes, message: str, kind: type[msgspec.Struct]) -> HTTPError:
    """The same in our words: `max_tokens='5': expected int or null, got str`."""
    found = _PATH.fullmatch(message)
    fault, path = (found[1], found[2].lstrip(".")) if found else (message, "")
    for pattern, words in ((_UNKNOWN, "is no field of this endpoint"), (_MISSING, "is missing")):
        if (name := pattern.fullmatch(fault)) is not None:
            whole = f"{path}.{name[1]}" if path else name[1]
            return HTTPError(400, f"{whole[:SHOWN_LENGTH]} {words}", param=whole[:SHOWN_LENGTH])
    fault = f"{fault[0].lower()}{fault[1:]}"
    if fault.startswith("invalid enum value") and (allowed := _allowed(inspect.type_info(kind), f".{path}")):
        fault = f"is none of {', '.join(allowed)}"
    if not path:
        return HTTPError(400, f"the body: {fault}")
    try:
        value = shown(_value_at(msgspec.json.decode(data), f".{path}"))
    except (msgspec.DecodeError, RecursionError):  # behind the value that is wrong there is more of the kind
        return HTTPError(400, f"{path}: {fault}", param=path)
    value = value if len(value) <= SHOWN_LENGTH else f"{value[:SHOWN_LENGTH]}..."
    return HTTPError(400, f"{path}={value}: {fault}", param=path)


def _allowed(kind: inspect.Type, path: str) -> list[str]:
    """The values that may stand there, where only some may."""
    forms = [kind]
    for name, _ in _STEP.findall(path.replace("[...]", "[0]")):
        if name:
            structs = [form for form in forms if isinstance(form, inspect.StructType)]
            forms = [field.type for one in structs for field in one.fields if field.encode_name == name]
        else:
            forms = [form.item_type for form in forms if isinstance(form, inspect.ListType)]
        forms = [one for form in forms for one in (form.types if isinstance(form, inspect.UnionType) else [form])]
    return [shown(value) for form in forms if isinstance(form, inspect.LiteralType) for value in form.values]


def _value_at(value: Any, path: str) -> Any:
    """What stands there; a key that the path does not spell out ends the way."""
    for name, index in _STEP.findall(path):
        try:
            value = value[int(index)] if index else value[name]
        except (KeyError, IndexError, TypeError):
            return value
    return value


def _too_large(size: str, limit: int) -> HTTPError:
    return HTTPError(413, f"the body has {size} bytes, max_body_bytes={limit}", code="body_too_large")
