"""Writing a step's keys and values into a layer's pages.

- What says where is built once a step (`plan_kv_write`) and serves every layer.
- Only what is written changes; a page's other positions keep their (cleared) contents.
- It copies, so both forms leave the same bits: the compiled one where there is one, but torch's for pages of 8 bits,
  which it rounds to (`ops.float8.to_e4m3`).

Shapes: N tokens to write, Hkv key heads, D head size, P pages. A layer's cache is [2, Hkv, P, page_size, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.ops.attention.base import CacheShape
from perdure.ops.float8 import E4M3, to_e4m3
from perdure.ops.native import library
from perdure.ops.native.kv_write import NativeKVWrite


class PlannedKVWrite(Protocol):
    def run(self, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
        """Write the first N of keys and values, each fp32 [>= N, Hkv, D], into cache."""
        ...


@dataclass(frozen=True, slots=True)
class TorchKVWrite:
    """Both index tensors are [N * Hkv] rows of the cache seen as [2 * Hkv * P * page_size, D]."""

    num_tokens: int
    key_index: torch.Tensor
    value_index: torch.Tensor

    @classmethod
    def plan(cls, shape: CacheShape, slots: NDArray[np.int64]) -> TorchKVWrite:
        per_head = shape.num_pages * shape.page_size
        heads = np.arange(shape.num_kv_heads, dtype=np.int64) * per_head
        key_index = torch.from_numpy((slots[:, None] + heads).reshape(-1))
        return cls(len(slots), key_index, key_index + shape.num_kv_heads * per_head)

    def run(self, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
        head_dim = cache.shape[-1]
        is_narrow = cache.dtype == E4M3
        flat = (cache.view(torch.uint8) if is_narrow else cache).view(-1, head_dim)
        for rows, index in ((keys, self.key_index), (values, self.value_index)):
            rows = rows[: self.num_tokens].reshape(-1, head_dim)
            flat.index_copy_(0, index, to_e4m3(rows).view(torch.uint8) if is_narrow else rows)


def plan_kv_write(shape: CacheShape, slots: NDArray[np.int64], dtype: torch.dtype = torch.float32) -> PlannedKVWrite:
    """slots [N]: page * page_size + offset in the page, all different. dtype: of the pages."""
    found = library() if dtype == torch.float32 else None
    return TorchKVWrite.plan(shape, slots) if found is None else NativeKVWrite.plan(found, shape, slots)
