"""Which ids the filters leave, to the id: ties as `ops.select.kept` has them.

- Filters are thresholds: the value and, among its equals, the id up to which ids are kept.
- A row has one program, and rows that ask for no filter leave theirs at once. What comes from the passes before says
  where there is nothing to look for: only blocks whose largest value may be kept are read.
- A border is searched by halves: over those blocks while many ids are in question, then over these ids alone.

Values are told apart by their depth: the bits of |x| of a scaled value x <= 0, which grow as it falls.

Shapes: as in `weights`; R = ROOM, of ids in question; a tile is TB blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from perdure.ops.triton.adjust import Adjusted
from perdure.ops.triton.launches import power_of_2
from perdure.ops.triton.weights import (
    COLDEST,
    Kept,
    Masses,
    Settings,
    exp,
    halved,
    has_filter,
    is_adjusted,
    is_kept,
    read,
    scaled,
    top_of,
)

ROOM = 4096  # ids that are searched without reading the row again
TILE_BLOCKS = 64
EVERY = tl.constexpr(2139095040)
"""The depth of -inf."""
NOWHERE = tl.constexpr(2147483647)
NEAR = tl.constexpr(1e-4)
"""Of a mass, more than a sum of fp32 is wrong by."""


@triton.jit
def _depth(x):
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _value(depth):
    return -(depth.to(tl.float32, bitcast=True))


@triton.jit
def _tile(place, listed, start, count, TB: tl.constexpr):
    """Scaled values [TB, 64] of listed blocks, their ids and depths; NOWHERE is deeper than any."""
    logits, adjusted, elsewhere, row, V, stride, top, heat = place
    entry = start + tl.arange(0, TB)
    block = tl.load(listed + entry, mask=entry < count, other=(V + 63) // 64)
    ids = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = scaled(read(logits, adjusted, elsewhere, row, ids, V, stride), top, heat)
    return x, ids, tl.where(ids < V, _depth(x), NOWHERE)


@triton.jit
def _list(depths, deepest, listed):
    """List the blocks with a value no deeper than this, ascending: how many."""
    chosen = (depths <= deepest).to(tl.int32)
    tl.debug_barrier()
    tl.store(listed + tl.cumsum(chosen, 0) - 1, tl.arange(0, depths.shape[0]), mask=chosen != 0)
    tl.debug_barrier()
    return tl.sum(chosen, 0)


@triton.jit
def _depth_of_blocks(depths, k, deepest):
    """The least depth, `deepest` at most, no deeper than which k blocks have a value."""
    low = 0
    high = deepest
    while low < high:
        middle = low + (high - low) // 2
        reached = tl.sum((depths <= middle).to(tl.int32), 0) >= k
        low = tl.where(reached, low, middle + 1)
        high = tl.where(reached, middle, high)
    return low


@triton.jit
def _within(place, listed, count, depth, least, MASS: tl.constexpr, TB: tl.constexpr):
    """How many ids lie no deeper than this, and their mass (fp64) if it is asked for."""
    number = tl.zeros((TB,), tl.int32)
    mass = tl.zeros((TB,), tl.float64)
    for start in range(0, count, TB):
        x, _ids, its = _tile(place, listed, start, count, TB)
        number += tl.sum((its <= depth).to(tl.int32), 1)
        if MASS:
            w = exp(x)
            mass += tl.sum(tl.where((its <= depth) & (w >= least), w, 0.0).to(tl.float64), 1)
    return tl.sum(number, 0), tl.sum(mass, 0)


@triton.jit
def _nearly_within(place, listed, count, depth, TB: tl.constexpr):
    """The same to within NEAR of the mass, by a third of the work."""
    number = tl.zeros((TB,), tl.int32)
    mass = tl.zeros((TB,), tl.float32)
    for start in range(0, count, TB):
        x, _ids, its = _tile(place, listed, start, count, TB)
        number += tl.sum((its <= depth).to(tl.int32), 1)
        mass += tl.sum(tl.where(its <= depth, tl.exp2(x * 1.4426950408889634), 0.0), 1)
    return tl.sum(number, 0), tl.sum(mass, 0).to(tl.float64)


@triton.jit
def _gather(place, listed, count, low, high, least, found, MASS: tl.constexpr, ROOM: tl.constexpr, TB: tl.constexpr):
    """The depths from low to high [ROOM]; past these, NOWHERE. And the mass of what is less deep, if that is asked."""
    placed = 0
    mass = tl.zeros((TB,), tl.float64)
    for start in range(0, count, TB):
        x, _ids, its = _tile(place, listed, start, count, TB)
        inside = ((its >= low) & (its <= high)).to(tl.int32)
        in_blocks = tl.sum(inside, 1)
        first = placed + tl.cumsum(in_blocks, 0) - in_blocks
        at = first[:, None] + tl.cumsum(inside, 1) - 1
        tl.store(found + at, its, mask=(inside != 0) & (at < ROOM))
        placed += tl.sum(in_blocks, 0)
        if MASS:
            if low > 0:
                w = exp(x)
                mass += tl.sum(tl.where((its < low) & (w >= least), w, 0.0).to(tl.float64), 1)
    tl.debug_barrier()
    entry = tl.arange(0, ROOM)
    return tl.load(found + entry, mask=entry < placed, other=NOWHERE), tl.sum(mass, 0)


@triton.jit
def _border(
    place, depths, listed, deepest, k, wanted, least, found, MASS: tl.constexpr, ROOM: tl.constexpr, TB: tl.constexpr
):
    """The least depth, `deepest` at most, within which k ids lie, or the mass wanted (MASS). And the mass of what is
    less deep than that, and how many ids have it. depths: of blocks; each time those are listed that are to be read."""
    low = 0
    high = deepest
    number = (
        tl.sum((depths <= high).to(tl.int32), 0) * 64
    )  # at most so many ids are from low to high, and before low so many:
    before = 0
    rounds = 0
    is_exact = least > 0.0  # else masses are no more than near until that does not tell any more
    while (number > ROOM) & (low < high):
        middle = low + (high - low) // 2
        if rounds < 12:  # most values are far from the largest: halves of the values, not of their depths
            half = _depth(0.5 * (_value(low) + _value(high)))
            middle = tl.minimum(tl.maximum(half, low), high - 1)
        count = _list(depths, middle, listed)
        if not MASS:
            its_number, _ = _within(place, listed, count, middle, 0.0, False, TB)
            reached, tells = its_number >= k, True
        else:
            if is_exact:
                its_number, its_mass = _within(place, listed, count, middle, least, True, TB)
            else:
                its_number, its_mass = _nearly_within(place, listed, count, middle, TB)
            reached = its_mass >= wanted
            tells = is_exact | (tl.abs(its_mass - wanted) > NEAR * wanted)
            is_exact = (tells == 0) | (least > 0.0)
        if tells:
            number = tl.where(reached, its_number - before, number - (its_number - before))
            before = tl.where(reached, before, its_number)
            low = tl.where(reached, low, middle + 1)
            high = tl.where(reached, middle, high)
            rounds += 1
    count = _list(depths, high, listed)
    mass_before = tl.full((), 0.0, tl.float64)
    if number <= ROOM:
        its, mass_before = _gather(place, listed, count, low, high, least, found, MASS, ROOM, TB)
        w = exp(_value(its))
        w = tl.where((its == NOWHERE) | (w < least), 0.0, w).to(tl.float64)
        while low < high:
            middle = low + (high - low) // 2
            if MASS:
                reached = mass_before + tl.sum(tl.where(its <= middle, w, 0.0), 0) >= wanted
            else:
                reached = before + tl.sum((its <= middle).to(tl.int32), 0) >= k
            low = tl.where(reached, low, middle + 1)
            high = tl.where(reached, middle, high)
        mass_before += tl.sum(tl.where(its < low, w, 0.0), 0)
        number = tl.sum((its == low).to(tl.int32), 0)
    elif MASS:
        _, mass_before = _within(place, listed, count, low - 1, least, True, TB)
    return low, mass_before, number


@triton.jit
def _id_of(place, listed, count, depth, number, TB: tl.constexpr):
    """The id of the so-manyth that lies at this depth; V, if there are fewer."""
    seen = 0
    found = tl.full((), NOWHERE, tl.int32)
    for start in range(0, count, TB):
        _x, ids, its = _tile(place, listed, start, count, TB)
        equal = (its == depth).to(tl.int32)
        in_blocks = tl.sum(equal, 1)
        here = tl.sum(in_blocks, 0)
        if (seen < number) & (seen + here >= number):
            before = seen + tl.cumsum(in_blocks, 0) - in_blocks
            rank = before[:, None] + tl.cumsum(equal, 1)
            found = tl.min(tl.min(tl.where((equal != 0) & (rank == number), ids, NOWHERE), 1), 0)
        seen += here
    return found


@triton.jit
def _least_depth(w):
    """A depth within which all values lie whose exp is w (fp32) or more."""
    return _depth(tl.minimum(tl.log(w) * 1.0001 - 0.001, -0.0))


@triton.jit
def _keep_masses(place, listed, count, sums, NB, edge, tie, least, NBP: tl.constexpr, TB: tl.constexpr):
    """Sums of the row's blocks, of what is kept alone."""
    row, V = place[3], place[4]
    blocks = tl.arange(0, NBP)
    tl.store(sums + row * NB + blocks, tl.zeros((NBP,), tl.float32), mask=blocks < NB)
    tl.debug_barrier()
    for start in range(0, count, TB):
        x, ids, _its = _tile(place, listed, start, count, TB)
        w = exp(x)
        w = tl.where(is_kept(x, w, ids, V, edge, tie, least), w, 0.0)
        entry = start + tl.arange(0, TB)
        block = tl.load(listed + entry, mask=entry < count, other=0)
        tl.store(sums + row * NB + block, halved(w, TB), mask=entry < count)


@triton.jit
def _filter_kernel(
    logits, adjusted, asked, masks, best, best_id, block_best, temperature, top_k, top_p, min_p, border, last_tie, sums,
    of_chunks, lists, found, V, C, NB, stride,
    CP: tl.constexpr, NBP: tl.constexpr, TB: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Border of each row: kept are values above it, and its equals up to an id. No border is -inf."""
    row = tl.program_id(0).to(tl.int64)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    heat = tl.load(temperature + row)
    tl.store(border + row, float("-inf"))
    tl.store(last_tie + row, V)
    if (heat == 0.0) | (k == 1) | (has_filter(k, p, least, V) == 0):
        return
    top, _, bad = top_of(best, best_id, row, C, CP)
    if bad:
        return
    heat = tl.maximum(heat, COLDEST)
    place = (logits, adjusted, is_adjusted(asked, masks, row), row, V, stride, top, heat)
    listed = lists + row * NB
    found += row * ROOM
    deepest = tl.full((), EVERY, tl.int32)
    whole = tl.full((), 0.0, tl.float64)
    has_k = (k > 1) & (k < V)
    if least > 0.0:
        deepest = tl.minimum(deepest, _least_depth(least))
    is_alone = (has_k == 0) & (least == 0.0)
    if is_alone:  # less than what top_p leaves out lies below a share of it an id
        chunks = tl.arange(0, CP)
        whole = tl.sum(tl.load(of_chunks + row * C + chunks, mask=chunks < C, other=0.0), 0)
        share = tl.maximum((0.5 * (1.0 - p) * whole / V).to(tl.float32), COLDEST)
        deepest = tl.minimum(deepest, _least_depth(share))
    blocks = tl.arange(0, NBP)
    inside = blocks < (V + 63) // 64
    of_blocks = scaled(tl.load(block_best + row * NB + blocks, mask=inside, other=float("-inf")), top, heat)
    depths = tl.where(inside, _depth(of_blocks), NOWHERE)
    if has_k:
        deepest = _depth_of_blocks(depths, k, deepest)
        deepest, _, _ = _border(place, depths, listed, deepest, k, 0.0, 0.0, found, False, ROOM, TB)
    tie = V
    if p < 1.0:
        if is_alone == 0:
            _, whole = _within(place, listed, _list(depths, deepest, listed), deepest, least, True, TB)
        wanted = whole * p
        deepest, above, equals = _border(place, depths, listed, deepest, 0, wanted, least, found, True, ROOM, TB)
        # Of the equals at the border, no more than are needed.
        weight = tl.max(exp(_value(deepest + tl.zeros((2,), tl.int32))), 0)
        if (equals > 1) & (weight > 0.0) & (weight >= least):
            needed = tl.maximum(tl.ceil((wanted - above) / weight.to(tl.float64)), 1.0).to(tl.int32)
            if needed < equals:
                tie = tl.minimum(_id_of(place, listed, _list(depths, deepest, listed), deepest, needed, TB), V)
    edge = _value(deepest)
    if has_k | (p < 1.0):
        tl.store(border + row, edge)
        tl.store(last_tie + row, tie)
    else:
        edge = float("-inf")
    count = _list(depths, deepest, listed)
    _keep_masses(place, listed, count, sums, NB, edge, tie, least, NBP, TB)


def find_kept(x: Adjusted, s: Settings, masses: Masses) -> Kept:
    """A `Filter`."""
    num_rows, vocab_size = x.logits.shape
    chunks, num_blocks, device = x.best.shape[1], masses.sums.shape[1], x.logits.device
    border = torch.empty(num_rows, dtype=torch.float32, device=device)
    last_tie = torch.empty(num_rows, dtype=torch.int32, device=device)
    lists = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    found = torch.empty(num_rows, ROOM, dtype=torch.int32, device=device)
    padded = power_of_2(num_blocks)
    _filter_kernel[(num_rows,)](
        x.logits, x.values, s.asked, s.masks, x.best, x.best_id, x.block_best, s.temperature, s.top_k, s.top_p, s.min_p,
        border, last_tie, masses.sums, masses.of_chunks, lists, found, vocab_size, chunks, num_blocks,
        x.logits.stride(0), CP=power_of_2(chunks), NBP=padded, TB=min(TILE_BLOCKS, padded), ROOM=ROOM,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return Kept(border, last_tie)
