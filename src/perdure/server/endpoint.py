"""What the table of endpoints is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from perdure.server.auth import Access
from perdure.server.front import Front

Handler = Callable[[Front, Request], Awaitable[Response]]


class Parameter(NamedTuple):
    """Of the query. schema: what it may be, as JSON Schema says it."""

    name: str
    schema: dict[str, Any]


class Endpoint(NamedTuple):
    """takes, gives: the structs of bodies; None = there is none, or no JSON. streams: what the `data:` lines hold where
    an answer may be a stream. media: the type of an answer that is no JSON; None = it has no body. works: whether the
    server waits for it before it ends, and takes no new one then."""

    method: str
    path: str
    handler: Handler
    summary: str
    takes: type[Struct] | None = None
    gives: type[Struct] | None = None
    access: Access = "api"
    works: bool = False
    streams: type[Struct] | None = None
    media: str | None = None
    parameters: tuple[Parameter, ...] = ()
