"""Graphs: steps recorded once for each captured shape and replayed with other numbers in the same places.

- A shape is run once before it is captured, so that every kernel is compiled and loaded; all share one pool of memory,
  the largest first, since only one of them runs at a time.
- On CPU tensors the same padded shapes run eagerly: what is not shown there is the replay alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from perdure.runner.shapes import Shape

Outputs = tuple[torch.Tensor, ...]


class Graphs:
    """run(shape) computes a step from numbers at fixed places and says where its results are. pad(shape) puts
    there the numbers of a step without a row: a first run must touch nobody's pages."""

    def __init__(
        self,
        shapes: Iterable[Shape],
        pad: Callable[[Shape], None],
        run: Callable[[Shape], Outputs],
        device: torch.device,
    ) -> None:
        self._pad = pad
        self._run = run
        self._device = device
        self._shapes = sorted(shapes, reverse=True)
        self._captured: dict[Shape, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        self.capture()

    def capture(self) -> None:
        """Capture every shape, or capture it anew."""
        if self._device.type != "cuda":
            return
        self._captured.clear()
        pool = None
        for shape in self._shapes:
            self._pad(shape)
            self._run(shape)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # What another engine's thread does meanwhile, in this process, is not this capture's.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = self._run(shape)
            pool = graph.pool()
            self._captured[shape] = graph, tuple(map(_unowned, outputs))

    def replay(self, shape: Shape) -> Outputs:
        """Run the step whose numbers are in place. What it returns is valid until the next replay."""
        if self._device.type != "cuda":
            return self._run(shape)
        graph, outputs = self._captured[shape]
        graph.replay()
        return outputs


class _Place:
    """Memory that somebody else owns."""

    def __init__(self, tensor: torch.Tensor) -> None:
        place = (tensor.data_ptr(), False)
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (tensor.nbytes,), "typestr": "|u1", "data": place, "version": 3,
        }  # fmt: skip


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same place without keeping it: the pool's memory is then every graph's."""
    assert tensor.is_contiguous()
    flat: torch.Tensor = torch.as_tensor(_Place(tensor), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)
