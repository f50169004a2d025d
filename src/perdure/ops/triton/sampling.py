"""Drawing on the device: `ops.sampling` to the rounding, from logits that never leave.

- A draw is spelled out there and repeated here: weights and sums as in `weights`, running sums in order, one keyed
  uniform number a row. So equal logits give the token that a CPU draws. Where numpy has another exp, or mass lies
  within rounding of a border, one may differ.
- Four launches for any mix of settings, so they can be captured: the largest values and what was asked (`adjust`), sums
  of all weights, the filters (`filters`), which make them sums of what is kept, and the draw. Rows that ask for no
  filter cost nothing in theirs.

Shapes: as in `weights`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perdure.ops.triton.adjust import CHUNK, FINE, NOTHING_LEFT, UNUSABLE, Adjusted, adjust, learn
from perdure.ops.triton.filters import find_kept
from perdure.ops.triton.launches import power_of_2
from perdure.ops.triton.weights import (
    BLOCK,
    COLDEST,
    Filter,
    Kept,
    Masses,
    Settings,
    exp,
    halved,
    halved_16,
    has_filter,
    is_adjusted,
    is_kept,
    largest_of,
    read,
    scaled,
    top_of,
    weight,
)

GROUP = 64  # blocks fetched together: each alone would wait for memory


@triton.jit
def _mass_kernel(
    logits, adjusted, asked, masks, best, temperature, top_k, top_p, sums, of_chunks, V, C, NB, stride,
    CHUNK: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """sums [n, nb] of a chunk's blocks. A thread has 8 values that lie together and those that come to them by halves,
    so that hardly one has to be handed on."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    if (heat == 0.0) | ((k > 0) & (k < V)):
        return
    heat = tl.maximum(heat, COLDEST)
    top = largest_of(best, row, C, CP)
    elsewhere = is_adjusted(asked, masks, row)
    N: tl.constexpr = CHUNK // 64
    blocks = chunk * N + tl.arange(0, N)
    ids = blocks[:, None] * 64 + tl.arange(0, 16)[None, :]
    a = read(logits, adjusted, elsewhere, row, ids, V, stride)
    b = read(logits, adjusted, elsewhere, row, ids + 16, V, stride)
    c = read(logits, adjusted, elsewhere, row, ids + 32, V, stride)
    d = read(logits, adjusted, elsewhere, row, ids + 48, V, stride)
    a, b, c, d = weight(a, top, heat), weight(b, top, heat), weight(c, top, heat), weight(d, top, heat)
    tl.store(sums + row * NB + blocks, halved_16((a + c) + (b + d), N))
    if tl.load(top_p + row) < 1.0:
        whole = (a.to(tl.float64) + b.to(tl.float64)) + (c.to(tl.float64) + d.to(tl.float64))
        tl.store(of_chunks + row * C + chunk, tl.sum(tl.sum(whole, 1), 0))


@triton.jit
def _restrict_kernel(
    logits, adjusted, asked, masks, best, best_id, temperature, top_k, top_p, min_p, border, last_tie, sums, V, C, NB,
    stride, CHUNK: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """sums of a chunk's blocks, of what a row keeps that has filters."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, least = tl.load(temperature + row), tl.load(min_p + row)
    if (heat == 0.0) | (has_filter(tl.load(top_k + row), tl.load(top_p + row), least, V) == 0):
        return
    top, _, _ = top_of(best, best_id, row, C, CP)
    blocks = chunk * (CHUNK // 64) + tl.arange(0, CHUNK // 64)
    ids = blocks[:, None] * 64 + tl.arange(0, 64)[None, :]
    w = _weights(
        scaled(
            read(logits, adjusted, is_adjusted(asked, masks, row), row, ids, V, stride), top, tl.maximum(heat, COLDEST)
        ),
        ids, V, tl.load(border + row), tl.load(last_tie + row), least,
    )  # fmt: skip
    tl.store(sums + row * NB + blocks, halved(w, CHUNK // 64))


@triton.jit
def _weights(x, ids, V, edge, tie, least):
    """exp of scaled values, 0 for ids that are not kept."""
    w = exp(x)
    return tl.where(is_kept(x, w, ids, V, edge, tie, least), w, 0.0)


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
    output_index, child, forced, slots, border, last_tie, sums, inside, tokens, codes, last_token,
    V, C, NB, stride, CP: tl.constexpr, NBP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The token of one row."""
    row = tl.program_id(0).to(tl.int64)
    _, _, is_unusable = top_of(raw_best, best_id, row, C, CP)
    top, token, bad = top_of(best, best_id, row, C, CP)
    heat = tl.load(temperature + row)
    if (heat != 0.0) & (tl.load(top_k + row) != 1) & (not bad):
        heat = tl.maximum(heat, COLDEST)
        at = sums + row * NB
        blocks = tl.arange(0, NBP)
        least = tl.min(tl.load(at + blocks, mask=blocks < NB, other=0.0), 0)  # and they are near from here on
        groups = tl.arange(0, GROUPS)
        ends = tl.full((GROUPS,), float("-inf"), tl.float32)  # running sums at the ends of groups
        total = tl.minimum(least, 0.0)
        for group in range(0, NB // 64):
            for step in tl.static_range(64):
                total += tl.load(at + group * 64 + step)
            ends = tl.where(groups == group, total, ends)
        u = _uniform(
            tl.load(seed_low + row), tl.load(seed_high + row), tl.load(output_index + row), tl.load(child + row)
        )
        target = u * total
        group = tl.min(tl.where(ends > target, groups, NB // 64 - 1), 0)
        sum_before = tl.max(tl.where(groups < group, ends, 0.0), 0)
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
        ids = block * 64 + lanes
        x = scaled(read(logits, adjusted, is_adjusted(asked, masks, row), row, ids, V, stride), top, heat)
        w = _weights(x, ids, V, tl.load(border + row), tl.load(last_tie + row), tl.load(min_p + row))
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


def weigh(x: Adjusted, s: Settings) -> Masses:
    """Of all ids of rows without a top_k."""
    num_rows, vocab_size = x.logits.shape
    chunks, num_blocks, device = x.best.shape[1], x.block_best.shape[1], x.logits.device
    sums = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    of_chunks = torch.empty(num_rows, chunks, dtype=torch.float64, device=device)
    _mass_kernel[(num_rows, chunks)](
        x.logits, x.values, s.asked, s.masks, x.best, s.temperature, s.top_k, s.top_p, sums, of_chunks,
        vocab_size, chunks, num_blocks, x.logits.stride(0), CHUNK=CHUNK, CP=power_of_2(chunks), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return Masses(sums, of_chunks)


def restrict(x: Adjusted, s: Settings, kept: Kept, masses: Masses) -> None:
    """Make the masses of rows with filters those of what is kept."""
    num_rows, vocab_size = x.logits.shape
    chunks = x.best.shape[1]
    _restrict_kernel[(num_rows, chunks)](
        x.logits, x.values, s.asked, s.masks, x.best, x.best_id, s.temperature, s.top_k, s.top_p, s.min_p, kept.border,
        kept.last_tie, masses.sums, vocab_size, chunks, masses.sums.shape[1], x.logits.stride(0), CHUNK=CHUNK,
        CP=power_of_2(chunks), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def draw_tokens(
    logits: Tensor, settings: Settings, tokens: Tensor, codes: Tensor, last_token: Tensor, find: Filter = find_kept
) -> tuple[Adjusted, Kept]:
    """One token a row of logits [n, V] (n > 0) into tokens [n] and last_token[slots], and into the history of rows that
    look back. codes [n]: what came of a row (`adjust.FINE` and so on); one that is not fine has the token 0.
    """
    num_rows, vocab_size = logits.shape
    s = settings
    x = adjust(logits, s.asked, s.masks, s.output_index)
    masses = weigh(x, s)
    kept = find(x, s, masses)
    chunks, num_blocks = x.best.shape[1], masses.sums.shape[1]
    inside = torch.empty(num_rows, BLOCK, dtype=torch.float32, device=logits.device)
    _draw_kernel[(num_rows,)](
        logits, x.values, s.asked, s.masks, x.raw_best, x.best, x.best_id, s.temperature, s.top_k, s.min_p, s.seed_low,
        s.seed_high, s.output_index, s.child, s.forced, s.slots, kept.border, kept.last_tie, masses.sums, inside,
        tokens, codes, last_token, vocab_size, chunks, num_blocks, logits.stride(0), CP=power_of_2(chunks),
        NBP=power_of_2(num_blocks), GROUPS=power_of_2(num_blocks // GROUP), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return x, kept
