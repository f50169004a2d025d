"""Ranges of the keys of a row of one query, and how what comes of them is joined by a kernel of its own.

A state is of some queries: the largest product of each, the sum of weights relative to it, the sum of weighted values.
A sink is none of the keys: it enters once, after the last range.

Shapes: as in `attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def faded_by(value, base, factor):
    """2 ** ((value - base) * factor); 0 where there is no value yet, whatever the base."""
    return tl.exp2((value - tl.where(base == float("-inf"), 0.0, base)) * factor)


@triton.jit
def joined(most, total, mixed, its_most, its_total, its_mixed, factor):
    """The states of two ranges of keys as one."""
    new = tl.maximum(most, its_most)
    faded, its_faded = faded_by(most, new, factor), faded_by(its_most, new, factor)
    total = total * faded + its_total * its_faded
    mixed = mixed * faded[:, None] + its_mixed * its_faded[:, None]
    return new, total, mixed


@triton.jit
def with_sink(total, most, sink, factor):
    """A state's sum of weights with that of a column that has no value; sink in natural units."""
    return total + tl.exp2(sink * 1.4426950408889634 - most * factor)


@triton.jit
def first_key(position, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Where the first block begins that a query there sees something of."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0) // BLOCK * BLOCK
    return 0


@triton.jit
def range_of(position, number, num_ranges, WINDOW: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """The keys of one of a row's ranges, perhaps none. SPLIT: at absolute positions; 0: of num_ranges equal ones."""
    first = first_key(position, WINDOW, BLOCK)
    if SPLIT > 0:
        begin, end = number * SPLIT, number * SPLIT + SPLIT
    else:
        each = tl.cdiv(tl.cdiv(position + 1 - first, num_ranges), BLOCK) * BLOCK
        begin, end = first + number * each, first + number * each + each
    return tl.maximum(begin, first), tl.minimum(end, position + 1)


@triton.jit(do_not_specialize=["num_ranges"])
def combine_kernel(
    partial, sums, sinks, index, positions, out, factor, num_ranges, GP: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One row and key head: its ranges at absolute positions, in their order."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    if position < 0:
        return
    group, dims = tl.arange(0, GP), tl.arange(0, DP)
    of_group = group < G
    inside = of_group[:, None] & (dims < D)[None, :]
    heads = tl.num_programs(1) * G
    cells = (row.to(tl.int64) * heads + head * G + group) * num_ranges
    most = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    mixed = tl.zeros((GP, DP), tl.float32)
    for number in range(first_key(position, WINDOW, BLOCK) // SPLIT, position // SPLIT + 1):
        begin, end = range_of(position, number, num_ranges, WINDOW, BLOCK, SPLIT)
        if begin < end:
            cell = cells + number
            its_most = tl.load(sums + cell * 2, mask=of_group, other=0.0)
            its_total = tl.load(sums + cell * 2 + 1, mask=of_group, other=1.0)
            its_mixed = tl.load(partial + cell[:, None] * D + dims[None, :], mask=inside, other=0.0)
            most, total, mixed = joined(most, total, mixed, its_most, its_total, its_mixed, factor)
    if sinks is not None:
        total = with_sink(total, most, tl.load(sinks + head * G + group, mask=of_group, other=0.0), factor)
    at = out + (tl.load(index + row).to(tl.int64) * heads + head * G + group[:, None]) * D + dims[None, :]
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_ranges"])
def join_kernel(
    partial, sums, sinks, index, positions, out, factor, num_ranges, RANGES: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row and query head: its equal ranges, all at once."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    position = tl.load(positions + row)
    if position < 0:
        return
    numbers, dims = tl.arange(0, RANGES), tl.arange(0, DP)
    begin, end = range_of(position, numbers, num_ranges, WINDOW, BLOCK, 0)
    there = (begin < end) & (numbers < num_ranges)
    cells = (row.to(tl.int64) * heads + head) * num_ranges + numbers
    most = tl.load(sums + cells * 2, mask=there, other=float("-inf"))
    total = tl.load(sums + cells * 2 + 1, mask=there, other=0.0)
    inside = there[:, None] & (dims < D)[None, :]
    mixed = tl.load(partial + cells[:, None] * D + dims[None, :], mask=inside, other=0.0)
    largest = tl.max(most, 0)
    share = faded_by(most, largest, factor)
    mixed = tl.sum(mixed * share[:, None], 0)
    total = tl.sum(total * share, 0)
    if sinks is not None:
        total = with_sink(total, largest, tl.load(sinks + head), factor)
    result = mixed / total
    at = out + (tl.load(index + row).to(tl.int64) * heads + head) * D + dims
    tl.store(at, result.to(out.dtype.element_ty), mask=dims < D)
