"""What the table of endpoints is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from perdure.server.auth import Access
from perdure.server.front import Front

Handler = Callable[[Front, Request], Awaitable[Response]]


class Endpoint(NamedTuple):
    """takes, gives: the structs of bodies; None = there is none, or no JSON. works: whether the server waits for it
    before it ends, and takes no new one then. parameters: of the query."""

    method: str
    path: str
    handler: Handler
    summary: str
    takes: type[Struct] | None = None
    gives: type[Struct] | None = None
    access: Access = "api"
    works: bool = False
    parameters: tuple[str, ...] = ()
