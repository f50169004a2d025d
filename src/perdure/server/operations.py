"""What watches a server: alive, ready, metrics, models. None of it waits for requests, and a busy engine is alive."""

from __future__ import annotations

import asyncio
import contextlib

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from perdure import EngineDead, StateError, __version__
from perdure.api.output import Stats
from perdure.server.errors import HTTPError
from perdure.server.front import Front
from perdure.server.protocol.common import Model, Models
from perdure.server.protocol.control import Ready, Version
from perdure.server.replies import json_response

PATIENCE_S = 2.0
"""How long an engine between two steps is waited for."""


async def health(front: Front, request: Request) -> Response:
    """200 unless the engine is dead; also while it ends, is paused, is busy for long or calls a coordinator again."""
    with contextlib.suppress(StateError):
        await _stats(front)
    return Response()


async def ready(front: Front, request: Request) -> Response:
    """200 where a request that comes now would be computed."""
    try:
        stats = await _stats(front)
        state = "busy" if stats is None else stats.state
    except StateError:
        state = "no coordinator"
    if front.is_draining:
        state = "draining"
    is_ready = state in ("running", "busy") and front.is_warm
    return json_response(Ready(ready=is_ready, state=state), status=200 if is_ready else 503)


async def metrics(front: Front, request: Request) -> Response:
    """Where the engine cannot be asked, its numbers are those of the time before."""
    stats = None
    with contextlib.suppress(StateError):
        stats = await front.llm.stats()
    return Response(front.metrics.text(stats), media_type=CONTENT_TYPE_LATEST)


async def models(front: Front, request: Request) -> Response:
    return json_response(Models(data=[_model(front)]))


async def model(front: Front, request: Request) -> Response:
    front.check_model(request.path_params["model"])
    return json_response(_model(front))


async def version(front: Front, request: Request) -> Response:
    return json_response(Version(version=__version__))


def _model(front: Front) -> Model:
    return Model(id=front.model, created=front.created, root=front.root, max_model_len=front.max_model_len)


async def _stats(front: Front) -> Stats | None:
    """None: no answer yet. Raises `HTTPError` if none will come, and `StateError` while there is no coordinator."""
    try:
        return await asyncio.wait_for(front.llm.stats(), PATIENCE_S)
    except TimeoutError:
        return None
    except EngineDead as error:
        raise HTTPError(503, str(error), "service_unavailable_error", code="engine_dead") from None
