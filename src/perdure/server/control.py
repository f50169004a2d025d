"""Control verbs: what `AsyncLLM` can be told, over HTTP. In a wrong order they get 409, and nothing has changed.

vLLM's verbs are the same under its names: sleeping is `suspend`, level 1 with kv="recompute" and weights="offload",
level 2 with weights="drop".
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from perdure import InvalidValue, StateError
from perdure.api.command import Tag
from perdure.server.bodies import content, decode
from perdure.server.front import Front
from perdure.server.protocol.control import (
    AbortRequest,
    Asleep,
    Broadcast,
    CheckpointRequest,
    Done,
    GroupRequest,
    PauseRequest,
    ResumeRequest,
    State,
    SuspendRequest,
    WeightsRequest,
)
from perdure.server.protocol.vllm import CacheCleared
from perdure.server.replies import json_response
from perdure.server.tensors import of_shared
from perdure.server.weight_group import WeightGroup

_VLLM_TAGS = {"kv_cache": "kv", "kv": "kv", "weights": "weights"}


async def _body(front: Front, request: Request, kind: Any) -> Any:
    """No body at all is one of the query's fields, as vLLM takes them, or of none."""
    given = await content(request, front.config.max_body_bytes)
    return decode(given or msgspec.json.encode(dict(request.query_params)), kind)


async def pause(front: Front, request: Request) -> Response:
    body: PauseRequest = await _body(front, request, PauseRequest)
    await front.llm.pause(body.mode)
    return json_response(Done())


async def resume(front: Front, request: Request) -> Response:
    body: ResumeRequest = await _body(front, request, ResumeRequest)
    await front.llm.resume(body.tags)
    return json_response(Done())


async def suspend(front: Front, request: Request) -> Response:
    body: SuspendRequest = await _body(front, request, SuspendRequest)
    await front.llm.suspend(body.kv, body.weights)
    return json_response(Done())


async def abort(front: Front, request: Request) -> Response:
    body: AbortRequest = await _body(front, request, AbortRequest)
    await front.peers.abort(body.request_ids)
    return json_response(Done())


async def reset(front: Front, request: Request) -> Response:
    await front.llm.reset()
    return json_response(Done())


async def reset_prefix_cache(front: Front, request: Request) -> Response:
    await front.llm.reset_prefix_cache()
    return json_response(CacheCleared())


async def weights(front: Front, request: Request) -> Response:
    body: WeightsRequest = await _body(front, request, WeightsRequest)
    source: Any = body.weights
    if sum(one is not None for one in (body.weights, body.shared, body.broadcast)) > 1:
        raise InvalidValue("weights, shared and broadcast each say which weights: give one of them")
    if body.shared is not None:
        source = await asyncio.to_thread(of_shared, body.shared)
    elif body.broadcast is not None:
        source = await _broadcast(front, body.broadcast)
    await front.llm.update_weights(source, epoch=body.epoch, cache=body.cache, in_flight=body.in_flight)
    return json_response(Done())


async def _broadcast(front: Front, asked: Broadcast) -> Any:
    if front.weight_group is None:
        raise StateError("broadcast: there is no group: POST /init_weight_group first")
    try:
        return await front.weight_group.receive(asked)
    except StateError:
        front.weight_group = None  # nobody knows what is on its way there
        raise


async def init_weight_group(front: Front, request: Request) -> Response:
    body: GroupRequest = await _body(front, request, GroupRequest)
    if front.config.num_front_ends > 1:
        raise InvalidValue(f"num_front_ends={front.config.num_front_ends}: a group of weights needs one front end")
    if front.weight_group is not None:
        raise StateError("there is a group already: POST /destroy_weight_group first")
    front.weight_group = await WeightGroup.join(body)
    return json_response(Done())


async def destroy_weight_group(front: Front, request: Request) -> Response:
    """Harmless if there is none."""
    front.weight_group = None
    return json_response(Done())


async def checkpoint(front: Front, request: Request) -> Response:
    """The bytes that `Checkpoint.from_bytes` reads."""
    body: CheckpointRequest = await _body(front, request, CheckpointRequest)
    found = await front.peers.checkpoint(body.request_id, body.end)
    return Response(found, media_type="application/octet-stream")


async def state(front: Front, request: Request) -> Response:
    stats = await front.llm.stats()
    told = State(state=stats.state, is_draining=front.is_draining, stats=msgspec.to_builtins(stats))
    return json_response(told)


# vLLM's names


async def sleep(front: Front, request: Request) -> Response:
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise InvalidValue(f"level={level[:40]!r} is neither 1 nor 2")
    await front.llm.suspend("recompute", "offload" if level == "1" else "drop")
    return json_response(Done())


async def wake_up(front: Front, request: Request) -> Response:
    tags = request.query_params.getlist("tags")
    unknown = next((tag for tag in tags if tag not in _VLLM_TAGS), None)
    if unknown is not None:
        raise InvalidValue(f"tags holds {unknown[:40]!r}, which is none of {', '.join(_VLLM_TAGS)}")
    await front.llm.resume([cast(Tag, _VLLM_TAGS[tag]) for tag in tags] or None)
    return json_response(Done())


async def is_sleeping(front: Front, request: Request) -> Response:
    return json_response(Asleep(is_sleeping=(await front.llm.stats()).state == "suspended"))
