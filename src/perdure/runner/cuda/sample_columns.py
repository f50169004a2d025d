"""What a draw needs of its rows, as columns over a flat block of 32-bit words: written on the host, read on the device.

- The layout follows from the number of rows alone. Every column begins on 16 bytes: a kernel is compiled for how its
  pointers are aligned, and would be again whenever that changes.
- Padding is rows that draw greedily into a slot that nobody has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.ops.triton.weights import Settings
from perdure.runner.inputs import Ints
from perdure.runner.row_store import RowStore

_INTS = ("slots", "top_k", "seed_low", "seed_high", "output_index", "child", "forced")
_LOW = np.uint64(0xFFFFFFFF)
_WORDS_A_ROW = 6 + len(_INTS) + 2


def aligned(count: int) -> int:
    """So many words of four bytes, and those up to the next place that is a multiple of 16 bytes."""
    return -(-count // 4) * 4


def num_sample_words(count: int) -> int:
    """Of four bytes, that the columns of so many rows take."""
    return _WORDS_A_ROW * aligned(count)


class SampleColumns:
    """Of `count` rows; flat begins on a word of 64 bits. The columns are those of `ops.triton.weights.Settings`."""

    slots: Any
    top_k: Any
    seed_low: Any
    seed_high: Any
    output_index: Any
    child: Any
    forced: Any

    def __init__(self, flat: Any, count: int, float32: Any, float64: Any, int64: Any) -> None:
        self.count = count
        width, end = aligned(count), 0

        def part(words_a_row: int) -> Any:
            nonlocal end
            begin, end = end, end + words_a_row * width
            return flat[begin : begin + words_a_row * count]

        self.top_p = part(2).view(float64)
        self.asked, self.masks = part(2).view(int64), part(2).view(int64)
        for name in _INTS:
            setattr(self, name, part(1))
        self.temperature, self.min_p = part(1).view(float32), part(1).view(float32)

    @staticmethod
    def on_host(words: NDArray[np.int32], count: int) -> SampleColumns:
        return SampleColumns(words, count, np.float32, np.float64, np.int64)

    @staticmethod
    def on_device(words: torch.Tensor, count: int) -> SampleColumns:
        return SampleColumns(words, count, torch.float32, torch.float64, torch.int64)

    def settings(self) -> Settings:
        """Of columns on the device."""
        return Settings(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed_low=self.seed_low,
            seed_high=self.seed_high,
            output_index=self.output_index,
            child=self.child,
            forced=self.forced,
            slots=self.slots,
            asked=self.asked,
            masks=self.masks,
        )

    def pad(self, nobody: int) -> None:
        """Rows that are none. nobody: the slot that their tokens go to."""
        self.leave(slice(None), nobody)

    def leave(self, at: Ints | slice, nobody: int) -> None:
        """The same at these places alone."""
        for name in _INTS:
            getattr(self, name)[at] = 0
        self.slots[at] = nobody
        self.asked[at] = self.masks[at] = 0
        self.temperature[at] = self.min_p[at] = 0
        self.top_p[at] = 1

    def turn(self, slots: Ints, output_index: Ints, rows: RowStore, asked: Ints) -> None:
        """The first rows' tokens stand at these output indices now; all else stays."""
        count = len(slots)
        self.output_index[:count] = output_index
        self.forced[:count] = rows.forced(slots, output_index)
        self.asked[:count] = asked

    def fill(self, at: Ints, slots: Ints, output_index: Ints, rows: RowStore, asked: Ints) -> None:
        """Write rows at these places: the requests in slots, at these output indices; asked: addresses."""
        settings = rows.sampling(slots, output_index)
        self.slots[at] = slots
        self.top_k[at] = np.minimum(settings.top_k, 2**31 - 1)
        self.seed_low[at] = (settings.seed & _LOW).astype(np.uint32).view(np.int32)
        self.seed_high[at] = (settings.seed >> np.uint64(32)).astype(np.uint32).view(np.int32)
        self.output_index[at] = output_index
        self.child[at] = settings.child
        self.forced[at] = rows.forced(slots, output_index)
        self.temperature[at] = settings.temperature
        self.top_p[at] = settings.top_p
        self.min_p[at] = settings.min_p
        self.asked[at] = asked
