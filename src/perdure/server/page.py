"""The page at `/`: the files of `static/`, served as they are, and the look at what is going on that it asks for.

Everything it needs comes from here: a policy forbids it to load anything else, and no key is asked for the files, which
hold nothing of the server. What it shows it asks for with the key that its reader gives it.
"""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from perdure.server.feed import together
from perdure.server.front import Front
from perdure.server.replies import json_response

FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.svg": ("page.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    return [_route(path, name, kind) for path, (name, kind) in FILES.items()]


def _route(path: str, name: str, kind: str) -> Route:
    content = resources.files("perdure.server").joinpath("static", name).read_bytes()

    async def show(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return Route(path, show)


async def live(front: Front, request: Request) -> Response:
    return json_response(together(await front.peers.looks(front.feed, front.is_draining)))
