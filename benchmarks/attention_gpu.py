"""Attention kernels on a GPU, alone, inside a graph: variants of tiles against one another, microseconds a layer.

    python benchmarks/attention_gpu.py [--json FILE]

A probe of what issues to come build on: decode in splits of keys at absolute positions, prompts in blocks of queries,
over pages [2, Hkv, P, page_size, D], which are read where they lie. What is masked is not loaded. Results and what they
mean are in docs/adr/.
"""

from __future__ import annotations

import argparse
import itertools
import json

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

D = 128


@triton.jit
def _key_rows(table, row, table_width, keys, mask, stride_page, PAGE: tl.constexpr, D: tl.constexpr):
    """Where the rows of these keys begin in a head's plane."""
    page = tl.load(table + row * table_width + keys // PAGE, mask=mask, other=0).to(tl.int64)
    return page * stride_page + (keys % PAGE) * D


@triton.jit
def _capped(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP)"""
    return CAP * (1.0 - 2.0 / (tl.exp(2.0 / CAP * scores) + 1.0))


@triton.jit
def decode_kernel(
    q,
    kv,
    table,
    positions,
    partial,
    sums,
    out,
    stride_q,
    stride_plane,
    stride_head,
    stride_page,
    table_width,
    num_kv_heads,
    max_splits,
    scale,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINGLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row, one key head, one split. positions [N]: of each row's query. partial [N, Hq, splits, D] and sums
    [N, Hq, splits, 2] (maximum and sum, base 2) are fp32. SINGLE: there is one split, the result goes to out."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    end = tl.minimum((split + 1) * SPLIT, position + 1)
    begin = split * SPLIT
    if WINDOW > 0:
        begin = tl.maximum(begin, (position - WINDOW + 1) // BLOCK_N * BLOCK_N)
    if begin >= end:
        return
    group, dims, block = tl.arange(0, GP), tl.arange(0, D), tl.arange(0, BLOCK_N)
    of_group = group < G
    q_at = q + row.to(tl.int64) * stride_q + (head * G + group[:, None]) * D + dims[None, :]
    query = tl.load(q_at, mask=of_group[:, None], other=0.0)
    k_plane = kv + head.to(tl.int64) * stride_head
    v_plane = k_plane + stride_plane
    most = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    mixed = tl.zeros((GP, D), tl.float32)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        keys = first + block
        seen = keys < end
        if WINDOW > 0:
            seen = seen & (keys > position - WINDOW)
        at = _key_rows(table, row, table_width, keys, seen, stride_page, PAGE, D)
        k = tl.load(k_plane + at[:, None] + dims[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k)) * scale
        if CAP > 0:
            scores = _capped(scores, CAP)
        scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        faded = tl.exp2(most - new)
        total = total * faded + tl.sum(weights, 1)
        v = tl.load(v_plane + at[:, None] + dims[None, :], mask=seen[:, None], other=0.0)
        mixed = mixed * faded[:, None] + tl.dot(weights.to(v.dtype), v)
        most = new
    heads = num_kv_heads * G
    if SINGLE:
        at = out + (row.to(tl.int64) * heads + head * G + group[:, None]) * D + dims[None, :]
        tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=of_group[:, None])
    else:
        cell = (row.to(tl.int64) * heads + head * G + group) * max_splits + split
        tl.store(partial + cell[:, None] * D + dims[None, :], mixed, mask=of_group[:, None])
        tl.store(sums + cell * 2, most, mask=of_group)
        tl.store(sums + cell * 2 + 1, total, mask=of_group)


@triton.jit
def combine_kernel(
    partial,
    sums,
    positions,
    out,
    max_splits,
    heads,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One row and head: its splits, in their order."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // SPLIT
    dims = tl.arange(0, D)
    cell = (row.to(tl.int64) * heads + head) * max_splits
    most = float("-inf")
    total = 0.0
    mixed = tl.zeros((D,), tl.float32)
    for split in range(first, position // SPLIT + 1):
        its_most = tl.load(sums + (cell + split) * 2)
        its_total = tl.load(sums + (cell + split) * 2 + 1)
        new = tl.maximum(most, its_most)
        faded, weight = tl.exp2(most - new), tl.exp2(its_most - new)
        mixed = mixed * faded + weight * tl.load(partial + (cell + split) * D + dims)
        total = total * faded + weight * its_total
        most = new
    tl.store(out + (row.to(tl.int64) * heads + head) * D + dims, (mixed / total).to(out.dtype.element_ty))


@triton.jit
def prompt_kernel(
    q,
    kv,
    table,
    blocks,
    out,
    stride_q,
    stride_plane,
    stride_head,
    stride_page,
    table_width,
    scale,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A block of one row's queries, one query head. blocks [n, 4]: row, where its first query is packed, its position,
    number of queries."""
    head, index = tl.program_id(0), tl.program_id(1)
    row = tl.load(blocks + index * 4)
    packed = tl.load(blocks + index * 4 + 1).to(tl.int64)
    start = tl.load(blocks + index * 4 + 2)
    count = tl.load(blocks + index * 4 + 3)
    lines, dims, block = tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, BLOCK_N)
    of_block = lines < count
    query = tl.load(
        q + (packed + lines[:, None]) * stride_q + head * D + dims[None, :], mask=of_block[:, None], other=0.0
    )
    position = start + lines
    k_plane = kv + (head // G).to(tl.int64) * stride_head
    v_plane = k_plane + stride_plane
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, D), tl.float32)
    factor = scale * 1.4426950408889634
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    whole = begin
    if WINDOW == 0:
        # Blocks that every query sees all of need no mask.
        whole = (start + 1) // BLOCK_N * BLOCK_N
        for first in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
            keys = first + block
            page = tl.load(table + row * table_width + keys // PAGE).to(tl.int64)
            at = page * stride_page + (keys % PAGE) * D
            k = tl.load(k_plane + at[:, None] + dims[None, :])
            scores = tl.dot(query, tl.trans(k))
            if CAP > 0:
                scores = _capped(scores * scale, CAP) * 1.4426950408889634
            else:
                scores = scores * factor
            new = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - new[:, None])
            faded = tl.exp2(most - new)
            total = total * faded + tl.sum(weights, 1)
            v = tl.load(v_plane + at[:, None] + dims[None, :])
            mixed = mixed * faded[:, None]
            mixed = tl.dot(weights.to(v.dtype), v, mixed)
            most = new
    end = start + count
    for first in tl.range(whole, end, BLOCK_N, num_stages=STAGES):
        keys = first + block
        there = keys < end
        at = _key_rows(table, row, table_width, keys, there, stride_page, PAGE, D)
        k = tl.load(k_plane + at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k))
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
        v = tl.load(v_plane + at[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        mixed = mixed * faded[:, None]
        mixed = tl.dot(weights.to(v.dtype), v, mixed)
        most = new
    at = out + ((packed + lines[:, None]) * HEADS + head) * D + dims[None, :]
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=of_block[:, None])


@triton.jit
def prompt_desc_kernel(
    q,
    desc,
    table,
    blocks,
    out,
    stride_q,
    planes,
    table_width,
    scale,
    KV: tl.constexpr,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same where a block of keys lies in one page: the bulk copy engine fetches it, [BLOCK_N, D] of a cache seen as
    [2 * Hkv * P * page_size, D]. planes: rows of a head."""
    head, index = tl.program_id(0), tl.program_id(1)
    row = tl.load(blocks + index * 4)
    packed = tl.load(blocks + index * 4 + 1).to(tl.int64)
    start = tl.load(blocks + index * 4 + 2)
    count = tl.load(blocks + index * 4 + 3)
    lines, dims, block = tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, BLOCK_N)
    of_block = lines < count
    query = tl.load(
        q + (packed + lines[:, None]) * stride_q + head * D + dims[None, :], mask=of_block[:, None], other=0.0
    )
    position = start + lines
    plane = (head // G) * planes
    vplane = plane + KV * planes
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, D), tl.float32)
    factor = scale * 1.4426950408889634
    whole = (start + 1) // BLOCK_N * BLOCK_N
    for first in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
        page = tl.load(table + row * table_width + first // PAGE)
        at = page * PAGE + first % PAGE
        k = desc.load([plane + at, 0])
        scores = tl.dot(query, k.T)
        new = tl.maximum(most, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new[:, None])
        faded = tl.exp2(most - new)
        total = total * faded + tl.sum(weights, 1)
        mixed = mixed * faded[:, None]
        v = desc.load([vplane + at, 0])
        mixed = tl.dot(weights.to(v.dtype), v, mixed)
        most = new
    end = start + count
    for first in tl.range(whole, end, BLOCK_N):
        keys = first + block
        page = tl.load(table + row * table_width + first // PAGE)
        at = page * PAGE + first % PAGE
        k = desc.load([plane + at, 0])
        scores = tl.dot(query, k.T)
        scores = tl.where(keys[None, :] <= position[:, None], scores * factor, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(most - base)
        total = total * faded + tl.sum(weights, 1)
        mixed = mixed * faded[:, None]
        v = desc.load([vplane + at, 0])
        mixed = tl.dot(weights.to(v.dtype), v, mixed)
        most = new
    at = out + ((packed + lines[:, None]) * HEADS + head) * D + dims[None, :]
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=of_block[:, None])


def pool(rows: int, length: int, kv_heads: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    per_row = -(-length // page)
    pages = rows * per_row
    cache = torch.randn(2, kv_heads, pages, page, D, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages, device="cuda").view(rows, per_row).int()
    return cache, table


def timed(work) -> float:
    work()
    torch.cuda.synchronize()
    return min(triton.testing.do_bench_cudagraph(work, rep=30) for _ in range(2)) * 1e3


def dense(q, cache, table, row, starts, count, heads, kv_heads):
    """fp32 attention of one row's `count` queries from starts on."""
    end = starts + count
    keys = cache[:, :, table[row].long()].flatten(2, 3)[:, :, :end].float()
    k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in keys)
    scores = torch.einsum("nhd,hkd->hnk", q.float(), k) * D**-0.5
    mask = torch.arange(end, device="cuda")[None] > torch.arange(starts, end, device="cuda")[:, None]
    return torch.einsum("hnk,hkd->nhd", scores.masked_fill(mask, float("-inf")).softmax(-1), v)


def decode(rows, length, heads, kv_heads, page, block, split, warps, stages):
    cache, table = pool(rows, length, kv_heads, page)
    q = torch.randn(rows, heads, D, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    positions = torch.full((rows,), length - 1, device="cuda", dtype=torch.int32)
    splits = -(-length // split)
    partial = torch.empty(rows, heads, splits, D, device="cuda")
    sums = torch.empty(rows, heads, splits, 2, device="cuda")

    def work():
        decode_kernel[(rows, kv_heads, splits)](
            q, cache, table, positions, partial, sums, out, heads * D, *cache.stride()[:3],
            table.shape[1], kv_heads, splits, D**-0.5, G=heads // kv_heads, GP=16, D=D, PAGE=page, BLOCK_N=block,
            SPLIT=split, WINDOW=0, CAP=0.0, SINGLE=splits == 1, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        if splits > 1:
            combine_kernel[(rows, heads)](
                partial, sums, positions, out, splits, heads, D=D, SPLIT=split, WINDOW=0, num_warps=1
            )

    us = timed(work)
    error = (out[3].float() - dense(q[3:4], cache, table, 3, length - 1, 1, heads, kv_heads)[0]).abs().max().item()
    return us, error, cache.nbytes / us / 1e6


def blocks_of(rows, length, m):
    """What `prompt_kernel` takes, the longest first."""
    each = [(row, row * length + at, at, min(m, length - at)) for row in range(rows) for at in range(0, length, m)]
    return torch.tensor(sorted(each, key=lambda block: -block[2]), device="cuda", dtype=torch.int32)


def prompt_result(work, q, out, cache, table, rows, length, heads, kv_heads):
    us = timed(work)
    some = slice(length + 1000, length + 1064)
    error = (out[some].float() - dense(q[some], cache, table, 1, 1000, 64, heads, kv_heads)).abs().max().item()
    return us, error, rows * 2 * length * length * heads * D / us / 1e6


def prompt(rows, length, heads, kv_heads, page, m, n, warps, stages):
    cache, table = pool(rows, length, kv_heads, page)
    q = torch.randn(rows * length, heads, D, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    blocks = blocks_of(rows, length, m)

    def work():
        prompt_kernel[(heads, len(blocks))](
            q, cache, table, blocks, out, heads * D, *cache.stride()[:3], table.shape[1],
            D**-0.5, HEADS=heads, G=heads // kv_heads, D=D, PAGE=page, BLOCK_M=m, BLOCK_N=n, WINDOW=0, CAP=0.0,
            STAGES=stages, num_warps=warps,
        )  # fmt: skip

    return prompt_result(work, q, out, cache, table, rows, length, heads, kv_heads)


def prompt_desc(rows, length, heads, kv_heads, page, m, n, warps, stages):
    cache, table = pool(rows, length, kv_heads, page)
    q = torch.randn(rows * length, heads, D, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    blocks = blocks_of(rows, length, m)
    flat = cache.view(-1, D)
    desc = TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [n, D])

    def work():
        prompt_desc_kernel[(heads, len(blocks))](
            q, desc, table, blocks, out, heads * D, cache.shape[2] * page, table.shape[1], D**-0.5, KV=kv_heads,
            HEADS=heads, G=heads // kv_heads, D=D, PAGE=page, BLOCK_M=m, BLOCK_N=n, STAGES=stages, num_warps=warps,
        )  # fmt: skip

    return prompt_result(work, q, out, cache, table, rows, length, heads, kv_heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    found = []

    def run(name, function, shape, **tiles):
        try:
            us, error, rate = function(*shape, **tiles)
        except Exception as failure:
            print(name, tiles, f"{type(failure).__name__}: {str(failure)[:100]}", flush=True)
            return
        found.append({"name": name, **tiles, "us": us, "error": error, "rate": rate})
        print(f"{name} {tiles} {us:.1f} us, {rate:.2f} T/s, error {error:.1e}", flush=True)

    for page in (16, 128):
        for block, split, warps, stages in itertools.product((64, 128), (256, 1024, 2048), (4, 8), (2, 3, 4)):
            if warps == 8 and block == 64:
                continue
            tiles = {"page": page, "block": block, "split": split, "warps": warps, "stages": stages}
            run("decode 256 x 1152, 32/8", decode, (256, 1152, 32, 8), **tiles)
            if page == 16:  # as the peers were measured
                run("decode 128 x 900, 16/8", decode, (128, 900, 16, 8), **tiles)
        for m, n, warps, stages in itertools.product((64, 128, 256), (64, 128), (4, 8), (2, 3)):
            tiles = {"page": page, "m": m, "n": n, "warps": warps, "stages": stages}
            run("prompt 2 x 8192, 32/8", prompt, (2, 8192, 32, 8), **tiles)
            if n <= page:
                run("prompt 2 x 8192, 32/8, bulk copies", prompt_desc, (2, 8192, 32, 8), **tiles)
    for name in dict.fromkeys(entry["name"] for entry in found):
        best = sorted((e for e in found if e["name"] == name), key=lambda e: e["us"])[:5]
        print("best", *best, sep="\n  ")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
