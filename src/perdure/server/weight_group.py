"""`WeightGroup`: weights that a trainer broadcasts, over a group of processes of torch.distributed, by gloo or NCCL.

The group is none of the process's default ones, on either side, so a trainer keeps those it computes with. Tensors are
received whole before the engine hears of them; what goes wrong on the way changes nothing and ends the group.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from perdure import InvalidValue, StateError
from perdure.server.patience import in_time
from perdure.server.protocol.control import Broadcast, GroupRequest, TensorShape
from perdure.server.tensors import DTYPES

PREFIX = "perdure-weights"
"""Under which both sides find each other in the store."""
RETRY_S = 0.1
SPARE_S = 1.0
"""How much later than asked a group is given up that does not give up by itself."""


class Broadcasts(Protocol):
    """What of a group is used. device: where tensors must lie to be received."""

    device: torch.device

    def receive(self, into: Tensor, root: int) -> None:
        """Returns when it is there. Raises RuntimeError."""


class WeightGroup:
    """One that was joined. Use `join`."""

    def __init__(self, group: Broadcasts, rank: int, world_size: int) -> None:
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
            raise StateError(f"{where}: {_first_line(error)}") from None
        return cls(group, asked.rank, asked.world_size)

    async def receive(self, given: Broadcast) -> dict[str, Tensor]:
        """The tensors, in the order they are broadcast. Raises `StateError` if one does not come."""
        if not 0 <= given.root < self._world_size or given.root == self._rank:
            raise InvalidValue(f"broadcast.root={given.root} is no other rank of a group of {self._world_size}")
        if len({one.name for one in given.tensors}) != len(given.tensors):
            raise InvalidValue("broadcast.tensors has a name twice")
        async with self._receiving:
            return await asyncio.to_thread(self._received, given.tensors, given.root)

    def _received(self, tensors: Sequence[TensorShape], root: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for one in tensors:
            try:
                tensor = torch.empty(one.shape, dtype=DTYPES[one.dtype], device=self._group.device)
                self._group.receive(tensor, root)
                found[one.name] = tensor.cpu()
            except RuntimeError as error:
                raise StateError(f"broadcast: {one.name[:80]!r} did not come: {_first_line(error)}") from None
        return found


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


def _joined(asked: GroupRequest) -> Broadcasts:
    """Raises `InvalidValue` and RuntimeError."""
    give_up_at = time.monotonic() + asked.timeout_s
    patience = datetime.timedelta(seconds=asked.timeout_s)
    _wait_for_listener(asked.master_address, asked.master_port, give_up_at)
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


def _wait_for_listener(address: str, port: int, give_up_at: float) -> None:
    """Somebody will be there: trainer and server may come in either order. Raises `InvalidValue` for a name that is
    none, and RuntimeError."""
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidValue(f"master_address={address[:200]!r} is no address: {error}") from None
    while True:
        left_s = give_up_at - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(left_s, RETRY_S)).close()
            return
        except OSError as error:
            if time.monotonic() + RETRY_S > give_up_at:
                raise RuntimeError(f"nobody listens there ({error})") from None
        time.sleep(RETRY_S)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
