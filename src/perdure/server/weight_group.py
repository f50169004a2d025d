"""`WeightGroup`: weights that a trainer broadcasts, over a group of processes of torch.distributed, by gloo.

The group is none of the process's default ones, on either side, so a trainer keeps those it computes with. Tensors are
received whole before the engine hears of them; what goes wrong on the way changes nothing and ends the group.
"""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from perdure import InvalidValue, StateError
from perdure.server.protocol.control import Broadcast, GroupRequest
from perdure.server.tensors import DTYPES

PREFIX = "perdure-weights"
"""Under which both sides find each other in the store."""


class WeightGroup:
    """One that was joined. Use `join`."""

    def __init__(self, group: Any, asked: GroupRequest) -> None:
        self._group = group
        self._asked = asked
        self._receiving = asyncio.Lock()

    @classmethod
    async def join(cls, asked: GroupRequest) -> WeightGroup:
        """Returns when all are there. Raises `InvalidValue`, and `StateError` if they do not come in time."""
        if not dist.is_available() or not hasattr(dist, "ProcessGroupGloo"):
            raise InvalidValue("backend='gloo' is not part of this build of torch")
        if not 0 <= asked.rank < asked.world_size:
            raise InvalidValue(f"rank={asked.rank} is out of range: 0 to {asked.world_size - 1} (world_size - 1)")
        return cls(await asyncio.to_thread(_joined, asked), asked)

    async def receive(self, given: Broadcast) -> dict[str, Tensor]:
        """The tensors, in the order they are broadcast. Raises `StateError` if one does not come."""
        if not 0 <= given.root < self._asked.world_size or given.root == self._asked.rank:
            raise InvalidValue(f"broadcast.root={given.root} is no other rank of a group of {self._asked.world_size}")
        if len({one.name for one in given.tensors}) != len(given.tensors):
            raise InvalidValue("broadcast.tensors has a name twice")
        async with self._receiving:
            return await asyncio.to_thread(self._received, given)

    def _received(self, given: Broadcast) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for one in given.tensors:
            try:
                found[one.name] = tensor = torch.empty(one.shape, dtype=DTYPES[one.dtype])
                self._group.broadcast(tensor.view(-1).view(torch.uint8), given.root).wait()
            except RuntimeError as error:
                raise StateError(f"broadcast: {one.name[:80]!r} did not come: {_first_line(error)}") from None
        return found


def _joined(asked: GroupRequest) -> Any:
    patience = datetime.timedelta(seconds=asked.timeout_s)
    try:
        store = TCPStore(
            asked.master_address, asked.master_port, asked.world_size, timeout=patience, wait_for_workers=False
        )
        return dist.ProcessGroupGloo(PrefixStore(PREFIX, store), asked.rank, asked.world_size, patience)
    except (RuntimeError, ValueError) as error:
        where = f"{asked.master_address[:200]}:{asked.master_port}"
        raise StateError(f"no group of {asked.world_size} came about at {where}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
