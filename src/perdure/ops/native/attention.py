"""Attention by the kernels: pages are read where they lie, each query by itself. `c/attention.c` says in what order."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_long, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.ops.attention.base import AttentionRows, CacheShape, LayerAttention
from perdure.ops.float8 import E4M3
from perdure.ops.native.build import Library
from perdure.ops.native.rows import dense_rows

LANES = 8
MOST_QUERIES = 16  # of one row in a block
SCRATCH = 1 << 16  # scores of a block: they stay in the second cache


def can_attend(shape: CacheShape) -> bool:
    """Whether the kernel takes heads of this size."""
    return shape.head_dim % LANES == 0


class _Layer(ctypes.Structure):
    _fields_ = [
        ("heads", c_long),
        ("group", c_long),
        ("dim", c_long),
        ("pages", c_long),
        ("page_size", c_long),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_long),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("blocks", c_void_p),
        ("offsets", c_void_p),
        ("starts", c_void_p),
        ("table", c_void_p),
        ("table_width", c_long),
    ]


class NativeAttention:
    """One kind of layer. ValueError: heads of a size that is not a multiple of eight."""

    name = "native"
    batch_invariant = True

    def __init__(self, library: Library, shape: CacheShape, layer: LayerAttention) -> None:
        if not can_attend(shape):
            raise ValueError(
                f"attention_backend='native' needs a head size that is a multiple of {LANES}, not {shape.head_dim}"
            )
        self.kernel = f"native ({library.version})"
        self._c = library.c
        self._shape = shape
        self._has_sinks = layer.sink is not None
        self._layer = _Layer(
            shape.num_kv_heads,
            shape.group_size,
            shape.head_dim,
            shape.num_pages,
            shape.page_size,
            layer.scale,
            layer.softcap or 0.0,
            layer.window or 0,
        )

    def plan(self, rows: AttentionRows) -> PlannedNative:
        lengths = np.diff(rows.offsets)
        ends = rows.starts + lengths
        most = np.clip(SCRATCH // (self._shape.group_size * (ends + 2 * LANES)), 1, MOST_QUERIES)
        counts = -(-lengths // most)
        row = np.repeat(np.arange(len(lengths)), counts)
        first = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * most[row]
        blocks = np.stack((row, first, np.minimum(most[row], lengths[row] - first)), axis=1)
        if blocks[:, 2].max(initial=1) > 1:
            # The longest first: what is left at the end is then short, and no thread waits long for another.
            blocks = blocks[np.argsort(-(rows.starts[row] + first + blocks[:, 2]), kind="stable")]
        return PlannedNative(self._c, self._shape, self._layer, self._has_sinks, _Arrays.of(rows, blocks))


@dataclass(frozen=True, slots=True)
class _Arrays:
    """What the kernel reads during a step, kept alive: blocks [n, 3] and the columns of `AttentionRows`, all int64."""

    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    table: NDArray[np.int64]
    step: _Step

    @classmethod
    def of(cls, rows: AttentionRows, blocks: NDArray[np.int64]) -> _Arrays:
        blocks, offsets, starts, table = (
            np.ascontiguousarray(a, np.int64) for a in (blocks, rows.offsets, rows.starts, rows.block_table)
        )
        at = [array.ctypes.data for array in (blocks, offsets, starts, table)]
        return cls(blocks, offsets, starts, table, _Step(*at, table.shape[1]))


@dataclass(frozen=True, slots=True)
class PlannedNative:
    c: ctypes.CDLL
    shape: CacheShape
    layer: _Layer
    has_sinks: bool
    arrays: _Arrays

    def run(self, q: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        q = dense_rows(q)
        assert (sinks is not None) == self.has_sinks
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()), (sinks.dtype, sinks.stride())
        num_queries = int(self.arrays.offsets[-1])
        assert q.shape[0] >= num_queries and q.shape[1:] == (self.shape.num_heads, self.shape.head_dim), q.shape
        assert cache.is_contiguous() and cache.dtype in (torch.float32, E4M3), (cache.stride(), cache.dtype)
        out = q.new_empty(q.shape)
        out[num_queries:] = 0.0
        items = len(self.arrays.blocks) * self.shape.num_kv_heads
        self.c.attention(
            ctypes.byref(self.layer),
            ctypes.byref(self.arrays.step),
            items,
            cache.data_ptr(),
            cache.dtype == E4M3,
            q.data_ptr(),
            q.stride(0),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
        return out
