"""Scores on the device: log-probabilities, ranks and the best ids of rows, without their log-softmax in memory.

- A row is seen as the model gave it (raw) or as it was drawn from (processed): scaled, -inf where an id was dropped, a
  greedy one all on its id. Nothing of that is written down: every pass makes it anew from the logits.
- A normaliser is fp64, from sums of blocks of 64 as `ops.sampling` has them; ranks and order are those of the values as
  seen, ties to the lower id.

Shapes: m entries, each of one row of logits [n, V]; L ids an entry, C = chunks of CHUNK ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from perdure.ops.triton.adjust import CHUNK, Adjusted
from perdure.ops.triton.sampling import COLDEST, Kept, Settings, exp, halved, is_kept, place_of, scaled, top_of

TAKEN = tl.constexpr(-(1 << 31))
"""Less than the order of any value."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Rows [m] (int32), and whether each is processed (int32). A row may be in several entries."""

    row: Tensor
    is_processed: Tensor


@dataclass(frozen=True, slots=True)
class View:
    """What entries look at. drawn: None = all of them are raw."""

    of: Adjusted
    entries: Entries
    drawn: tuple[Settings, Kept] | None = None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """The first ones of every kernel here. What only processed entries read may be anything without any."""
        x, entries, anything = self.of, self.entries, self.entries.row
        columns = (anything,) * 7
        if self.drawn is not None:
            s, kept = self.drawn
            columns = (s.asked, s.masks, s.temperature, s.top_k, s.min_p, kept.border, kept.last_tie)
        return entries.row, entries.is_processed, x.logits, x.values, x.raw_best, x.best, x.best_id, *columns


@triton.jit
def _looked_at(rows, processed, entry, PROCESSED: tl.constexpr):
    """An entry's row, and whether it is processed, which no entry is where the kernel has no columns for it."""
    is_processed = 0
    if PROCESSED:
        is_processed = tl.load(processed + entry)
    return tl.load(rows + entry).to(tl.int64), is_processed


@triton.jit
def _seen(
    logits, adjusted, best, best_id, asked, masks, temperature, top_k, min_p, border, last_tie, row, is_processed, ids,
    V, C, stride, CP: tl.constexpr,
):  # fmt: skip
    """The values of ids."""
    if is_processed == 0:
        x = tl.load(logits + row * stride + ids, mask=ids < V, other=float("-inf"))
    else:
        top, first, _bad = top_of(best, best_id, row, C, CP)
        heat = tl.load(temperature + row)
        if (heat == 0.0) | (tl.load(top_k + row) == 1):
            x = tl.where(ids == first, 0.0, float("-inf"))
        else:
            at = place_of(logits, adjusted, asked, masks, row, V, stride)
            x = scaled(at, ids, V, top, tl.maximum(heat, COLDEST))
            kept = is_kept(
                x, exp(x), ids, V, tl.load(border + row), tl.load(last_tie + row), tl.load(min_p + row)
            )  # fmt: skip
            x = tl.where(kept, x, float("-inf"))
    return x


@triton.jit
def _score_kernel(
    rows, processed, logits, adjusted, raw_best, best, best_id, asked, masks, temperature, top_k, min_p, border,
    last_tie, ids, mass, values, before, V, C, stride, L,
    CHUNK: tl.constexpr, CP: tl.constexpr, PROCESSED: tl.constexpr,
):  # fmt: skip
    """Of each chunk its mass (fp64) and how many ids come before each one that is asked for in (value descending, id
    ascending)."""
    entry, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, is_processed = _looked_at(rows, processed, entry, PROCESSED)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _seen(
        logits, adjusted, best, best_id, asked, masks, temperature, top_k, min_p, border, last_tie, row, is_processed,
        at, V, C, stride, CP,
    )  # fmt: skip
    raw_top, _first, _bad = top_of(raw_best, best_id, row, C, CP)
    top = tl.where(is_processed == 0, raw_top, 0.0)
    sums = halved(exp(x - top), CHUNK // 64)
    tl.store(mass + entry * C + chunk, tl.sum(sums.to(tl.float64), 0))
    for one in range(0, L):
        own = tl.load(ids + entry * L + one)
        if own >= 0:
            its = _seen(
                logits, adjusted, best, best_id, asked, masks, temperature, top_k, min_p, border, last_tie, row,
                is_processed, own + tl.arange(0, 1), V, C, stride, CP,
            )  # fmt: skip
            value = tl.max(its, 0)
            ahead = ((x > value) | ((x == value) & (at < own))) & (at < V)
            tl.atomic_add(before + entry * L + one, tl.sum(ahead.to(tl.int32), 0))
            if chunk == 0:
                tl.store(values + entry * L + one, value)


@dataclass(frozen=True, slots=True)
class Scored:
    """scores (fp32) and ranks from 1, [m, L]. normaliser [m] (fp64). is_bad [m]: of rows that cannot be scored."""

    scores: Tensor
    ranks: Tensor
    normaliser: Tensor
    is_bad: Tensor


def score(view: View, ids: Tensor) -> Scored:
    """log-softmax at ids [m, L] (int32; -1: none, and nothing is said of it)."""
    x = view.of
    (count, listed), chunks, device = ids.shape, x.best.shape[1], ids.device
    mass = torch.empty(count, chunks, dtype=torch.float64, device=device)
    values = torch.zeros(count, listed, dtype=torch.float32, device=device)
    before = torch.zeros(count, listed, dtype=torch.int32, device=device)
    if count:
        _score_kernel[(count, chunks)](
            *view.arguments, ids, mass, values, before, x.logits.shape[1], chunks, x.logits.stride(0), listed,
            CHUNK=CHUNK, CP=triton.next_power_of_2(chunks), PROCESSED=view.drawn is not None, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    raw_top = x.raw_best[view.entries.row].amax(1)  # NaN if it holds one
    normaliser = torch.where(view.entries.is_processed == 0, raw_top, 0.0).double() + mass.sum(1).log()
    scores = (values.double() - normaliser[:, None]).float()
    return Scored(scores, before + 1, normaliser, ~torch.isfinite(raw_top))


@triton.jit
def _best_kernel(
    rows, processed, logits, adjusted, raw_best, best, best_id, asked, masks, temperature, top_k, min_p, border,
    last_tie, found, found_ids, V, C, stride, count, CHUNK: tl.constexpr, CP: tl.constexpr,
    PROCESSED: tl.constexpr,
):  # fmt: skip
    """The count best of each chunk: whole numbers that grow as the values do, and ids."""
    entry, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, is_processed = _looked_at(rows, processed, entry, PROCESSED)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _seen(
        logits, adjusted, best, best_id, asked, masks, temperature, top_k, min_p, border, last_tie, row, is_processed,
        ids, V, C, stride, CP,
    )  # fmt: skip
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # no -0.0, which would come after 0.0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(ids < V, order, TAKEN)
    to = (entry * C + chunk) * count
    for one in range(0, count):
        largest = tl.max(order, 0)
        first = tl.min(tl.where(order == largest, ids, 2147483647), 0)
        tl.store(found + to + one, largest)
        tl.store(found_ids + to + one, first)
        order = tl.where(ids == first, TAKEN, order)


def best_ids(view: View, count: int, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    """Of each entry the ids [m, count] of the largest values, best first, and their log-softmax."""
    x = view.of
    vocab_size, chunks, device = x.logits.shape[1], x.best.shape[1], x.logits.device
    num_entries, of_each = len(view.entries.row), min(count, CHUNK)
    found, found_ids = (
        torch.empty(num_entries, chunks * of_each, dtype=torch.int32, device=device) for _ in range(2)
    )  # fmt: skip
    _best_kernel[(num_entries, chunks)](
        *view.arguments, found, found_ids, vocab_size, chunks, x.logits.stride(0), of_each,
        CHUNK=CHUNK, CP=triton.next_power_of_2(chunks), PROCESSED=view.drawn is not None, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    keys = torch.topk((found.long() << 32) | (vocab_size - 1 - found_ids.long()).clamp_(min=0), count).values
    order = (keys >> 32).int()
    values = torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32)
    ids = vocab_size - 1 - (keys & 0xFFFFFFFF)
    return ids, (values.double() - normaliser[:, None]).float()
