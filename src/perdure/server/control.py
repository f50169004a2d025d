"""Control verbs: what `AsyncLLM` can be told, over HTTP. In a wrong order they get 409, and nothing has changed.

vLLM's verbs are the same under its names: sleeping is `suspend`, level 1 with kv="recompute" and weights="offload",
level 2 with weights="drop".
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from perdure import InvalidValue
from perdure.api.command import Tag
from perdure.server.bodies import content, decode
from perdure.server.errors import HTTPError
from perdure.server.front import Front
from perdure.server.protocol.control import (
    AbortRequest,
    Asleep,
    CheckpointRequest,
    Done,
    GroupRequest,
    Nothing,
    PauseRequest,
    ResumeRequest,
    SleepRequest,
    State,
    SuspendRequest,
    WakeRequest,
    WeightsRequest,
)
from perdure.server.protocol.vllm import CacheCleared
from perdure.server.replies import json_response
from perdure.server.tensors import of_shared
from perdure.server.weight_group import WeightGroup

_TAGS: dict[str, Tag] = {"kv_cache": "kv", "kv": "kv", "weights": "weights"}
_LISTS = ("tags", "request_ids")
"""Fields that a query may name several times."""
NO_BODY = (b"", b"{}")


async def body_of(front: Front, request: Request, kind: Any) -> Any:
    """Fields stand in the body, or in the query, as vLLM takes them. Raises `HTTPError` for those that nobody reads."""
    given, query = await content(request, front.config.max_body_bytes), request.query_params
    if not query:
        return decode(given or b"{}", kind)
    if given.strip() not in NO_BODY:
        raise HTTPError(400, "fields stand in the body and in the query: give all of them in one")
    fields: dict[str, Any] = {name: query.getlist(name) for name in query}
    for name, values in fields.items():
        if len(values) > 1 and name not in _LISTS:
            raise HTTPError(400, f"{name[:40]} stands {len(values)} times in the query", param=name[:40])
    return decode(msgspec.json.encode({k: v if k in _LISTS else v[0] for k, v in fields.items()}), kind)


async def pause(front: Front, request: Request) -> Response:
    body: PauseRequest = await body_of(front, request, PauseRequest)
    await front.llm.pause(body.mode)
    return json_response(Done())


async def resume(front: Front, request: Request) -> Response:
    body: ResumeRequest = await body_of(front, request, ResumeRequest)
    await front.llm.resume(body.tags)
    return json_response(Done())


async def suspend(front: Front, request: Request) -> Response:
    body: SuspendRequest = await body_of(front, request, SuspendRequest)
    await front.llm.suspend(body.kv, body.weights)
    return json_response(Done())


async def abort(front: Front, request: Request) -> Response:
    body: AbortRequest = await body_of(front, request, AbortRequest)
    await front.peers.abort(body.request_ids)
    return json_response(Done())


async def reset(front: Front, request: Request) -> Response:
    await body_of(front, request, Nothing)
    await front.llm.reset()
    return json_response(Done())


async def reset_prefix_cache(front: Front, request: Request) -> Response:
    await body_of(front, request, Nothing)
    await front.announced.apply(front.llm)  # TRL's older clients say by this that all is sent
    await front.llm.reset_prefix_cache()
    return json_response(CacheCleared())


async def weights(front: Front, request: Request) -> Response:
    return await update(front, await body_of(front, request, WeightsRequest))


async def update(front: Front, body: WeightsRequest) -> Response:
    source: Any = body.weights
    if sum(one is not None for one in (body.weights, body.shared, body.broadcast)) > 1:
        raise InvalidValue("weights, shared and broadcast each say which weights: give one of them")
    if body.weights == "":
        raise InvalidValue("weights='' is neither a directory nor a GGUF file")
    if body.shared is not None:
        source = await asyncio.to_thread(of_shared, body.shared)
    elif body.broadcast is not None:
        source = await front.received(body.broadcast)
    await front.llm.update_weights(source, epoch=body.epoch, cache=body.cache, in_flight=body.in_flight)
    return json_response(Done())


async def init_weight_group(front: Front, request: Request) -> Response:
    body: GroupRequest = await body_of(front, request, GroupRequest)
    await front.begin_to_join(WeightGroup.join(body))
    return json_response(Done())


async def destroy_weight_group(front: Front, request: Request) -> Response:
    """Harmless if there is none."""
    await body_of(front, request, Nothing)
    front.leave()
    return json_response(Done())


async def checkpoint(front: Front, request: Request) -> Response:
    """The bytes that `Checkpoint.from_bytes` reads."""
    body: CheckpointRequest = await body_of(front, request, CheckpointRequest)
    found = await front.peers.checkpoint(body.request_id, body.end)
    return Response(found, media_type="application/octet-stream")


async def state(front: Front, request: Request) -> Response:
    stats = await front.llm.stats()
    told = State(state=stats.state, is_draining=front.is_draining, stats=msgspec.to_builtins(stats))
    return json_response(told)


# vLLM's names


async def sleep(front: Front, request: Request) -> Response:
    body: SleepRequest = await body_of(front, request, SleepRequest)
    await front.llm.suspend("recompute", "offload" if int(body.level) == 1 else "drop")
    return json_response(Done())


async def wake_up(front: Front, request: Request) -> Response:
    body: WakeRequest = await body_of(front, request, WakeRequest)
    await front.llm.resume([_TAGS[tag] for tag in body.tags or ()] or None)
    return json_response(Done())


async def is_sleeping(front: Front, request: Request) -> Response:
    return json_response(Asleep(is_sleeping=(await front.llm.stats()).state == "suspended"))
