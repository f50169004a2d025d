"""Between two steps of a burst, on the device: which rows are over, and the next step's numbers without them.

- A row is over once it drew an id that ends its request, or nothing. From then on it writes nowhere, attends to nothing
  and draws into a slot that nobody has; whoever gets its slot next begins anew.
- Whether a request has ended is decided elsewhere, by the same rule: what an ended row gives is not looked at.

Shapes: S slots, n rows, E ids that end a row, W words of a step's numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perdure.ops.triton.adjust import FINE
from perdure.ops.triton.launches import cdiv

MOST_ENDS = tl.constexpr(8)
"""Ids that end a row; one that has more goes on until its burst is over."""
NO_ID = -1
_NOWHERE = tl.constexpr(-1)
_WORDS = 1024  # of one program
_ROWS = 128


class RowEnds:
    """ends [S + 1, 1 + E]: the first output index at which each slot's ids end it, then these. over [S + 1]."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.ends = torch.full((num_slots + 1, 1 + MOST_ENDS.value), NO_ID, dtype=torch.int32, device=device)
        self.over = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)

    def begin(self, rows: Tensor) -> None:
        """rows [m, 2 + E] (int32): a slot, and what is kept of it."""
        slots = rows[:, 0].long()
        self.ends[slots] = rows[:, 1:]
        self.over.index_fill_(0, slots, 0)  # a number assigned would be copied, and waited for

    def learn(self, results: Tensor, kept: Tensor, slots: Tensor, output_index: Tensor, count: int) -> None:
        """results [2, S]: tokens of the first `count` rows, drawn into these slots at these output indices, and what
        came of them; kept [2, S] gets a copy."""
        _learn_kernel[(cdiv(count, _ROWS),)](
            results, kept, slots, output_index, self.ends, self.over, count, results.shape[1], len(self.over) - 1,
            BLOCK=_ROWS,
        )  # fmt: skip

    def turn(
        self, numbers: Tensor, words: Tensor, write: Tensor, at: Tensor, at_slots: Tensor, slots: Tensor, count: int
    ) -> None:
        """Copy a step's numbers [W] to words [W], of which these columns are parts: write, slots of `count` rows in
        their order, at, at_slots of the same in another. Rows that are over are left out."""
        begins = [column.storage_offset() - words.storage_offset() for column in (write, at, at_slots, slots)]
        _turn_kernel[(cdiv(len(words), _WORDS),)](
            numbers, words, self.over, len(words), *begins, count, len(self.over) - 1, BLOCK=_WORDS
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "num_slots", "nobody"])
def _learn_kernel(
    results, kept, slots, output_index, ends, over, count, num_slots, nobody, BLOCK: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    token = tl.load(results + rows, mask=inside, other=-1)
    code = tl.load(results + num_slots + rows, mask=inside, other=0)
    tl.store(kept + rows, token, mask=inside)
    tl.store(kept + num_slots + rows, code, mask=inside)
    slot = tl.load(slots + rows, mask=inside, other=nobody)
    index = tl.load(output_index + rows, mask=inside, other=0)
    own = ends + slot * (1 + MOST_ENDS)
    is_end = code != FINE
    may_end = index >= tl.load(own)
    for number in tl.static_range(MOST_ENDS):
        is_end = is_end | (may_end & (token == tl.load(own + 1 + number)))
    tl.store(over + slot, tl.full(slot.shape, 1, tl.int32), mask=inside & is_end & (slot != nobody))


@triton.jit(do_not_specialize=["num_words", "write", "at", "at_slots", "slots", "count", "nobody"])
def _turn_kernel(
    numbers, words, over, num_words, write, at, at_slots, slots, count, nobody, BLOCK: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(numbers + place, mask=place < num_words, other=0)
    writes = (place >= write) & (place < write + count)
    attends = (place >= at) & (place < at + count)
    draws = (place >= slots) & (place < slots + count)
    column = tl.where(attends, at_slots - at, tl.where(writes, slots - write, 0))
    slot = tl.load(numbers + place + column, mask=writes | attends | draws, other=nobody)
    is_over = tl.load(over + slot, mask=writes | attends | draws, other=0) != 0
    value = tl.where(is_over, tl.where(draws, nobody, _NOWHERE), value)
    tl.store(words + place, value, mask=place < num_words)
