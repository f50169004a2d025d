"""Scores on the device: log-probabilities, ranks and the best ids of rows, without their log-softmax in memory.

- A row is seen as the model gave it (raw) or as it was drawn from (processed): scaled, -inf where an id was dropped, a
  greedy one all on its id. Nothing of that is written down: every pass makes it anew from the logits.
- A normaliser is fp64, from sums of blocks of 64 as `ops.sampling` has them; ranks and order are those of the values as
  seen, ties to the lower id.
- A few best ids lie in as many blocks of 64, those with the largest values: no others are read for them.

Shapes: m entries, each of one row of logits [n, V]; L ids an entry, C = chunks of CHUNK ids, nb = blocks of 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from perdure.ops.triton.adjust import CHUNK, Adjusted
from perdure.ops.triton.launches import power_of_2
from perdure.ops.triton.weights import (
    COLDEST,
    Kept,
    Settings,
    exp,
    halved_16,
    is_adjusted,
    is_kept,
    read,
    scaled,
    top_of,
)

FEW = 64  # best ids of an entry, found one after the other
TILE_BLOCKS = 32
TAKEN = tl.constexpr(-(1 << 31))
"""Less than the order of any value."""
NOTHING = tl.constexpr(-2139095041)
"""The order of -inf."""


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
def _looked_at(
    rows, processed, best, best_id, asked, masks, temperature, top_k, min_p, border, last_tie, C, CP: tl.constexpr,
    PROCESSED: tl.constexpr,
):  # fmt: skip
    """This program's row, whether it is seen processed, and how; a kernel without columns for that sees none so."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry).to(tl.int64)
    if not PROCESSED:
        is_processed, how = 0, (0, 0, 0, 0, 0, 0, 0, 0)
    else:
        is_processed = tl.load(processed + entry)
        top, first, _bad = top_of(best, best_id, row, C, CP)
        heat = tl.load(temperature + row)
        is_greedy = (heat == 0.0) | (tl.load(top_k + row) == 1)
        edge, tie, least = tl.load(border + row), tl.load(last_tie + row), tl.load(min_p + row)
        elsewhere = is_adjusted(asked, masks, row)
        how = (top, first, tl.maximum(heat, COLDEST), is_greedy, elsewhere, edge, tie, least)
    return row, is_processed, how


@triton.jit
def _raw(logits, row, ids, V, stride):
    return tl.load(logits + row * stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _seen(logits, adjusted, row, is_processed, how, ids, V, stride, PROCESSED: tl.constexpr):
    """The values of ids."""
    if PROCESSED:
        top, first, heat, is_greedy, elsewhere, edge, tie, least = how
        if is_processed == 0:
            x = _raw(logits, row, ids, V, stride)
        elif is_greedy:
            x = tl.where(ids == first, 0.0, float("-inf"))
        else:
            x = scaled(read(logits, adjusted, elsewhere, row, ids, V, stride), top, heat)
            x = tl.where(is_kept(x, exp(x), ids, V, edge, tie, least), x, float("-inf"))
    else:
        x = _raw(logits, row, ids, V, stride)
    return x


@triton.jit
def _ahead(x, ids, value, own, V):
    """1 for values that come before that of the id `own`."""
    return (((x > value) | ((x == value) & (ids < own))) & (ids < V)).to(tl.int32)


@triton.jit(do_not_specialize=["L"])
def _score_kernel(
    rows, processed, logits, adjusted, raw_best, best, best_id, asked, masks, temperature, top_k, min_p, border,
    last_tie, ids, mass, values, before, V, C, stride, L,
    CHUNK: tl.constexpr, CP: tl.constexpr, PROCESSED: tl.constexpr,
):  # fmt: skip
    """Of each chunk its mass (fp64) and how many ids come before each one that is asked for in (value descending, id
    ascending)."""
    entry, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, is_processed, how = _looked_at(
        rows, processed, best, best_id, asked, masks, temperature, top_k, min_p, border, last_tie, C, CP, PROCESSED
    )
    N: tl.constexpr = CHUNK // 64
    at = (chunk * N + tl.arange(0, N))[:, None] * 64 + tl.arange(0, 16)[None, :]
    a = _seen(logits, adjusted, row, is_processed, how, at, V, stride, PROCESSED)
    b = _seen(logits, adjusted, row, is_processed, how, at + 16, V, stride, PROCESSED)
    c = _seen(logits, adjusted, row, is_processed, how, at + 32, V, stride, PROCESSED)
    d = _seen(logits, adjusted, row, is_processed, how, at + 48, V, stride, PROCESSED)
    raw_top, _first, _bad = top_of(raw_best, best_id, row, C, CP)
    top = tl.where(is_processed == 0, raw_top, 0.0)
    sums = halved_16((exp(a - top) + exp(c - top)) + (exp(b - top) + exp(d - top)), N)
    tl.store(mass + entry * C + chunk, tl.sum(sums.to(tl.float64), 0))
    for one in range(0, L):
        own = tl.load(ids + entry * L + one)
        if own >= 0:
            its = _seen(logits, adjusted, row, is_processed, how, own + tl.arange(0, 1), V, stride, PROCESSED)
            value = tl.max(its, 0)
            ahead = _ahead(a, at, value, own, V) + _ahead(b, at + 16, value, own, V)
            ahead += _ahead(c, at + 32, value, own, V) + _ahead(d, at + 48, value, own, V)
            tl.atomic_add(before + entry * L + one, tl.sum(tl.sum(ahead, 1), 0))
            if chunk == 0:
                tl.store(values + entry * L + one, value)


@triton.jit(do_not_specialize=["L"])
def _finish_kernel(
    rows, processed, raw_best, mass, values, before, scores, ranks, normaliser, is_bad, C, L,
    CP: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """From what chunks found to an entry's numbers."""
    entry = tl.program_id(0).to(tl.int64)
    chunks, listed = tl.arange(0, CP), tl.arange(0, LP)
    best = tl.load(raw_best + tl.load(rows + entry).to(tl.int64) * C + chunks, mask=chunks < C, other=float("-inf"))
    top = tl.max(tl.where(best != best, float("inf"), best), 0)
    tl.store(is_bad + entry, (tl.abs(top) == float("inf")).to(tl.int8))
    whole = tl.sum(tl.load(mass + entry * C + chunks, mask=chunks < C, other=0.0), 0)
    less = tl.where(tl.load(processed + entry) == 0, top, 0.0).to(tl.float64) + tl.log(whole)
    tl.store(normaliser + entry, less)
    value = tl.load(values + entry * L + listed, mask=listed < L, other=0.0)
    tl.store(scores + entry * L + listed, (value.to(tl.float64) - less).to(tl.float32), mask=listed < L)
    number = tl.load(before + entry * L + listed, mask=listed < L, other=0)
    tl.store(ranks + entry * L + listed, number + 1, mask=listed < L)


@dataclass(frozen=True, slots=True)
class Scored:
    """scores (fp32) and ranks from 1, [m, L]. normaliser [m] (fp64). is_bad [m]: of rows that cannot be scored."""

    scores: Tensor
    ranks: Tensor
    normaliser: Tensor
    is_bad: Tensor


def score(view: View, ids: Tensor) -> Scored:
    """log-softmax at ids [m, L] (int32; -1: none, and nothing is said of it)."""
    x, entries = view.of, view.entries
    (count, listed), chunks, device = ids.shape, x.best.shape[1], ids.device
    mass = torch.empty(count, chunks, dtype=torch.float64, device=device)
    values, scores = (torch.empty(count, listed, dtype=torch.float32, device=device) for _ in range(2))
    before, ranks = (torch.zeros(count, listed, dtype=torch.int32, device=device) for _ in range(2))
    normaliser = torch.empty(count, dtype=torch.float64, device=device)
    is_bad = torch.empty(count, dtype=torch.bool, device=device)
    if count:
        padded = power_of_2(chunks)
        _score_kernel[(count, chunks)](
            *view.arguments, ids, mass, values, before, x.logits.shape[1], chunks, x.logits.stride(0), listed,
            CHUNK=CHUNK, CP=padded, PROCESSED=view.drawn is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _finish_kernel[(count,)](
            entries.row, entries.is_processed, x.raw_best, mass, values, before, scores, ranks, normaliser,
            is_bad.view(torch.int8), chunks, listed, CP=padded, LP=power_of_2(listed), num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return Scored(scores, ranks, normaliser, is_bad)


@triton.jit
def _order(x):
    """Whole numbers that grow as x does."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # no -0.0, which would come after 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["count"])
def _few_best_kernel(
    rows, processed, logits, adjusted, raw_best, best, best_id, asked, masks, temperature, top_k, min_p, border,
    last_tie, raw_block_best, block_best, normaliser, lists, found_ids, found_scores, V, C, NB, stride, count,
    CP: tl.constexpr, NBP: tl.constexpr, TB: tl.constexpr, PROCESSED: tl.constexpr,
):  # fmt: skip
    """An entry's count best ids, one after the other, and their scores."""
    entry = tl.program_id(0).to(tl.int64)
    row, is_processed, how = _looked_at(
        rows, processed, best, best_id, asked, masks, temperature, top_k, min_p, border, last_tie, C, CP, PROCESSED
    )
    blocks = tl.arange(0, NBP)
    inside = blocks < (V + 63) // 64
    largest = tl.load(raw_block_best + row * NB + blocks, mask=inside, other=float("-inf"))
    if PROCESSED:
        if is_processed != 0:
            largest = tl.load(block_best + row * NB + blocks, mask=inside, other=float("-inf"))
            if how[3] == 0:
                largest = scaled(largest, how[0], how[2])
    order = tl.where(inside, _order(largest), TAKEN)
    low = tl.full((), TAKEN, tl.int64)
    high = tl.full((), 2147483647, tl.int64)
    while low < high:  # the order of the count-th block
        middle = (low + high + 1) >> 1
        reached = tl.sum((order >= middle.to(tl.int32)).to(tl.int32), 0) >= count
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    # Where fewer ids have a value than are wanted, the first of the others come next: of twice so many, some are such.
    chosen = ((order >= low.to(tl.int32)) & (order > NOTHING)) | (inside & (blocks * 64 < 2 * count))
    listed = lists + entry * NB
    tl.store(listed + tl.cumsum(chosen.to(tl.int32), 0) - 1, blocks, mask=chosen)
    tl.debug_barrier()
    num_blocks = tl.sum(chosen.to(tl.int32), 0)
    less = tl.load(normaliser + entry)
    last, last_id = tl.full((), 2147483647, tl.int32), tl.full((), -1, tl.int32)
    for one in range(0, count):
        next_, next_id = tl.full((), TAKEN, tl.int32), tl.full((), 2147483647, tl.int32)
        for start in range(0, num_blocks, TB):
            at = start + tl.arange(0, TB)
            block = tl.load(listed + at, mask=at < num_blocks, other=(V + 63) // 64)
            ids = block[:, None] * 64 + tl.arange(0, 64)[None, :]
            its = _order(_seen(logits, adjusted, row, is_processed, how, ids, V, stride, PROCESSED))
            is_left = (ids < V) & ((its < last) | ((its == last) & (ids > last_id)))
            its = tl.where(is_left, its, TAKEN)
            most = tl.max(tl.max(its, 1), 0)
            first = tl.min(tl.min(tl.where(its == most, ids, 2147483647), 1), 0)
            next_id = tl.where(most > next_, first, next_id)
            next_ = tl.maximum(next_, most)
        last, last_id = next_, next_id
        value = tl.where(last < 0, last ^ 0x7FFFFFFF, last).to(tl.float32, bitcast=True)
        tl.store(found_ids + entry * count + one, last_id)
        tl.store(found_scores + entry * count + one, (value.to(tl.float64) - less).to(tl.float32))


@triton.jit(do_not_specialize=["count"])
def _best_kernel(
    rows, processed, logits, adjusted, raw_best, best, best_id, asked, masks, temperature, top_k, min_p, border,
    last_tie, found, found_ids, V, C, stride, count, CHUNK: tl.constexpr, CP: tl.constexpr,
    PROCESSED: tl.constexpr,
):  # fmt: skip
    """The count best of each chunk: their orders, and ids."""
    entry, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, is_processed, how = _looked_at(
        rows, processed, best, best_id, asked, masks, temperature, top_k, min_p, border, last_tie, C, CP, PROCESSED
    )
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    order = _order(_seen(logits, adjusted, row, is_processed, how, ids, V, stride, PROCESSED))
    order = tl.where(ids < V, order, TAKEN)
    to = (entry * C + chunk) * count
    for one in range(0, count):
        largest = tl.max(order, 0)
        first = tl.min(tl.where(order == largest, ids, 2147483647), 0)
        tl.store(found + to + one, largest)
        tl.store(found_ids + to + one, first)
        order = tl.where(ids == first, TAKEN, order)


def best_ids(view: View, count: int, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    """Of each entry the ids [m, count] (int32) of the largest values, best first, and their log-softmax."""
    x = view.of
    vocab_size, (chunks, num_blocks), device = (
        x.logits.shape[1],
        (x.best.shape[1], x.block_best.shape[1]),
        x.best.device,
    )
    num_entries, of_each = len(view.entries.row), min(count, CHUNK)
    is_drawn, padded = view.drawn is not None, power_of_2(chunks)
    if count <= FEW:
        ids, lists = (
            torch.empty(num_entries, width, dtype=torch.int32, device=device) for width in (count, num_blocks)
        )  # fmt: skip
        scores = torch.empty(num_entries, count, dtype=torch.float32, device=device)
        _few_best_kernel[(num_entries,)](
            *view.arguments, x.raw_block_best, x.block_best, normaliser, lists, ids, scores, vocab_size, chunks,
            num_blocks, x.logits.stride(0), count, CP=padded, NBP=power_of_2(num_blocks), TB=TILE_BLOCKS,
            PROCESSED=is_drawn, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return ids, scores
    found, found_ids = (
        torch.empty(num_entries, chunks * of_each, dtype=torch.int32, device=device) for _ in range(2)
    )  # fmt: skip
    _best_kernel[(num_entries, chunks)](
        *view.arguments, found, found_ids, vocab_size, chunks, x.logits.stride(0), of_each, CHUNK=CHUNK, CP=padded,
        PROCESSED=is_drawn, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    keys = torch.topk((found.long() << 32) | (vocab_size - 1 - found_ids.long()).clamp_(min=0), count).values
    order = (keys >> 32).int()
    values = torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32)
    best = (vocab_size - 1 - (keys & 0xFFFFFFFF)).int()
    return best, (values.double() - normaliser[:, None]).float()
