"""Weights on their way from a store to a GPU: read by a few threads, each through memory and a stream of its own.

- A thread takes a stored tensor at a time, the largest first, so that a tensor's checksum is made in its order.
- It reads into two buffers of pinned memory in turn: while one is read and summed, the other is copied. What is stored
  in another type is converted on the GPU.
- On CPU tensors the same goes on without pinned memory and streams: what is not shown there is the copies alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from queue import SimpleQueue

import torch
from torch import Tensor

from perdure.models.base import Part, Parts
from perdure.models.store import Reading, Store, placed
from perdure.ops.kernels import Weight

MOST_THREADS = 8
PIECE_SIZE = 1 << 23
"""Elements read at once. A thread that has waited for the interpreter has then megabytes to read without it."""
CONVERTED_PART = 8
"""What is converted comes in pieces so much smaller: each takes memory of the GPU, in wider types, beside the pool."""


class Filling:
    """Begins to write a store's tensors into weights of `device`. They mean nothing until `finish` has returned.

    converts: some are stored otherwise than they are held, so memory of the device is taken meanwhile.
    """

    def __init__(
        self, store: Store, weights: Sequence[tuple[Weight, Parts]], device: torch.device, piece_size: int = PIECE_SIZE
    ) -> None:
        self._store = store
        self._device = device
        self._piece_size = piece_size
        self.converts = not all(self._is_copied(weight, parts) for weight, parts in weights)
        num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._lanes = [_Lane(device) for _ in range(num_threads)]
        self._free: SimpleQueue[_Lane] = SimpleQueue()
        for lane in self._lanes:
            self._free.put(lane)
        jobs = [(weight, first, part) for weight, parts in weights for first, part in placed(parts)]
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="perdure-weights")
        self._futures: list[Future[None]] = [
            self._threads.submit(self._fill, *job) for job in sorted(jobs, key=_num_elements, reverse=True)
        ]

    def finish(self) -> None:
        """Wait until all is written. Raises what the reading of a tensor raised, once no thread writes any more."""
        try:
            wait(self._futures, return_when=FIRST_EXCEPTION)
        finally:
            self.stop()
        for future in self._futures:
            if not future.cancelled():
                future.result()

    def stop(self) -> None:
        """Begin no other tensor, and wait for those under way."""
        self._threads.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.close()
        if self.converts and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_copied(self, weight: Weight, parts: Parts) -> bool:
        return isinstance(weight, Tensor) and self._store.holds(parts, weight.dtype)

    def _fill(self, weight: Weight, first: int, part: Part) -> None:
        size = self._piece_size if self._is_copied(weight, (part,)) else self._piece_size // CONVERTED_PART
        lane = self._free.get()
        try:
            with lane.used():
                self._store.fill_part(weight, first, part, Reading(size, lane.room))
        finally:
            self._free.put(lane)


def _num_elements(job: tuple[Weight, int, Part]) -> int:
    return torch.Size(job[2].shape).numel()


class _Lane:
    """What one thread at a time reads and copies through."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # weights may have been cleared there
            self._copied = [torch.cuda.Event() for _ in self._buffers]

    def used(self) -> contextlib.AbstractContextManager[object]:
        """On the thread that uses it, while it does."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def room(self, num_bytes: int) -> memoryview:
        """`Reading.room`. What lies in one buffer is on its way by now; the other is free once its copy is made."""
        if self._stream is not None:
            self._copied[self._turn].record(self._stream)
        self._turn = 1 - self._turn
        if self._stream is not None:
            self._copied[self._turn].synchronize()
        if self._buffers[self._turn].nbytes < num_bytes:
            self._buffers[self._turn] = _host_memory(num_bytes, is_pinned=self._stream is not None)
        return self._buffers[self._turn].numpy().data[:num_bytes]

    def close(self) -> None:
        """Once nobody uses it: all it copied is there."""
        if self._stream is not None:
            self._stream.synchronize()
        self._buffers.clear()


def _host_memory(num_bytes: int, *, is_pinned: bool) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
