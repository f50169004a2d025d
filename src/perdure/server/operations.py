"""What watches a server: alive, ready, metrics, models. None of it waits for requests, and a busy engine is alive."""

from __future__ import annotations

import asyncio
import contextlib

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from perdure import EngineDead, StateError, __version__
from perdure.server.errors import HTTPError
from perdure.server.front import Front
from perdure.server.protocol.common import Model, Models
from perdure.server.protocol.control import Ready, Version
from perdure.server.replies import json_response

PATIENCE_S = 2.0
"""How long an engine between two steps is waited for."""
SCRAPE_S = 5.0
"""The same where old numbers are better than none: Prometheus itself waits for 10 s."""


async def health(front: Front, request: Request) -> Response:
    """200 unless the engine is dead; also while it ends, is paused, is busy for long or calls a coordinator again."""
    try:
        with contextlib.suppress(StateError, TimeoutError):
            await asyncio.wait_for(front.llm.stats(), PATIENCE_S)
    except EngineDead as error:
        raise _dead(error) from None
    return Response()


async def ready(front: Front, request: Request) -> Response:
    """200 where a request that comes now would be computed."""
    state = "draining" if front.is_draining else await _state(front)
    is_ready = state in ("running", "busy") and front.is_warm
    return json_response(Ready(ready=is_ready, state=state), status=200 if is_ready else 503)


async def _state(front: Front) -> str:
    """Of the engine, and whether there is one. Raises `HTTPError` if it is dead."""
    stats, replicas = asyncio.ensure_future(front.llm.stats()), asyncio.ensure_future(front.llm.replicas())
    try:
        await asyncio.wait({stats, replicas}, timeout=PATIENCE_S)
        if not replicas.done():  # a coordinator answers at once, whatever the replicas are doing
            return "no coordinator"
        if not any(one.state == "serving" for one in replicas.result().replicas):
            return "no replica"
        return stats.result().state if stats.done() else "busy"
    except StateError:
        return "no coordinator"
    except EngineDead as error:
        raise _dead(error) from None
    finally:
        for asked in (stats, replicas):
            asked.cancel()
        await asyncio.gather(stats, replicas, return_exceptions=True)


async def metrics(front: Front, request: Request) -> Response:
    """Where the engine does not answer, its numbers are those of the time before."""
    stats = None
    with contextlib.suppress(StateError, TimeoutError):
        stats = await asyncio.wait_for(front.llm.stats(), SCRAPE_S)
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


def _dead(error: EngineDead) -> HTTPError:
    return HTTPError(503, str(error), "service_unavailable_error", code="engine_dead")
