"""The pool of pages on the device. As `runner.kv_store`, but in the model's own type, and nothing waits for it.

- What is copied out goes to pinned memory of the host, layer by layer, so that a full pool needs no room beside itself.
- Managed memory is the driver's to move: it is not copied out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from perdure.api.errors import InvalidValue
from perdure.models.base import ModelConfig
from perdure.ops.triton.pages import fill_pages
from perdure.runner.arena import Arena
from perdure.runner.cuda.arena import CudaArena, ManagedArena
from perdure.runner.kv_store import KVStore


class DevicePages(KVStore):
    """layers[l] is [2, Hkv, P, page_size, D]. ValueError, MemoryError: as of its arena."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        is_managed: bool = False,
    ) -> None:
        on_gpu = ManagedArena if is_managed else CudaArena
        super().__init__(config, num_pages, page_size, dtype, on_gpu if device.type == "cuda" else Arena)
        self.device = device
        self._is_managed = is_managed

    def offload(self, pages: Sequence[int]) -> None:
        """`InvalidValue`: of managed memory."""
        if self._is_managed:
            raise InvalidValue("kv='offload' is not for kv_memory='managed': suspend with persist or recompute")
        super().offload(pages)

    def clear(self, pages: Iterable[int]) -> None:
        self._fill(list(pages), 0.0)

    def poison(self, pages: Sequence[int]) -> None:
        self._fill(pages, float(self._nan))

    def _fill(self, pages: Sequence[int], value: float) -> None:
        if pages:
            fill_pages(self._pool, to_device(pages, torch.int32, self.device), value)

    def _indices(self, pages: Sequence[int]) -> torch.Tensor:
        return to_device(pages, torch.int64, self.device)

    def _copied(self, pages: Sequence[int]) -> torch.Tensor:
        index, shape = self._indices(pages), list(self._pool.shape)
        shape[3] = len(pages)
        copy = torch.empty(shape, dtype=self._pool.dtype, pin_memory=self.device.type == "cuda")
        for layer, pool in enumerate(self._pool):
            copy[layer].copy_(pool.index_select(2, index), non_blocking=True)
        _synchronize(self.device)
        return copy

    def _bring(self, pages: Sequence[int], copy: torch.Tensor, chosen: torch.Tensor | None) -> None:
        index = self._indices(pages)
        chosen = None if chosen is None else chosen.to(self.device)
        for pool, away in zip(self._pool, copy, strict=True):
            here = away.to(self.device, non_blocking=True)
            pool.index_copy_(2, index, here if chosen is None else here.index_select(2, chosen))
        _synchronize(self.device)


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Nested lists as a tensor there, without waiting for what runs there."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
