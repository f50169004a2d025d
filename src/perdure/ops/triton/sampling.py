"""Drawing on the device: `ops.sampling` to the rounding, from logits that never leave.

- A draw is spelled out there and repeated here: exp by the polynomial that numpy's vector form uses (AVX2 and AVX512),
  sums of blocks of 64 ids by halves, running sums in order, one keyed uniform number a row. So equal logits give the
  token that a CPU draws. Where numpy has another exp, or mass lies within rounding of a border, one may differ.
- Filters are thresholds: the value and, among its equals, the id up to which ids are kept.
- Four launches for any mix of settings, so they can be captured; rows that ask for no filter cost nothing in theirs.
- A row that asked for something before its temperature is read where that was done (`adjust`), others where they are.

Shapes: n rows, V = vocabulary, C = chunks of CHUNK ids, nb = blocks of 64 ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from perdure.ops.triton.adjust import CHUNK, FINE, NOTHING_LEFT, UNUSABLE, Adjusted, adjust, learn

BLOCK = 64  # ids of one block of the draw's sum
GROUP = 64  # blocks fetched together: each alone would wait for memory
COLDEST = tl.constexpr(1.1754943508222875e-38)
"""The least temperature there is: the smallest normal fp32."""


@triton.jit
def _all(x, value):
    return tl.full(x.shape, value, tl.float32)


@triton.jit
def exp(x):
    """numpy's exp of fp32 for x <= 0, every rounding of it."""
    x = tl.maximum(x, -150.0)
    steps = (x * 1.4426950408889634 + 12582912.0) - 12582912.0
    r = tl.fma(steps, _all(x, -6.93145752e-1), x)
    r = tl.fma(steps, _all(x, -1.42860677e-6), r)
    over = tl.fma(r, _all(x, 5.082762527590693718096e-04), _all(x, 6.757896990527504603057e-03))
    over = tl.fma(over, r, _all(x, 5.114512081637298353406e-02))
    over = tl.fma(over, r, _all(x, 2.473615434895520810817e-01))
    over = tl.fma(over, r, _all(x, 7.257664613233124478488e-01))
    over = tl.fma(over, r, _all(x, 9.999999999980870924916e-01))
    under = tl.fma(r, _all(x, 2.159509375685829852307e-02), _all(x, -2.742335390411667452936e-01))
    under = tl.fma(under, r, _all(x, 1.0))
    power = tl.maximum(steps.to(tl.int32) + 64, -126)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    return tl.div_rn(over, under) * scale * 5.421010862427522e-20  # 2 ** -64, so that a denormal is rounded once


@triton.jit
def halved(w, N: tl.constexpr):
    """Sums [N] of w [N * 64], each of 64 in order of the halves."""
    a, b = tl.split(tl.permute(tl.reshape(w, (N, 2, 32)), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, (N, 2, 16)), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, (N, 2, 8)), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, (N, 2, 4)), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, (N, 2, 2)), (0, 2, 1)))
    a, b = tl.split(tl.reshape(a + b, (N, 2)))
    return a + b


@triton.jit
def place_of(logits, adjusted, asked, masks, row, V, stride):
    """Where the row's values begin."""
    at = logits + row * stride
    if (tl.load(asked + row) != 0) | (tl.load(masks + row) != 0):
        at = adjusted + row * V
    return at


@triton.jit
def top_of(best, best_id, row, C, CP: tl.constexpr):
    """A row's largest value, the first id that has it, and whether nothing can be drawn from the row."""
    chunks = tl.arange(0, CP)
    values = tl.load(best + row * C + chunks, mask=chunks < C, other=float("-inf"))
    ids = tl.load(best_id + row * C + chunks, mask=chunks < C, other=2147483647)
    bad = tl.max((values != values).to(tl.int32), 0) > 0
    top = tl.max(tl.where(values != values, float("-inf"), values), 0)
    first = tl.min(tl.where(values == top, ids, 2147483647), 0)
    bad = bad | (top == float("-inf")) | (top == float("inf"))
    return tl.where(bad, 0.0, top), first, bad


@triton.jit
def scaled(at, ids, V, top, heat):
    x = tl.load(at + ids, mask=ids < V, other=float("-inf"))
    return tl.div_rn(x - top, tl.full(x.shape, heat, tl.float32))


@triton.jit
def _depth(x):
    """Bits that grow as x <= 0 falls."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _filter_kernel(
    logits, adjusted, asked, masks, best, best_id, temperature, top_k, top_p, min_p, border, last_tie, V, C, stride,
    CP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Border of each row: kept are values above it, and its equals up to an id. No border is -inf."""
    row = tl.program_id(0).to(tl.int64)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    heat = tl.load(temperature + row)
    tl.store(border + row, float("-inf"))
    tl.store(last_tie + row, V)
    has_k = (k > 1) & (k < V)
    if (heat == 0.0) | (k == 1) | ((not has_k) & (p >= 1.0)):
        return
    top, _, bad = top_of(best, best_id, row, C, CP)
    if bad:
        return
    at = place_of(logits, adjusted, asked, masks, row, V, stride)
    heat = tl.maximum(heat, COLDEST)
    least = tl.load(min_p + row)
    deepest = 2139095040  # of -inf
    if has_k:
        # The smallest depth within which k ids lie, a bit at a time.
        found = 0
        for bit in range(0, 31):
            middle = found + (1 << (30 - bit)) - 1
            count = 0
            for start in range(0, V, TILE):
                ids = start + tl.arange(0, TILE)
                x = scaled(at, ids, V, top, heat)
                count += tl.sum(((_depth(x) <= middle) & (ids < V)).to(tl.int32), 0)
            found = tl.where(count < k, middle + 1, found)
        deepest = found
    tie = V
    if p < 1.0:
        whole = tl.full((), 0.0, tl.float64)
        for start in range(0, V, TILE):
            ids = start + tl.arange(0, TILE)
            x = scaled(at, ids, V, top, heat)
            w = exp(x)
            kept = (_depth(x) <= deepest) & (w >= least)
            whole += tl.sum(tl.where(kept, w, 0.0).to(tl.float64), 0)
        wanted = whole * p
        found = 0
        for bit in range(0, 31):
            middle = found + (1 << (30 - bit)) - 1
            mass = tl.full((), 0.0, tl.float64)
            for start in range(0, V, TILE):
                ids = start + tl.arange(0, TILE)
                x = scaled(at, ids, V, top, heat)
                w = exp(x)
                kept = (_depth(x) <= tl.minimum(middle, deepest)) & (w >= least)
                mass += tl.sum(tl.where(kept, w, 0.0).to(tl.float64), 0)
            found = tl.where(mass < wanted, middle + 1, found)
        if found < deepest:
            deepest = found
        # Of the equals at the border, no more than are needed.
        above = tl.full((), 0.0, tl.float64)
        equals = 0
        weight = 0.0
        for start in range(0, V, TILE):
            ids = start + tl.arange(0, TILE)
            x = scaled(at, ids, V, top, heat)
            w = exp(x)
            depth = _depth(x)
            above += tl.sum(tl.where((depth < deepest) & (w >= least), w, 0.0).to(tl.float64), 0)
            equals += tl.sum(((depth == deepest) & (ids < V)).to(tl.int32), 0)
            weight = tl.maximum(weight, tl.max(tl.where(depth == deepest, w, 0.0), 0))
        if (equals > 1) & (weight > 0.0):
            needed = tl.maximum(tl.ceil((wanted - above) / weight.to(tl.float64)), 1.0).to(tl.int32)
            if needed < equals:
                low = 0
                high = V
                while low < high:
                    half = (low + high) // 2
                    count = 0
                    for start in range(0, V, TILE):
                        ids = start + tl.arange(0, TILE)
                        x = scaled(at, ids, V, top, heat)
                        count += tl.sum(((_depth(x) == deepest) & (ids <= half) & (ids < V)).to(tl.int32), 0)
                    if count < needed:
                        low = half + 1
                    else:
                        high = half
                tie = low
    tl.store(border + row, -(deepest.to(tl.float32, bitcast=True)))
    tl.store(last_tie + row, tie)


@triton.jit
def is_kept(x, w, ids, V, edge, tie, least):
    """Of scaled values x, and w = exp(x)."""
    return ((x > edge) | ((x == edge) & (ids <= tie))) & (w >= least) & (ids < V)


@triton.jit
def _weights(x, ids, V, edge, tie, least):
    """exp of scaled values, 0 for ids that are not kept."""
    w = exp(x)
    return tl.where(is_kept(x, w, ids, V, edge, tie, least), w, 0.0)


@triton.jit
def _mass_kernel(
    logits, adjusted, asked, masks, best, best_id, temperature, top_k, min_p, border, last_tie, sums, V, C, num_blocks,
    stride, CHUNK: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """sums [n, blocks], the running sums' input; those after the last block are 0."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    if (heat == 0.0) | (tl.load(top_k + row) == 1):
        return
    top, _, _ = top_of(best, best_id, row, C, CP)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = scaled(place_of(logits, adjusted, asked, masks, row, V, stride), ids, V, top, tl.maximum(heat, COLDEST))
    w = _weights(x, ids, V, tl.load(border + row), tl.load(last_tie + row), tl.load(min_p + row))
    blocks = chunk * (CHUNK // 64) + tl.arange(0, CHUNK // 64)
    tl.store(sums + row * num_blocks + blocks, halved(w, CHUNK // 64), mask=blocks < num_blocks)


@triton.jit
def _uniform(seed_low, seed_high, index, child):
    """Philox4x32-10 of key (seed) and counter (index, child, 0, 0): the top 24 bits of its first word, in [0, 1)."""
    k0, k1 = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    c0 = index.to(tl.uint32, bitcast=True)
    c1 = child.to(tl.uint32, bitcast=True)
    c2, c3 = c0 & 0, c0 & 0
    for _ in tl.static_range(10):
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        n0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        n2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = (second & 0xFFFFFFFF).to(tl.uint32), (first & 0xFFFFFFFF).to(tl.uint32)
        c0, c2 = n0, n2
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return (c0 >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _draw_kernel(
    logits, adjusted, asked, masks, raw_best, best, best_id, temperature, top_k, min_p, seed_low, seed_high,
    output_index, child, forced, slots, border, last_tie, sums, ends, inside, tokens, codes, last_token,
    V, C, num_blocks, stride, CP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The token of one row."""
    row = tl.program_id(0).to(tl.int64)
    _, _, is_unusable = top_of(raw_best, best_id, row, C, CP)
    top, token, bad = top_of(best, best_id, row, C, CP)
    heat = tl.load(temperature + row)
    if (heat != 0.0) & (tl.load(top_k + row) != 1) & (not bad):
        heat = tl.maximum(heat, COLDEST)
        at = sums + row * num_blocks
        to = ends + row * GROUPS
        total = 0.0
        for group in range(0, num_blocks // 64):
            for step in tl.static_range(64):  # no store among them: they are fetched together
                total += tl.load(at + group * 64 + step)
            tl.store(to + group, total)
        tl.debug_barrier()
        u = _uniform(
            tl.load(seed_low + row), tl.load(seed_high + row), tl.load(output_index + row), tl.load(child + row)
        )
        target = u * total
        groups = tl.arange(0, GROUPS)
        values = tl.load(to + groups, mask=groups < num_blocks // 64, other=float("-inf"))
        group = tl.min(tl.where(values > target, groups, num_blocks // 64 - 1), 0)
        sum_before = tl.where(group > 0, tl.load(to + tl.maximum(group - 1, 0)), 0.0)
        block = -1
        reached = sum_before
        for step in tl.static_range(64):
            sum_with = sum_before + tl.load(at + group * 64 + step)
            is_first = (block < 0) & (sum_with > target)
            reached = tl.where(is_first, sum_before, reached)
            block = tl.where(is_first, group * 64 + step, block)
            sum_before = sum_with
        block = tl.maximum(block, 0)
        lanes = tl.arange(0, 64)
        x = scaled(place_of(logits, adjusted, asked, masks, row, V, stride), block * 64 + lanes, V, top, heat)
        w = _weights(x, block * 64 + lanes, V, tl.load(border + row), tl.load(last_tie + row), tl.load(min_p + row))
        tl.store(inside + row * 64 + lanes, w)
        tl.debug_barrier()
        found = -1
        last = 0
        for lane in tl.static_range(64):
            its = tl.load(inside + row * 64 + lane)
            reached += its
            last = tl.where(its > 0.0, lane, last)
            found = tl.where((found < 0) & (reached > target), lane, found)
        token = block * 64 + tl.where(found >= 0, found, last)
    given = tl.load(forced + row)
    token = tl.where(given >= 0, given, token)
    code = tl.where(is_unusable, UNUSABLE, tl.where(bad, NOTHING_LEFT, FINE))
    token = tl.where(code == FINE, token, 0)
    code = learn(tl.load(asked + row), tl.load(output_index + row), token, code)
    tl.store(tokens + row, token)
    tl.store(codes + row, code)
    tl.store(last_token + tl.load(slots + row), token)


@dataclass(frozen=True, slots=True)
class Settings:
    """Columns [n] on the device. forced: an id that is the token whatever is drawn, or -1. slots: where a row's token
    goes in last_token. seed_low, seed_high: the seed's words. asked, masks (int64): addresses as in `adjust`. The
    others are int32 but temperature, min_p (fp32) and top_p (fp64)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_low: Tensor
    seed_high: Tensor
    output_index: Tensor
    child: Tensor
    forced: Tensor
    slots: Tensor
    asked: Tensor
    masks: Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """What may be drawn of each row [n]: scaled values above border, and its equals up to the id last_tie. All fp32."""

    border: Tensor
    last_tie: Tensor


Filter = Callable[[Adjusted, Settings], Kept]


def find_kept(x: Adjusted, s: Settings) -> Kept:
    """The filters to the id, ties as `ops.select.kept` has them."""
    num_rows, vocab_size = x.logits.shape
    chunks = x.best.shape[1]
    border = torch.empty(num_rows, dtype=torch.float32, device=x.logits.device)
    last_tie = torch.empty(num_rows, dtype=torch.int32, device=x.logits.device)
    _filter_kernel[(num_rows,)](
        x.logits, x.values, s.asked, s.masks, x.best, x.best_id, s.temperature, s.top_k, s.top_p, s.min_p, border,
        last_tie, vocab_size, chunks, x.logits.stride(0), CP=triton.next_power_of_2(chunks),
        TILE=min(CHUNK, triton.next_power_of_2(vocab_size)), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return Kept(border, last_tie)


def draw_tokens(
    logits: Tensor, settings: Settings, tokens: Tensor, codes: Tensor, last_token: Tensor, find: Filter = find_kept
) -> tuple[Adjusted, Kept]:
    """One token a row of logits [n, V] (fp32, n > 0) into tokens [n] and last_token[slots], and into the history of
    rows that look back. codes [n]: what came of a row (`adjust.FINE` and so on); one that is not fine has the token 0.
    """
    num_rows, vocab_size = logits.shape
    s, device, stride = settings, logits.device, logits.stride(0)
    x = adjust(logits, s.asked, s.masks, s.output_index)
    kept = find(x, s)
    chunks = x.best.shape[1]
    padded = triton.next_power_of_2(chunks)
    num_blocks = triton.cdiv(triton.cdiv(vocab_size, BLOCK), GROUP) * GROUP
    groups = triton.next_power_of_2(num_blocks // GROUP)
    sums = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    ends = torch.empty(num_rows, groups, dtype=torch.float32, device=device)
    inside = torch.empty(num_rows, BLOCK, dtype=torch.float32, device=device)
    _mass_kernel[(num_rows, chunks)](
        logits, x.values, s.asked, s.masks, x.best, x.best_id, s.temperature, s.top_k, s.min_p, kept.border,
        kept.last_tie, sums, vocab_size, chunks, num_blocks, stride, CHUNK=CHUNK, CP=padded, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    _draw_kernel[(num_rows,)](
        logits, x.values, s.asked, s.masks, x.raw_best, x.best, x.best_id, s.temperature, s.top_k, s.min_p, s.seed_low,
        s.seed_high, s.output_index, s.child, s.forced, s.slots, kept.border, kept.last_tie, sums, ends, inside, tokens,
        codes, last_token, vocab_size, chunks, num_blocks, stride, CP=padded, GROUPS=groups, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return x, kept
