"""Writing keys and values into pages by the kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from perdure.ops.attention.base import CacheShape
from perdure.ops.native.build import Library
from perdure.ops.native.rows import dense_rows


@dataclass(frozen=True, slots=True)
class NativeKVWrite:
    """slots [N], int64."""

    c: ctypes.CDLL
    shape: CacheShape
    slots: NDArray[np.int64]

    @classmethod
    def plan(cls, library: Library, shape: CacheShape, slots: NDArray[np.int64]) -> NativeKVWrite:
        assert not len(slots) or (slots.min() >= 0 and slots.max() < shape.num_pages * shape.page_size), "no such slot"
        return cls(library.c, shape, np.ascontiguousarray(slots, np.int64))

    def run(self, keys: Tensor, values: Tensor, cache: Tensor) -> None:
        shape, keys, values = self.shape, dense_rows(keys), dense_rows(values)
        assert keys.shape == values.shape and keys.shape[0] >= len(self.slots), (keys.shape, values.shape)
        assert keys.shape[1:] == (shape.num_kv_heads, shape.head_dim) and cache.is_contiguous(), keys.shape
        self.c.write_pages(
            shape.num_kv_heads,
            shape.head_dim,
            shape.num_pages * shape.page_size,
            cache.data_ptr(),
            self.slots.ctypes.data,
            len(self.slots),
            keys.data_ptr(),
            keys.stride(0),
            values.data_ptr(),
            values.stride(0),
        )
