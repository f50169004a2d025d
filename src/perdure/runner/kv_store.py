"""The pool of pages that hold keys and values, for all layers, in one arena.

- A page is `page_size` positions of one request (or of a shared prefix) in every layer.
- A page is cleared before its first use, so every position that was never written reads as 0, never as NaN.
- On a CPU pages are fp32 whatever the model computes in: products of half types are several times slower on most.
- Of 8 bits (`ops.float8`) they are moved, cleared and compared as bytes: torch does little to such tensors.
- Pages can be copied out and all memory given back; they come again to the same addresses, bit for bit.
- Who owns a page is not known here.

Shapes: L layers, Hkv key heads, P pages, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from perdure.models.base import ModelConfig
from perdure.ops.float8 import E4M3
from perdure.runner.arena import Arena, FixedMemory

DTYPE = torch.float32
NAN_BYTE = 0x7F  # of e4m3


def page_dtype(kv_cache_dtype: str, computed: torch.dtype = DTYPE) -> torch.dtype:
    """What pages hold, by the setting's name; computed: what they hold if it is "auto"."""
    return E4M3 if kv_cache_dtype == "fp8" else computed


def kv_bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype = DTYPE) -> int:
    """Bytes of one page: keys and values of all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * page_size * dtype.itemsize


class KVStore:
    """layers[l] is [2, Hkv, P, page_size, D]: keys, then values."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = DTYPE,
        make_arena: Callable[[int], FixedMemory] = Arena,
    ) -> None:
        self.num_bytes = num_pages * kv_bytes_per_page(config, page_size, dtype)
        self._arena = make_arena(self.num_bytes)
        shape = (config.num_layers, 2, config.num_kv_heads, num_pages, page_size, config.head_dim)
        is_narrow = dtype == E4M3
        self._pool = self._arena.tensor(torch.uint8 if is_narrow else dtype)[: math.prod(shape)].view(shape)
        self._nan = NAN_BYTE if is_narrow else torch.nan
        self.dtype = dtype
        self.layers = list(self._pool.view(dtype))
        self._away: tuple[list[int], torch.Tensor] | None = None
        """Pages that were copied out, ascending, and their content [L, 2, Hkv, n, page_size, D]."""

    def clear(self, pages: Iterable[int]) -> None:
        """Zero these pages in every layer."""
        for page in pages:
            self._pool[:, :, :, page].zero_()

    def copy(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """The first lengths[j] positions of page sources[j] into page targets[j], in every layer, in this order."""
        for source, target, length in zip(sources, targets, lengths, strict=True):
            self._pool[:, :, :, target, :length] = self._pool[:, :, :, source, :length]

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that whoever reads what it did not write is found out."""
        self._pool.index_fill_(3, torch.tensor(pages), self._nan)

    def release(self) -> None:
        """Give the memory back to the system until `restore` or `begin_anew`."""
        self._arena.release()
        self._away = None

    @property
    def is_here(self) -> bool:
        """Whether pages may be touched."""
        return self._arena.is_committed

    def begin_anew(self) -> None:
        """Give the memory back and take it again, with nothing in it that was there."""
        self.release()
        self._arena.commit()

    def offload(self, pages: Sequence[int]) -> None:
        """Copy these pages out, ascending, and give all memory back. RuntimeError: no memory for the copy; nothing
        has changed."""
        copy = self._copied(pages)
        self._arena.release()
        self._away = list(pages), copy

    def restore(self, pages: Sequence[int]) -> None:
        """Bring back those of the pages that are still wanted, ascending. What was not offloaded is there already."""
        self._arena.commit()
        if self._away is None:
            return
        away, copy = self._away
        is_all = list(pages) == away
        self._bring(pages, copy, None if is_all else torch.from_numpy(np.searchsorted(away, pages)))
        self._away = None

    def _copied(self, pages: Sequence[int]) -> torch.Tensor:
        """The content of these pages, somewhere else."""
        return self._pool.index_select(3, torch.tensor(pages, dtype=torch.int64))

    def _bring(self, pages: Sequence[int], copy: torch.Tensor, chosen: torch.Tensor | None) -> None:
        """Put it into these pages. chosen: which of the copy's they are; None = all."""
        copy = copy if chosen is None else copy.index_select(3, chosen)
        self._pool.index_copy_(3, torch.tensor(pages, dtype=torch.int64), copy)
