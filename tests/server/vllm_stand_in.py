"""In place of vLLM's store and communicator, which need NCCL: the same calls over gloo, for both sides of a group.

Only the classes that clients and server use of vLLM, with its arguments; by `installed` they are there under its names.
"""

from __future__ import annotations

import datetime
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

PATIENCE = datetime.timedelta(seconds=30)


class StatelessProcessGroup:
    def __init__(self, rank: int, world_size: int, store: TCPStore) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self.socket = None
        self._num_barriers = 0

    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int) -> StatelessProcessGroup:
        store = TCPStore(host, port, world_size, rank == 0, timeout=PATIENCE)
        return StatelessProcessGroup(rank, world_size, store)

    def barrier(self) -> None:
        key = f"barrier/{self._num_barriers}"
        self._num_barriers += 1
        if self.store.add(key, 1) == self.world_size:
            self.store.set(f"{key}/all", "1")
        self.store.wait([f"{key}/all"])


class PyNcclCommunicator:
    def __init__(self, group: StatelessProcessGroup, device: Any) -> None:
        self.disabled = False
        self.group = group
        store = PrefixStore("pynccl", group.store)
        self._gloo = ProcessGroupGloo(store, group.rank, group.world_size, PATIENCE)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        self._gloo.broadcast(tensor, src).wait()


def trainer_init(info: dict[str, Any]) -> PyNcclCommunicator:
    """Of `nccl_common`."""
    where = info["master_address"], info["master_port"]
    return PyNcclCommunicator(StatelessProcessGroup.create(*where, 0, info["world_size"]), "cpu")


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, Tensor]],
    group: PyNcclCommunicator,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
    buffer_size_bytes: int = 2**30,
) -> None:
    """Of `packed_tensor`."""
    parts: list[Tensor] = []
    for item in iterator:
        parts.append(post_iter_func(item).contiguous().view(torch.uint8).view(-1))
        if sum(part.numel() for part in parts) > buffer_size_bytes:
            group.broadcast(torch.cat(parts), src)
            parts = []
    if parts:
        group.broadcast(torch.cat(parts), src)


HOMES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.28.0"},
    "vllm.utils": {},
    "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
    "vllm.distributed": {},
    "vllm.distributed.utils": {"StatelessProcessGroup": StatelessProcessGroup},
    "vllm.distributed.device_communicators": {},
    "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": PyNcclCommunicator},
    "vllm.distributed.weight_transfer": {},
    "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": trainer_init},
    "vllm.distributed.weight_transfer.packed_tensor": {
        "packed_nccl_broadcast_producer": packed_nccl_broadcast_producer
    },
}


@contextmanager
def installed() -> Iterator[None]:
    """As long as this lasts vLLM is here, as far as this process can tell."""
    for name, content in HOMES.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content, __path__=[])
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in HOMES:
            del sys.modules[name]
