"""From a plan's columns and the device rows to the flat arrays that one forward pass takes.

- Work is O(rows) numpy calls on columns, never a Python step a token.
- Rows are packed in the plan's order. A step may be padded to more tokens, which write no keys and belong to no row.

Shapes: R rows of the plan, N tokens, M = N or, padded, more, T targets (prompt tokens to score), S rows to sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perdure.api.plan import DEVICE_POSITION, StepPlan
from perdure.ops.attention import AttentionRows
from perdure.runner.row_store import RowStore

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Targets:
    """Known prompt tokens to score, flat [T], in the plan's order."""

    row: Ints  # the plan's row
    position: Ints  # where the token stands
    token: Ints
    hidden_row: Ints  # packed row of the position before it


@dataclass(frozen=True, slots=True)
class PackedStep:
    token_ids: Ints  # [M]
    positions: Ints  # [M]
    slots: Ints  # [R]
    starts: Ints  # [R] position of each row's first one
    ends: Ints  # [R] position after each row's last one
    offsets: Ints  # [R + 1] where each row's tokens are packed
    on_device: NDArray[np.bool_]  # [R] rows that go on with the token sampled last into them
    kv_slots: Ints  # [N] page * page_size + offset in the page
    sampled: Ints  # [S] the plan's rows
    sampled_hidden: Ints  # [S] packed row of each one's last position
    targets: Targets

    def padded(self, num_tokens: int) -> PackedStep:
        """With M = num_tokens."""
        missing = num_tokens - len(self.token_ids)
        if not missing:
            return self
        zeros = np.zeros(missing, np.int64)
        ids, positions = (np.concatenate([column, zeros]) for column in (self.token_ids, self.positions))
        return replace(self, token_ids=ids, positions=positions)

    def narrowed(self, tile: int = 1) -> tuple[PackedStep, Ints | None]:
        """The step for who computes hidden states of those packed rows alone that something is read of, and these [W],
        a multiple of tile (the last repeated); None: of all, where that leaves out too little."""
        targets = self.targets
        read = np.unique(np.concatenate([self.sampled_hidden, targets.hidden_row]))
        if not len(read):
            read = self.offsets[-1:] - 1
        wanted = np.concatenate([read, np.repeat(read[-1:], -len(read) % tile)])
        if 2 * len(wanted) > len(self.token_ids):
            return self, None
        sampled_hidden, hidden_row = (np.searchsorted(read, rows) for rows in (self.sampled_hidden, targets.hidden_row))
        return replace(self, sampled_hidden=sampled_hidden, targets=replace(targets, hidden_row=hidden_row)), wanted

    def attention(self, rows: RowStore, page_size: int) -> AttentionRows:
        """The rows as attention on the host takes them, with the pages they use."""
        num_pages = -(-int(self.ends.max(initial=0)) // page_size)
        return AttentionRows(self.offsets, self.starts, rows.block_table[self.slots, :num_pages])


def pack(plan: StepPlan, rows: RowStore, page_size: int) -> PackedStep:
    """The plan as arrays, of a burst its first step; its deltas must have been applied to rows."""
    slots = np.array(plan.slot, np.int64)
    assert np.array_equal(rows.request[slots], plan.request), "a row of the plan is not the request in its slot"
    if not plan.tokens:
        return _pack_decodes(plan, slots, rows, page_size)
    lengths = np.array(plan.length, np.int64)
    starts = np.array(plan.start, np.int64)
    assert lengths.min() > 0, "a row of the plan computes nothing"

    on_device = starts == DEVICE_POSITION
    starts = np.where(on_device, rows.position[slots], starts)
    ends = starts + lengths
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    num_tokens = int(offsets[-1])
    positions = np.arange(num_tokens) + np.repeat(starts - offsets[:-1], lengths)
    given = np.repeat(~on_device, lengths)
    assert len(plan.tokens) == np.count_nonzero(given), "a row's tokens are missing from the plan"
    token_ids = np.empty(num_tokens, np.int64)
    token_ids[given] = plan.tokens
    token_ids[offsets[:-1][on_device]] = rows.last_token[slots[on_device]]

    page, inside = np.divmod(positions, page_size)
    kv_slots = rows.block_table[np.repeat(slots, lengths), page] * page_size + inside
    sampled = np.flatnonzero(plan.sample)
    return PackedStep(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        starts=starts,
        ends=ends,
        offsets=offsets,
        on_device=on_device,
        kv_slots=kv_slots,
        sampled=sampled,
        sampled_hidden=offsets[1:][sampled] - 1,
        targets=_targets(plan, offsets[:-1] - starts),
    )


def _pack_decodes(plan: StepPlan, slots: Ints, rows: RowStore, page_size: int) -> PackedStep:
    """The same where every row goes on where its device row stands: most steps, in half the time."""
    count = len(slots)
    assert min(plan.length, default=1) > 0, "a row of the plan computes nothing"
    assert plan.start.count(DEVICE_POSITION) == count, "a row's tokens are missing from the plan"
    positions = rows.position[slots]
    offsets = np.arange(count + 1)
    page, inside = np.divmod(positions, page_size)
    sampled = np.flatnonzero(plan.sample)
    return PackedStep(
        token_ids=rows.last_token[slots],
        positions=positions,
        slots=slots,
        starts=positions,
        ends=positions + 1,
        offsets=offsets,
        on_device=np.ones(count, np.bool_),
        kv_slots=rows.block_table[slots, page] * page_size + inside,
        sampled=sampled,
        sampled_hidden=sampled,
        targets=_targets(plan, offsets[:-1] - positions),
    )


def _targets(plan: StepPlan, packed_at_zero: Ints) -> Targets:
    """packed_at_zero [R]: where position 0 of the row would be packed."""
    if not plan.targets:
        none = np.empty(0, np.int64)
        return Targets(none, none, none, none)
    counts = np.array(plan.num_targets, np.int64)
    row = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    position = np.arange(len(row)) + np.repeat(np.array(plan.target_start, np.int64) - first, counts)
    return Targets(row, position, np.array(plan.targets, np.int64), packed_at_zero[row] + position - 1)
