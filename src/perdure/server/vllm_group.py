"""A group as vLLM's clients form one: vLLM's own store and its communicator over NCCL, which both sides must have.

vLLM is loaded for these two classes, and only when a client asks for such a group.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from perdure import InvalidValue, StateError
from perdure.server.patience import first_line, in_time, wait_for_listener
from perdure.server.weight_group import SPARE_S, WeightGroup

TIMEOUT_S = 300.0
"""vLLM's own."""


MISSING = "a group for weights as vLLM's clients form it needs vLLM beside perdure, and it is not installed here"


def is_possible() -> bool:
    """Whether what it needs is installed."""
    return importlib.util.find_spec("vllm") is not None


async def join(
    address: str, port: int, rank: int, world_size: int, *, is_packed: bool = False, with_barrier: bool = False
) -> WeightGroup:
    """As rank 0 wait there for others, else for rank 0. with_barrier: all wait for each other after each tensor.
    Raises `InvalidValue`, and `StateError` if they do not come in time."""
    if not is_possible():
        raise InvalidValue(MISSING)
    if not 0 <= rank < world_size:
        raise InvalidValue(f"rank={rank} is out of range: 0 to {world_size - 1} (world_size - 1)")

    def joined() -> _Pynccl:
        if rank:
            wait_for_listener(address, port, TIMEOUT_S)
        return _Pynccl(address, port, rank, world_size, with_barrier)

    where = f"no group of {world_size} came about at {address[:200]}:{port}"
    try:
        group = await in_time(joined, TIMEOUT_S + SPARE_S)
    except TimeoutError:
        raise StateError(f"{where}: the others did not come in {TIMEOUT_S:g} s") from None
    except (RuntimeError, OSError) as error:
        raise StateError(f"{where}: {first_line(error)}") from None
    return WeightGroup(group, rank, world_size, is_packed=is_packed)


class _Pynccl:
    """vLLM's communicator, by the steps of its workers."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, with_barrier: bool) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._with_barrier = with_barrier
        self._group: Any = StatelessProcessGroup.create(host=address, port=port, rank=rank, world_size=world_size)
        self._communicator: Any = PyNcclCommunicator(self._group, device=self.device)
        if self._communicator.disabled:  # then it would send and receive nothing, and say nothing
            raise RuntimeError("vLLM's communicator found no NCCL here")

    def receive(self, into: Tensor, root: int) -> None:
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self._communicator.broadcast(into, src=root, stream=stream)
        if self._with_barrier:
            self._group.barrier()
