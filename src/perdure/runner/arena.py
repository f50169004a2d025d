"""Memory at a fixed address: reserved at once, committed by first touch, given back without moving.

- Reserving takes address space only. A page of memory is committed, zeroed, when it is first written.
- `release` gives the memory back; the address stays, and reads as zeros, so tensors over it stay valid.
"""

from __future__ import annotations

import mmap
from typing import Protocol

import torch


class FixedMemory(Protocol):
    """Memory that comes and goes at one address. is_committed: whether it may be touched."""

    is_committed: bool

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it as one flat tensor."""
        ...

    def commit(self) -> None:
        """Take memory, if it has none. MemoryError: there is none."""
        ...

    def release(self) -> None:
        """Give the memory back; what was in it is lost."""
        ...


class Arena:
    """A CPU arena of num_bytes."""

    def __init__(self, num_bytes: int) -> None:
        assert num_bytes > 0, num_bytes
        self.num_bytes = num_bytes
        self.is_committed = True
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._map = mmap.mmap(-1, num_bytes, flags=flags)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of the arena as one flat tensor, which keeps it alive."""
        return torch.frombuffer(self._map, dtype=dtype)

    def commit(self) -> None:
        """Memory is taken when it is first written."""

    def release(self) -> None:
        """Return the memory to the system; every byte reads as 0 until it is written again."""
        self._map.madvise(mmap.MADV_DONTNEED)
