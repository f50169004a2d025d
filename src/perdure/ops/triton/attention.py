"""Causal attention over pages that are read where they lie: rows of one query by heads, prompts in blocks.

`_attend` goes over a range of keys in blocks of BLOCK at absolute positions, for a tile of queries. What comes of
ranges is joined in order, in registers or by a second kernel. There are two ways to cut keys into ranges:

- The fastest: a block of a prompt has one range, a row of one query as many as fill the chip.
- The invariant, where a query's bits depend on its keys and its position and on nothing else: ranges are SPLIT keys at
  absolute positions, also for prompts. Tiles have 64 rows (`wgmma` on Hopper; 32 in float32), also where one query's
  few heads fill a part of them: so each row's sums are in one order. Nothing is left for the compiler to contract.

How many programs share a row of one query is a matter of the number of rows alone, so a graph captured for so many
rows serves any lengths. What is masked is not loaded, so nothing that was never written can reach a sum. Scores and
sums are fp32, weights are rounded to the type of the queries before the product. Pages of 8 bits are read as that type,
and with queries of bfloat16 as float16, which has all their numbers and is one instruction away. Where a block of a
prompt's keys lies in one page, the copy engine fetches it.

Shapes: N packed queries, Hq query heads, Hkv key heads, G = Hq / Hkv, D head size, P pages. A layer's cache is
[2, Hkv, P, page_size, D]; a block table [S, W] has the pages of each slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from perdure.ops.rope import Turning
from perdure.ops.triton.early import early_launch
from perdure.ops.triton.launches import cdiv, power_of_2
from perdure.ops.triton.pages import as_stored
from perdure.ops.triton.ranges import combine_kernel, faded_by, first_key, join_kernel, joined, range_of, with_sink
from perdure.ops.triton.rows import turned_heads

BLOCK = 64  # keys gone over at once
SPLIT = 1024  # keys of a range at absolute positions
PROGRAMS = 512  # that rows of one query are shared out among, at least, as far as ranges go
MOST_TURNING = 256  # rows times key heads: with more, what turns them ahead costs less than a longer way into each
MOST_RANGES = 32  # of a row, where its length decides what a range is


@triton.jit
def _absorbed(scores, v, most, total, mixed, factor, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """One block of keys added to a state."""
    new = tl.maximum(most, tl.max(scores, 1))
    shift = -tl.where(new == float("-inf"), 0.0, new) * factor
    factors = tl.full((ROWS, BLOCK), factor, tl.float32)
    weights = tl.exp2(tl.fma(scores, factors, tl.broadcast_to(shift[:, None], (ROWS, BLOCK))))
    faded = faded_by(most, new, factor)
    total = tl.fma(total, faded, tl.sum(weights, 1))
    mixed = tl.dot(weights.to(v.dtype), v, mixed * faded[:, None], input_precision=PRECISION)
    return new, total, mixed


@triton.jit
def _capped(scores, scale, CAP: tl.constexpr):
    """The products as they are, or CAP * tanh(products * scale / CAP)."""
    if CAP > 0:
        return CAP - 2.0 * CAP / (tl.exp(2.0 / CAP * (scores * scale)) + 1.0)
    return scores


@triton.jit
def _attend(
    query, position, first, begin, end, k_plane, v_plane, pages, bulk, k_row, v_row, scale, factor,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BULK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What queries [ROWS, DP] at these positions, of which `first` is the lowest, see of the keys begin .. end - 1;
    begin is a multiple of BLOCK. Returns a state: the largest product of each, the sum of weights relative to it, the
    sum of weighted values."""
    dims, block = tl.arange(0, DP), tl.arange(0, BLOCK)
    of_head = dims < D
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DP), tl.float32)
    whole = begin
    if WINDOW == 0:  # blocks that every query sees all of need no mask
        whole = tl.maximum(begin, tl.minimum(first + 1, end) // BLOCK * BLOCK)
        for low in tl.range(begin, whole, BLOCK, num_stages=STAGES):
            if BULK:
                row = tl.load(pages + low // PAGE) * PAGE + low % PAGE
                k = bulk.load([k_row + row, 0])
                v = bulk.load([v_row + row, 0])
            else:
                keys = low + block
                page = tl.load(pages + keys // PAGE).to(tl.int64)
                at = ((page * PAGE + keys % PAGE) * D)[:, None] + dims[None, :]
                if D == DP:
                    k = tl.load(k_plane + at)
                    v = tl.load(v_plane + at)
                else:
                    k = tl.load(k_plane + at, mask=of_head[None, :], other=0.0)
                    v = tl.load(v_plane + at, mask=of_head[None, :], other=0.0)
            products = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision=PRECISION)
            scores = _capped(products, scale, CAP)
            v = v.to(query.dtype)
            most, total, mixed = _absorbed(scores, v, most, total, mixed, factor, ROWS, BLOCK, PRECISION)
    for low in tl.range(whole, end, BLOCK, num_stages=STAGES):
        keys = low + block
        there = keys < end
        page = tl.load(pages + keys // PAGE, mask=there, other=0).to(tl.int64)
        at = ((page * PAGE + keys % PAGE) * D)[:, None] + dims[None, :]
        loaded = there[:, None] & of_head[None, :]
        k = tl.load(k_plane + at, mask=loaded, other=0.0)
        v = tl.load(v_plane + at, mask=loaded, other=0.0)
        scores = _capped(tl.dot(query, tl.trans(k.to(query.dtype)), input_precision=PRECISION), scale, CAP)
        seen = there[None, :] & (keys[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        most, total, mixed = _absorbed(scores, v.to(query.dtype), most, total, mixed, factor, ROWS, BLOCK, PRECISION)
    return most, total, mixed


@triton.jit
def _beside(query, cache):
    """The query in the type that it is multiplied in."""
    if cache.dtype.element_ty == tl.float8e4nv and query.dtype == tl.bfloat16:
        query = query.to(tl.float16)
    return query


@triton.jit
def _write_own(
    qk, values, cos, sin, norm, cache, at, packed, head, num_heads, stride_q, stride_plane, stride_v, eps,
    D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """A row's own key, turned, and its value, where `at` points to in a plane of keys; then this program reads them."""
    dims = tl.arange(0, DP)
    heads = num_heads + head + tl.arange(0, 1)
    of_head = (dims < D)[None, :]
    k = turned_heads(qk, cos, sin, norm, packed, heads, num_heads + head + 1, stride_q, D, eps, D, R, 1, DP, NORM, ONCE)
    v = tl.load(values + packed * stride_v + head * D + dims[None, :], mask=of_head, other=0.0)
    tl.store(at + dims[None, :], as_stored(k.to(qk.dtype.element_ty), cache), mask=of_head)
    tl.store(at + stride_plane + dims[None, :], as_stored(v, cache), mask=of_head)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_ranges"])
def _decode_kernel(
    q, values, cos, sin, norm, sinks, cache, table, index, slots, positions, partial, sums, out, stride_q, stride_v,
    stride_plane, stride_head, table_width, scale, factor, eps, num_ranges, ROWS: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINGLE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr, TURN: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """One row and key head with its group of query heads: every n-th range, of n programs. partial [n, Hq, ranges, D]
    and sums [n, Hq, ranges, 2] are fp32. SINGLE: one program has all ranges, and its result goes to out. TURN: q has
    keys behind queries, neither turned, and the row's own key and value are written by who reads them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    if position < 0:
        return
    packed = tl.load(index + row).to(tl.int64)
    group, dims = tl.arange(0, ROWS), tl.arange(0, DP)
    of_group = group < G
    inside = of_group[:, None] & (dims < D)[None, :]
    k_plane = cache + head.to(tl.int64) * stride_head
    v_plane = k_plane + stride_plane
    pages = table + tl.load(slots + row).to(tl.int64) * table_width
    every = tl.full((ROWS,), position, tl.int32)
    heads = tl.num_programs(1) * G
    if TURN:
        begin, end = range_of(position, part, num_ranges, WINDOW, BLOCK, SPLIT)
        if begin >= end and not SINGLE:
            return
        turned = turned_heads(
            q, cos, sin, norm, packed, head * G + group, head * G + G, stride_q, D, eps, D, R, ROWS, DP, NORM, ONCE
        )
        query = _beside(turned.to(q.dtype.element_ty), cache)
        if SINGLE or end > position:
            own = tl.load(pages + position // PAGE).to(tl.int64) * PAGE + position % PAGE
            _write_own(
                q, values, cos, sin, norm, cache, k_plane + own * D, packed, head, heads, stride_q, stride_plane,
                stride_v, eps, D, DP, R, NORM, ONCE,
            )  # fmt: skip
    else:
        query = tl.load(q + packed * stride_q + (head * G + group[:, None]) * D + dims[None, :], mask=inside, other=0.0)
        query = _beside(query, cache)
    if SINGLE:
        if SPLIT == 0:
            most, total, mixed = _attend(
                query, every, position, first_key(position, WINDOW, BLOCK), position + 1, k_plane, v_plane, pages,
                cache, 0, 0, scale, factor, ROWS, D, DP, PAGE, BLOCK, WINDOW, CAP, False, STAGES, PRECISION,
            )  # fmt: skip
        else:
            most = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            mixed = tl.zeros((ROWS, DP), tl.float32)
            for number in range(first_key(position, WINDOW, BLOCK) // SPLIT, position // SPLIT + 1):
                begin, end = range_of(position, number, num_ranges, WINDOW, BLOCK, SPLIT)
                its_most, its_total, its_mixed = _attend(
                    query, every, position, begin, end, k_plane, v_plane, pages, cache, 0, 0, scale, factor,
                    ROWS, D, DP, PAGE, BLOCK, WINDOW, CAP, False, STAGES, PRECISION,
                )  # fmt: skip
                most, total, mixed = joined(most, total, mixed, its_most, its_total, its_mixed, factor)
        if sinks is not None:
            total = with_sink(total, most, tl.load(sinks + head * G + group, mask=of_group, other=0.0), factor)
        at = out + (packed * heads + head * G + group[:, None]) * D + dims[None, :]
        tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        for number in range(part, num_ranges, tl.num_programs(2)):
            begin, end = range_of(position, number, num_ranges, WINDOW, BLOCK, SPLIT)
            if begin < end:
                most, total, mixed = _attend(
                    query, every, position, begin, end, k_plane, v_plane, pages, cache, 0, 0, scale, factor,
                    ROWS, D, DP, PAGE, BLOCK, WINDOW, CAP, False, STAGES, PRECISION,
                )  # fmt: skip
                cell = (row.to(tl.int64) * heads + head * G + group) * num_ranges + number
                tl.store(partial + cell[:, None] * D + dims[None, :], mixed, mask=inside)
                tl.store(sums + cell * 2, most, mask=of_group)
                tl.store(sums + cell * 2 + 1, total, mask=of_group)


@triton.jit
def _prompt_kernel(
    q, sinks, cache, bulk, table, blocks, out, stride_q, stride_plane, stride_head, table_width, scale, factor,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, BULK: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of a prompt's queries and one query head. blocks [n, 4]: slot, where its first query is packed, that
    query's position, number of queries (0 = padding). BULK: `bulk` describes the cache as rows of D."""
    head, index = tl.program_id(0), tl.program_id(1)
    slot = tl.load(blocks + index * 4)
    packed = tl.load(blocks + index * 4 + 1).to(tl.int64)
    start = tl.load(blocks + index * 4 + 2)
    count = tl.load(blocks + index * 4 + 3)
    if count == 0:
        return
    lines, dims = tl.arange(0, QUERIES), tl.arange(0, DP)
    inside = (lines < count)[:, None] & (dims < D)[None, :]
    query = tl.load(q + (packed + lines[:, None]) * stride_q + head * D + dims[None, :], mask=inside, other=0.0)
    query = _beside(query, cache)
    position = start + lines
    plane = head // G
    k_plane = cache + plane.to(tl.int64) * stride_head
    v_plane = k_plane + stride_plane
    k_row = (plane * (stride_head // D)).to(tl.int32)
    v_row = (plane * (stride_head // D) + stride_plane // D).to(tl.int32)
    pages = table + slot.to(tl.int64) * table_width
    begin, end = first_key(start, WINDOW, BLOCK), start + count
    if SPLIT == 0:
        most, total, mixed = _attend(
            query, position, start, begin, end, k_plane, v_plane, pages, bulk, k_row, v_row, scale, factor,
            QUERIES, D, DP, PAGE, BLOCK, WINDOW, CAP, BULK, STAGES, PRECISION,
        )  # fmt: skip
    else:
        most = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        mixed = tl.zeros((QUERIES, DP), tl.float32)
        for split in range(begin // SPLIT, (end - 1) // SPLIT + 1):
            its_most, its_total, its_mixed = _attend(
                query, position, start, tl.maximum(begin, split * SPLIT), tl.minimum(split * SPLIT + SPLIT, end),
                k_plane, v_plane, pages, bulk, k_row, v_row, scale, factor,
                QUERIES, D, DP, PAGE, BLOCK, WINDOW, CAP, BULK, STAGES, PRECISION,
            )  # fmt: skip
            most, total, mixed = joined(most, total, mixed, its_most, its_total, its_mixed, factor)
    if sinks is not None:
        total = with_sink(total, most, tl.load(sinks + head), factor)
    at = out + ((packed + lines[:, None]) * HEADS + head) * D + dims[None, :]
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


def num_programs(num_rows: int, num_kv_heads: int, most: int) -> int:
    """Among how many programs the keys of a row of one query and a key head are shared out."""
    return max(1, min(most, PROGRAMS // (num_rows * num_kv_heads)))


def _padded(dim: int) -> int:
    """A head's size as products take it."""
    return max(16, power_of_2(dim))


def _stages(q: Tensor, most: int) -> int:
    """Blocks of keys and values fetched ahead, as shared memory allows."""
    return max(1, min(most, 768 // (q.shape[2] * q.element_size())))


def _factor(scale: float, softcap: float | None) -> float:
    """What a product, scaled already where it is capped, is multiplied by to be an exponent of 2."""
    assert scale > 0, scale
    return 1.4426950408889634 * (scale if softcap is None else 1.0)


def prompt_block(head_dim: int, group: int, dtype: torch.dtype, *, invariant: bool) -> int:
    """Queries of one block of a prompt. An invariant tile holds twice the sums of another, and a group of query heads,
    for rows of one query have the same. Products in float32 are written out term by term: of 64 queries and heads of
    256 they take half a minute to compile, of 32 a third of that."""
    if dtype == torch.float32:
        queries = 32
    else:
        queries = 64 if invariant or head_dim > 128 else 128
    return max(queries, power_of_2(group)) if invariant else queries


def attend_decode(
    q: Tensor, cache: Tensor, table: Tensor, index: Tensor, slots: Tensor, positions: Tensor, out: Tensor,
    *, scale: float, window: int | None, softcap: float | None, invariant: bool, values: Tensor | None = None,
    turning: Turning | None = None, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Rows of one query: q and out are [N, Hq, D]; of them rows index [n] belong to slots [n] and stand at positions
    [n]. A position of -1 is padding: nothing is read or written for it.

    values [N, Hkv, D], turning: q is [N, Hq + Hkv, D], queries and keys that have not turned; keys and values of the
    rows are written, too. Not invariant. sinks [Hq] (fp32): None = none."""
    num_rows, num_heads, dim = len(slots), out.shape[1], out.shape[2]
    if num_rows == 0:
        return
    num_kv_heads, page = cache.shape[1], cache.shape[3]
    group, padded, factor = num_heads // num_kv_heads, _padded(dim), _factor(scale, softcap)
    rows = prompt_block(dim, group, q.dtype, invariant=True) if invariant else max(16, power_of_2(group))
    split = SPLIT if invariant else 0
    most = cdiv(table.shape[1] * page, SPLIT) if invariant else MOST_RANGES
    shared = num_programs(num_rows, num_kv_heads, most)
    ranges = most if invariant else shared
    early = early_launch(q.device)
    partial = sums = out
    if shared > 1:
        partial = torch.empty(num_rows, num_heads, ranges, dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(num_rows, num_heads, ranges, 2, dtype=torch.float32, device=q.device)
    assert values is None or not invariant, "turned beside, rows are joined in another form"
    assert values is None or values.stride(1) == dim
    cos, sin, norm_weight, eps, once = turning or Turning(q, q)
    _decode_kernel[(num_rows, num_kv_heads, shared)](
        q, values, cos, sin, norm_weight, sinks, cache, table, index, slots, positions, partial, sums, out, q.stride(0),
        0 if values is None else values.stride(0), cache.stride(0), cache.stride(1), table.shape[1], scale, factor, eps,
        ranges, ROWS=rows, G=group, D=dim, DP=padded, PAGE=page, BLOCK=BLOCK,
        SPLIT=split, WINDOW=window or 0, CAP=softcap or 0.0, SINGLE=shared == 1,
        STAGES=_stages(q, 2 if invariant else 3), PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        EARLY=bool(early), TURN=turning is not None, R=cos.shape[-1], NORM=norm_weight is not None, ONCE=once,
        num_warps=4, enable_fp_fusion=not invariant, **early,
    )  # fmt: skip
    if shared > 1 and not invariant:
        join_kernel[(num_rows, num_heads)](
            partial, sums, sinks, index, positions, out, factor, ranges, RANGES=power_of_2(ranges), D=dim,
            DP=padded, BLOCK=BLOCK, WINDOW=window or 0, EARLY=bool(early), num_warps=4, **early,
        )  # fmt: skip
    elif shared > 1:
        combine_kernel[(num_rows, num_kv_heads)](
            partial, sums, sinks, index, positions, out, factor, ranges, GP=power_of_2(group), G=group, D=dim,
            DP=padded, BLOCK=BLOCK, SPLIT=split, WINDOW=window or 0, num_warps=1, enable_fp_fusion=not invariant,
        )  # fmt: skip


def attend_prompts(
    q: Tensor, cache: Tensor, table: Tensor, blocks: Tensor, out: Tensor,
    *, scale: float, window: int | None, softcap: float | None, invariant: bool, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Prompts, in blocks [n, 4] of `prompt_block` queries: slot, first packed query, its position, how many."""
    if len(blocks) == 0:
        return
    num_heads, dim, page = q.shape[1], q.shape[2], cache.shape[3]
    padded, group = _padded(dim), num_heads // cache.shape[1]
    bulk = page % BLOCK == 0 and dim == padded and cache.dtype == q.dtype != torch.float32
    flat = cache.view(-1, dim)
    described = TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [BLOCK, dim]) if bulk else cache
    _prompt_kernel[(num_heads, len(blocks))](
        q, sinks, cache, described, table, blocks, out, q.stride(0), cache.stride(0), cache.stride(1), table.shape[1],
        scale, _factor(scale, softcap), HEADS=num_heads, G=group, D=dim, DP=padded, PAGE=page,
        QUERIES=prompt_block(dim, group, q.dtype, invariant=invariant), BLOCK=BLOCK, SPLIT=SPLIT if invariant else 0,
        WINDOW=window or 0, CAP=softcap or 0.0, BULK=bulk, STAGES=_stages(q, 3),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, enable_fp_fusion=not invariant,
    )  # fmt: skip
