"""`WeightGroup`: weights that a trainer broadcasts, over a group of processes of torch.distributed, by gloo or NCCL.

The group is none of the process's default ones, on either side, so a trainer keeps those it computes with. Tensors are
received whole before the engine hears of them; what goes wrong on the way changes nothing and ends the group.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from perdure import InvalidValue, StateError
from perdure.server.patience import RETRY_S, first_line, in_time, wait_for_listener
from perdure.server.protocol.control import Broadcast, GroupRequest, TensorShape
from perdure.server.tensors import DTYPES

PREFIX = "perdure-weights"
"""Under which both sides find each other in the store."""
SPARE_S = 1.0
"""How much later than asked a group is given up that does not give up by itself."""


class Broadcasts(Protocol):
    """What of a group is used. device: where tensors must lie to be received."""

    device: torch.device

    def receive(self, into: Tensor, root: int) -> None:
        """Returns when it is there. Raises RuntimeError."""


class WeightGroup:
    """One that was joined. Use `join`. is_packed: whether several tensors come as one, unless a call says otherwise."""

    def __init__(self, group: Broadcasts, rank: int, world_size: int, *, is_packed: bool = False) -> None:
        self.is_packed = is_packed
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self._receiving = asyncio.Lock()

    @classmethod
    async def join(cls, asked: GroupRequest) -> WeightGroup:
        """Returns when all are there, with NCCL when their store is. Raises `InvalidValue`, and `StateError` if they do
        not come in time."""
        if not dist.is_available() or not hasattr(dist, "ProcessGroupGloo"):
            raise InvalidValue("backend='gloo' is not part of this build of torch")
        if asked.backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise InvalidValue("backend='nccl' needs a GPU and a build of torch with NCCL, and the server has none")
        if not 0 <= asked.rank < asked.world_size:
            raise InvalidValue(f"rank={asked.rank} is out of range: 0 to {asked.world_size - 1} (world_size - 1)")
        if not asked.rank:
            raise InvalidValue("rank=0 is the trainer's, who sends and whose store it is: give 1 or more")
        where = f"no group of {asked.world_size} came about at {asked.master_address[:200]}:{asked.master_port}"
        try:
            group = await in_time(lambda: _joined(asked), asked.timeout_s + SPARE_S)
        except TimeoutError:
            raise StateError(f"{where}: what is there answers nothing in {asked.timeout_s:g} s") from None
        except RuntimeError as error:
            raise StateError(f"{where}: {first_line(error)}") from None
        return cls(group, asked.rank, asked.world_size)

    async def receive(self, given: Broadcast, packed_bytes: int | None = None) -> dict[str, Tensor]:
        """The tensors, in the order they are broadcast. packed_bytes: several come as one, each as many as it takes to
        be more than this. Raises `StateError` if one does not come."""
        if not 0 <= given.root < self._world_size or given.root == self._rank:
            raise InvalidValue(f"broadcast.root={given.root} is no other rank of a group of {self._world_size}")
        if len({one.name for one in given.tensors}) != len(given.tensors):
            raise InvalidValue("broadcast.tensors has a name twice")
        async with self._receiving:
            return await in_time(lambda: self._received(given.tensors, given.root, packed_bytes), None)

    def _received(self, tensors: Sequence[TensorShape], root: int, packed_bytes: int | None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in [[one] for one in tensors] if packed_bytes is None else _parts(tensors, packed_bytes):
            try:
                if packed_bytes is None:
                    [one] = part
                    found[one.name] = self._receive(torch.empty(one.shape, dtype=DTYPES[one.dtype]), root)
                else:
                    size = sum(map(_num_bytes, part))
                    whole = self._receive(torch.empty(size, dtype=torch.uint8), root)
                    for one, data in zip(part, torch.split(whole, [*map(_num_bytes, part)]), strict=True):
                        found[one.name] = data.clone().view(DTYPES[one.dtype]).view(one.shape)
            except RuntimeError as error:
                raise StateError(f"broadcast: {part[0].name[:80]!r} did not come: {first_line(error)}") from None
        return found

    def _receive(self, into: Tensor, root: int) -> Tensor:
        """In the host's memory, which is where the engine takes weights from."""
        device = self._group.device
        if device.type == "cpu":
            self._group.receive(into, root)
            return into
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # the engine's own must not wait for a trainer
            on_device = into.to(device)
            self._group.receive(on_device, root)
            return on_device.cpu()


class _OfTorch:
    """A process group of torch.distributed."""

    def __init__(self, group: Any, device: torch.device, patience: datetime.timedelta) -> None:
        self.device = device
        self._group = group
        self._patience = patience

    def receive(self, into: Tensor, root: int) -> None:
        self._group.broadcast(into.view(-1).view(torch.uint8), root).wait(self._patience)


class _Polled(Store):
    """A store whose keys are waited for here: torch's own way prints what nobody asked for when they do not come."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._timeout_s = timeout_s

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        give_up_at = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self._store.check(keys):
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"the others did not come in {self._timeout_s:g} s")
            time.sleep(RETRY_S / 10)


def _num_bytes(one: TensorShape) -> int:
    return math.prod(one.shape) * DTYPES[one.dtype].itemsize


def _parts(tensors: Sequence[TensorShape], packed_bytes: int) -> list[list[TensorShape]]:
    """Those that come as one: up to the first with which they are more than so many bytes."""
    parts: list[list[TensorShape]] = []
    size = packed_bytes + 1
    for one in tensors:
        if size > packed_bytes:
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += _num_bytes(one)
    return parts


def _joined(asked: GroupRequest) -> Broadcasts:
    """Raises `InvalidValue` and RuntimeError."""
    patience = datetime.timedelta(seconds=asked.timeout_s)
    wait_for_listener(asked.master_address, asked.master_port, asked.timeout_s)
    store = TCPStore(
        asked.master_address, asked.master_port, asked.world_size, timeout=patience, wait_for_workers=False
    )
    if asked.backend == "nccl":
        # Else a group whose trainer has gone ends this process, some time later.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * patience
        found = dist.ProcessGroupNCCL(PrefixStore(PREFIX, store), asked.rank, asked.world_size, options)
        return _OfTorch(found, torch.device("cuda", torch.cuda.current_device()), patience)
    polled = _Polled(PrefixStore(PREFIX, store), asked.timeout_s)
    group = dist.ProcessGroupGloo(polled, asked.rank, asked.world_size, patience)
    return _OfTorch(group, torch.device("cpu"), patience)
