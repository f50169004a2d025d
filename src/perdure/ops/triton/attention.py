"""Causal attention over pages that are read where they lie: rows of one query in splits of keys, prompts in blocks.

- A row of one query: a program is one key head with its group of query heads, and one split of the row's keys; where
  there are several splits, their results are joined in order by a second kernel. How many there are is a matter of the
  number of rows alone, so a graph captured for so many rows serves any lengths.
- A prompt: a program is a block of its queries and one query head.
- What is masked is not loaded, so nothing that was never written can reach a sum.
- Scores and sums are fp32, weights are rounded to the type of the queries before the product. Pages of 8 bits are read
  as that type, and with queries of bfloat16 as float16, which has all their numbers and is one instruction away.

Shapes: N packed queries, Hq query heads, Hkv key heads, G = Hq / Hkv, D head size, P pages. A layer's cache is
[2, Hkv, P, page_size, D]; a block table [S, W] has the pages of each slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 64  # of one block
PROGRAMS = 1024  # that rows of one query are split into, at least, as far as splits go
MOST_SPLITS = 32


@triton.jit
def _capped(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP)"""
    return CAP * (1.0 - 2.0 / (tl.exp(2.0 / CAP * scores) + 1.0))


@triton.jit
def _beside(query, cache):
    """The query in the type that it is multiplied in."""
    if cache.dtype.element_ty == tl.float8e4nv and query.dtype == tl.bfloat16:
        return query.to(tl.float16)
    return query


@triton.jit
def _decode_kernel(
    q, cache, table, index, slots, positions, partial, sums, out, stride_q, stride_plane, stride_head, table_width,
    scale, num_splits, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINGLE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """partial [N, Hq, splits, D] and sums [N, Hq, splits, 2] (largest and sum, base 2) are fp32."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    packed = tl.load(index + row).to(tl.int64)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // BLOCK * BLOCK
    each = tl.cdiv(tl.cdiv(position + 1 - begin, num_splits), BLOCK) * BLOCK
    begin += split * each
    end = tl.minimum(begin + each, position + 1)
    if begin >= end:
        return
    group, dims, block = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BLOCK)
    of_group, of_head = group < G, dims < D
    inside = of_group[:, None] & of_head[None, :]
    query = tl.load(q + packed * stride_q + (head * G + group[:, None]) * D + dims[None, :], inside, other=0.0)
    query = _beside(query, cache)
    k_plane = cache + head.to(tl.int64) * stride_head
    v_plane = k_plane + stride_plane
    pages = table + slot.to(tl.int64) * table_width
    most = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    mixed = tl.zeros((GP, DP), tl.float32)
    for first in tl.range(begin, end, BLOCK, num_stages=STAGES):
        keys = first + block
        seen = keys < end
        if WINDOW > 0:
            seen = seen & (keys > position - WINDOW)
        page = tl.load(pages + keys // PAGE, mask=seen, other=0).to(tl.int64)
        at = (page * PAGE + keys % PAGE) * D
        there = seen[:, None] & of_head[None, :]
        k = tl.load(k_plane + at[:, None] + dims[None, :], mask=there, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale
        if CAP > 0:
            scores = _capped(scores, CAP)
        scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # a block that a window has left behind
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(most - base)
        total = total * faded + tl.sum(weights, 1)
        v = tl.load(v_plane + at[:, None] + dims[None, :], mask=there, other=0.0).to(query.dtype)
        mixed = mixed * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        most = new
    heads = tl.num_programs(1) * G
    if SINGLE:
        at = out + (packed * heads + head * G + group[:, None]) * D + dims[None, :]
        tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        cell = (row.to(tl.int64) * heads + head * G + group) * num_splits + split
        tl.store(partial + cell[:, None] * D + dims[None, :], mixed, mask=inside)
        tl.store(sums + cell * 2, most, mask=of_group)
        tl.store(sums + cell * 2 + 1, total, mask=of_group)


@triton.jit
def _combine_kernel(
    partial, sums, index, positions, out, num_splits, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """One row and query head: its splits, in their order."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    if position < 0:
        return
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // BLOCK * BLOCK
    length = position + 1 - begin
    each = tl.cdiv(tl.cdiv(length, num_splits), BLOCK) * BLOCK
    dims = tl.arange(0, DP)
    cell = (row.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    most = float("-inf")
    total = 0.0
    mixed = tl.zeros((DP,), tl.float32)
    for split in range(0, tl.cdiv(length, each)):
        its_most = tl.load(sums + (cell + split) * 2)
        its_total = tl.load(sums + (cell + split) * 2 + 1)
        new = tl.maximum(most, its_most)
        faded, weight = tl.exp2(most - new), tl.exp2(its_most - new)
        mixed = mixed * faded + weight * tl.load(partial + (cell + split) * D + dims, mask=dims < D, other=0.0)
        total = total * faded + weight * its_total
        most = new
    at = out + (tl.load(index + row).to(tl.int64) * tl.num_programs(1) + head) * D + dims
    tl.store(at, (mixed / total).to(out.dtype.element_ty), mask=dims < D)


@triton.jit
def _prompt_kernel(
    q, cache, table, blocks, out, stride_q, stride_plane, stride_head, table_width, scale,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """blocks [n, 4]: slot, where its first query is packed, that query's position, number of queries (0 = padding)."""
    head, index = tl.program_id(0), tl.program_id(1)
    slot = tl.load(blocks + index * 4)
    packed = tl.load(blocks + index * 4 + 1).to(tl.int64)
    start = tl.load(blocks + index * 4 + 2)
    count = tl.load(blocks + index * 4 + 3)
    if count == 0:
        return
    lines, dims, block = tl.arange(0, QUERIES), tl.arange(0, DP), tl.arange(0, BLOCK)
    of_head = dims < D
    inside = (lines < count)[:, None] & of_head[None, :]
    query = tl.load(q + (packed + lines[:, None]) * stride_q + head * D + dims[None, :], mask=inside, other=0.0)
    query = _beside(query, cache)
    position = start + lines
    k_plane = cache + (head // G).to(tl.int64) * stride_head
    v_plane = k_plane + stride_plane
    pages = table + slot.to(tl.int64) * table_width
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, DP), tl.float32)
    factor = scale * 1.4426950408889634
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // BLOCK * BLOCK
    whole = begin
    if WINDOW == 0:
        whole = (start + 1) // BLOCK * BLOCK  # blocks that every query sees all of need no mask
        for first in tl.range(begin, whole, BLOCK, num_stages=STAGES):
            keys = first + block
            page = tl.load(pages + keys // PAGE).to(tl.int64)
            at = (page * PAGE + keys % PAGE) * D
            if D == DP:
                k = tl.load(k_plane + at[:, None] + dims[None, :]).to(query.dtype)
            else:
                k = tl.load(k_plane + at[:, None] + dims[None, :], mask=of_head[None, :], other=0.0).to(query.dtype)
            scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
            if CAP > 0:
                scores = _capped(scores * scale, CAP) * 1.4426950408889634
            else:
                scores = scores * factor
            new = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - new[:, None])
            faded = tl.exp2(most - new)
            total = total * faded + tl.sum(weights, 1)
            if D == DP:
                v = tl.load(v_plane + at[:, None] + dims[None, :]).to(query.dtype)
            else:
                v = tl.load(v_plane + at[:, None] + dims[None, :], mask=of_head[None, :], other=0.0).to(query.dtype)
            mixed = mixed * faded[:, None]
            mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)
            most = new
    end = start + count
    for first in tl.range(whole, end, BLOCK, num_stages=STAGES):
        keys = first + block
        there = keys < end
        page = tl.load(pages + keys // PAGE, mask=there, other=0).to(tl.int64)
        at = (page * PAGE + keys % PAGE) * D
        loaded = there[:, None] & of_head[None, :]
        k = tl.load(k_plane + at[:, None] + dims[None, :], mask=loaded, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if CAP > 0:
            scores = _capped(scores * scale, CAP) * 1.4426950408889634
        else:
            scores = scores * factor
        seen = there[None, :] & (keys[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # a query that sees nothing here yet
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(most - base)
        total = total * faded + tl.sum(weights, 1)
        v = tl.load(v_plane + at[:, None] + dims[None, :], mask=loaded, other=0.0).to(query.dtype)
        mixed = mixed * faded[:, None]
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)
        most = new
    at = out + ((packed + lines[:, None]) * HEADS + head) * D + dims[None, :]
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


def num_splits(num_rows: int, num_kv_heads: int) -> int:
    """Into how many parts the keys of a row of one query go."""
    return max(1, min(MOST_SPLITS, PROGRAMS // max(1, num_rows * num_kv_heads)))


def _padded(dim: int) -> int:
    """A head's size as products take it."""
    return max(16, triton.next_power_of_2(dim))


def _stages(q: Tensor) -> int:
    """Blocks of keys and values fetched ahead, as shared memory allows."""
    return max(1, min(3, 768 // (q.shape[2] * q.element_size())))


def prompt_block(head_dim: int) -> int:
    """Queries of one block of a prompt."""
    return 128 if head_dim <= 128 else 64


def attend_decode(
    q: Tensor, cache: Tensor, table: Tensor, index: Tensor, slots: Tensor, positions: Tensor, out: Tensor,
    *, scale: float, window: int | None, softcap: float | None,
) -> None:  # fmt: skip
    """Rows of one query: q and out are [N, Hq, D]; of them rows index [n] belong to slots [n] and stand at positions
    [n]. A position of -1 is padding: nothing is read or written for it."""
    num_rows, num_heads, dim = len(slots), q.shape[1], q.shape[2]
    if num_rows == 0:
        return
    num_kv_heads, page = cache.shape[1], cache.shape[3]
    group = num_heads // num_kv_heads
    splits = num_splits(num_rows, num_kv_heads)
    partial = sums = out
    if splits > 1:
        partial = torch.empty(num_rows, num_heads, splits, dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(num_rows, num_heads, splits, 2, dtype=torch.float32, device=q.device)
    padded = _padded(dim)
    _decode_kernel[(num_rows, num_kv_heads, splits)](
        q, cache, table, index, slots, positions, partial, sums, out, q.stride(0), cache.stride(0), cache.stride(1),
        table.shape[1], scale, splits, G=group, GP=max(16, triton.next_power_of_2(group)), D=dim, DP=padded, PAGE=page,
        BLOCK=KEYS, WINDOW=window or 0, CAP=softcap or 0.0, SINGLE=splits == 1, STAGES=_stages(q),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(num_rows, num_heads)](
            partial, sums, index, positions, out, splits, D=dim, DP=padded, BLOCK=KEYS, WINDOW=window or 0, num_warps=1
        )


def attend_prompts(
    q: Tensor, cache: Tensor, table: Tensor, blocks: Tensor, out: Tensor,
    *, scale: float, window: int | None, softcap: float | None,
) -> None:  # fmt: skip
    """Prompts, in blocks [n, 4] of `prompt_block` queries: slot, first packed query, its position, how many."""
    if len(blocks) == 0:
        return
    num_heads, dim = q.shape[1], q.shape[2]
    queries = prompt_block(dim)
    _prompt_kernel[(num_heads, len(blocks))](
        q, cache, table, blocks, out, q.stride(0), cache.stride(0), cache.stride(1), table.shape[1], scale,
        HEADS=num_heads, G=num_heads // cache.shape[1], D=dim, DP=_padded(dim), PAGE=cache.shape[3],
        QUERIES=queries, BLOCK=KEYS, WINDOW=window or 0, CAP=softcap or 0.0, STAGES=_stages(q),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4 if queries < 128 else 8,
    )  # fmt: skip
