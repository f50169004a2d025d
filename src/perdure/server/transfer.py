"""How vLLM's trainers send weights: a group is joined, an update begins, its parts are received, it ends.

The engine gets all tensors at the end, checked as any other weights are. What TRL had before is in `trl`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from perdure import InvalidValue, StateError
from perdure.server import control, vllm_group
from perdure.server.front import Front
from perdure.server.protocol.control import Broadcast, Done, Nothing, TensorShape
from perdure.server.protocol.vllm import InitTransferRequest, StartUpdateRequest, UpdateInfo, UpdateRequest
from perdure.server.replies import json_response
from perdure.server.weight_group import WeightGroup


async def init_transfer(front: Front, request: Request) -> Response:
    body: InitTransferRequest = await control.body_of(front, request, InitTransferRequest)
    info = body.init_info
    if not 0 < info.rank_offset < info.world_size:
        raise InvalidValue(f"init_info.rank_offset={info.rank_offset} is out of range: 1 to {info.world_size - 1}")
    front.leave()  # of a trainer before: it does not say that it goes
    where = info.master_address, info.master_port, info.rank_offset, info.world_size
    await front.begin_to_join(vllm_group.join(*where, is_packed=info.packed))
    return json_response(Done())


async def start_update(front: Front, request: Request) -> Response:
    await control.body_of(front, request, StartUpdateRequest)
    _group_of(front)
    front.incoming.begin()
    return json_response(Done())


async def update_weights(front: Front, request: Request) -> Response:
    body: UpdateRequest = await control.body_of(front, request, UpdateRequest)
    info = body.update_info
    if info is None:
        return await control.update(front, body)
    group, asked = _group_of(front), _broadcast(info)
    is_packed = group.is_packed if info.packed is None else info.packed
    is_part = front.incoming.has_begun
    packed_bytes = info.packed_buffer_size_bytes if is_packed else None
    await front.incoming.add(lambda: front.received(asked, packed_bytes))
    if not is_part:
        await front.incoming.apply(front.llm)
    return json_response(Done())


async def finish_update(front: Front, request: Request) -> Response:
    await control.body_of(front, request, Nothing)
    if not front.incoming.has_begun:
        raise StateError("no update of weights has begun: POST /start_weight_update first")
    await front.incoming.apply(front.llm)
    return json_response(Done())


def _group_of(front: Front) -> WeightGroup:
    if front.weight_group is None:
        raise StateError("there is no group for weights: POST /init_weight_transfer_engine first")
    return front.weight_group


def _broadcast(info: UpdateInfo) -> Broadcast:
    counts = {"names": len(info.names), "dtype_names": len(info.dtype_names), "shapes": len(info.shapes)}
    if len({*counts.values()}) > 1:
        raise InvalidValue(f"update_info has {', '.join(f'{count} {name}' for name, count in counts.items())}")
    columns = zip(info.names, info.dtype_names, info.shapes, strict=True)
    return Broadcast(tensors=[TensorShape(name=name, dtype=dtype, shape=shape) for name, dtype, shape in columns])
