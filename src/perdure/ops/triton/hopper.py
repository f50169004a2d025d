"""Causal attention of prompts as Hopper is fastest at it: warps that fetch, and warps that compute.

What `attention._prompt_kernel` computes, where nothing but the causal mask is asked, and queries and pages are of one
type of 16 bits. A program has 128 queries of a head at a time, 64 for each of two groups of four warps. Three more
warps have the copy engine fetch queries, keys and values for both, in boxes that lie in one page, STAGES blocks ahead.
A group multiplies a block's keys and the values of the block before, and makes weights of the former meanwhile.

There are as many programs as processors. Each takes every n-th pair of a block of queries and a head, to and fro, so
that all end together where the longest come first. Values past a prompt's end were perhaps never written: they are
cleared before weights of 0 meet them.

Only in Gluon does a program say which warps do what. It changes from one version of Triton to the next, so this is
used with those it was run with only, and no interpreter runs it.

Shapes: as in `attention`. A box is [BOX, 64] of a page: rows of 128 bytes, by which shared memory is laid out. A tile
[n, D] for products is D / 64 columns of boxes, one after the other.
"""

from __future__ import annotations

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from perdure.ops.triton.launches import num_processors

BLOCK = 128  # keys gone over at once
STAGES = 3  # blocks of keys and values in shared memory
REGISTERS, FEW = 232, 40  # of a thread that computes, and of one that fetches: 168 each on average
ROWS = gl.constexpr(64)  # queries of a group of warps
WIDE = gl.constexpr(64)  # of a box
BOXES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def _taken(blocks, low, num_blocks, HEADS: gl.constexpr):
    """What this program takes in the turn from `low` on: slot, first packed query, its position, how many queries
    (0: nothing), head."""
    step, place = gl.num_programs(0), gl.program_id(0)
    number = low + gl.where(low // step % 2 == 1, step - 1 - place, place)
    block = blocks + gl.minimum(number // HEADS, num_blocks - 1) * 4
    count = gl.where(number < num_blocks * HEADS, gl.load(block + 3), 0)
    return gl.load(block), gl.load(block + 1), gl.load(block + 2), count, number % HEADS


@gluon.jit
def _fetch_queries(q_bulk, blocks, num_blocks, tiles, full, free, HEADS: gl.constexpr, D: gl.constexpr):
    """The warp that fetches queries."""
    PARTS: gl.constexpr = D // WIDE
    turn = gl.to_tensor(0)
    for low in range(0, num_blocks * HEADS, gl.num_programs(0)):
        _slot, packed, _start, count, head = _taken(blocks, low, num_blocks, HEADS)
        if count > 0:
            mbarrier.wait(free, (turn & 1) ^ 1)
            mbarrier.expect(full, 2 * ROWS * D * 2)
            for box in gl.static_range(2 * PARTS):
                at = [packed + box // PARTS * ROWS, head * D + box % PARTS * WIDE]
                tma.async_copy_global_to_shared(q_bulk, at, full, tiles.index(box))
            turn += 1


@gluon.jit
def _fetch(bulk, first_row, paged, blocks, num_blocks, tiles, full, free, sizes: gl.constexpr):
    """A warp that fetches keys or values, whose planes begin at first_row. For boxes past a prompt's end its last comes
    again."""
    HEADS, G, D, PAGE, BOX, BLOCK, STAGES = sizes
    PARTS: gl.constexpr = D // WIDE
    COUNT: gl.constexpr = BLOCK // BOX
    table, table_width, plane_rows = paged
    done = gl.to_tensor(0)
    for low in range(0, num_blocks * HEADS, gl.num_programs(0)):
        slot, _packed, start, count, head = _taken(blocks, low, num_blocks, HEADS)
        if count > 0:
            pages = table + slot.to(gl.int64) * table_width
            plane = first_row + head // G * plane_rows
            last = (start + count - 1) // BOX * BOX
            for key in range(0, start + count, BLOCK):
                rows = ()
                for number in gl.static_range(COUNT):  # before it waits, since pages take as long as a fetch
                    at = gl.minimum(key + number * BOX, last)
                    rows = rows + (plane + gl.load(pages + at // PAGE) * PAGE + at % PAGE,)  # type: ignore[assignment]
                stage = done % STAGES
                mbarrier.wait(free.index(stage), (done // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(stage), BLOCK * D * 2)
                for box in gl.static_range(PARTS * COUNT):
                    at = [rows[box % COUNT], box // COUNT * WIDE]
                    tile = tiles.index(stage * PARTS * COUNT + box)
                    tma.async_copy_global_to_shared(bulk, at, full.index(stage), tile)
                done += 1


@gluon.jit
def _weights(products, most, total, position, low, factor, MASKED: gl.constexpr, BLOCK: gl.constexpr):
    """A block's weights, the largest product and the sum after it, and what sums before it fade by."""
    layout: gl.constexpr = products.type.layout
    if MASKED:
        keys = low + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
        products = gl.where(keys[None, :] <= position[:, None], products, float("-inf"))
    new = gl.maximum(most, gl.max(products, 1))
    shift = -new * factor
    weights = gl.exp2(products * factor + shift[:, None])
    faded = gl.exp2(most * factor + shift)
    return weights, new, total * faded + gl.sum(weights, 1), faded


@gluon.jit
def _next(
    state, done, low, queries, keys, values, bars, position, factor,
    MASKED: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, OF_PRODUCTS: gl.constexpr,
):  # fmt: skip
    """One more block of keys, and the values of the block before it. state: the weights of that one, the largest
    product, the sum of weights, the weighted values but for that one's."""
    weights, most, total, mixed = state
    _q_full, _q_free, k_full, k_free, v_full, v_free, _cleared = bars
    stage, before, phase = done % STAGES, (done - 1) % STAGES, done // STAGES & 1
    mbarrier.wait(k_full.index(stage), phase)
    nothing = gl.zeros((ROWS, BLOCK), gl.float32, OF_PRODUCTS)
    products = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (done - 1) // STAGES & 1)
    mixed = warpgroup_mma(weights, values.index(before), mixed, is_async=True)
    products = warpgroup_mma_wait(1, deps=[products])
    mbarrier.arrive(k_free.index(stage), count=1)
    ahead, most, total, faded = _weights(products, most, total, position, low, factor, MASKED, BLOCK)
    ahead = gl.convert_layout(ahead.to(weights.dtype), weights.type.layout)
    # They are there, yet without a loop here the assembler moves the weights past the end of the products.
    mbarrier.wait(v_full.index(before), (done - 1) // STAGES & 1)
    mixed, weights, ahead = warpgroup_mma_wait(0, deps=[mixed, weights, ahead])
    mbarrier.arrive(v_free.index(before), count=1)
    mixed = mixed * gl.convert_layout(faded, gl.SliceLayout(1, mixed.type.layout))[:, None]
    return ahead, most, total, mixed


@gluon.jit
def _clear(
    GROUP: gl.constexpr, v_tiles, stage, end, cleared, phase, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """A block's values from its line `end` on become 0. Each group does every other piece, and waits for the other."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    COUNT: gl.constexpr = BLOCK // 16
    pieces = v_tiles._reinterpret(v_tiles.dtype, [STAGES * (D // WIDE) * COUNT, 16, WIDE], BOXES)
    for number in range(end // 16, COUNT):
        if number % 2 == GROUP:
            there = number * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout)) < end
            for part in gl.static_range(D // WIDE):
                piece = pieces.index((stage * (D // WIDE) + part) * COUNT + number)
                piece.store(gl.where(there[:, None], piece.load(layout), 0.0))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(cleared, count=1)
    mbarrier.wait(cleared, phase)


@gluon.jit
def _attend(GROUP: gl.constexpr, blocks, num_blocks, out, factor, tiles, bars, sizes: gl.constexpr):
    """A group of warps that computes."""
    HEADS, _G, D, _PAGE, _BOX, BLOCK, STAGES = sizes
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_free, k_full, k_free, v_full, v_free, cleared = bars
    dtype: gl.constexpr = q_tiles.dtype
    queries = q_tiles._reinterpret(dtype, [2, ROWS, D], BOXES).index(GROUP)
    keys = k_tiles._reinterpret(dtype, [STAGES, BLOCK, D], BOXES)
    values = v_tiles._reinterpret(dtype, [STAGES, BLOCK, D], BOXES)
    of_products: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_mixed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=of_mixed, k_width=2)
    of_sums: gl.constexpr = gl.SliceLayout(1, of_products)
    lines = GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, of_mixed))
    dims = gl.arange(0, D, gl.SliceLayout(0, of_mixed))
    turn, done, clears = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for low in range(0, num_blocks * HEADS, gl.num_programs(0)):
        _slot, packed, start, count, head = _taken(blocks, low, num_blocks, HEADS)
        if count > 0:
            first = start + GROUP * ROWS
            position = first + gl.arange(0, ROWS, of_sums)
            num_keys = gl.cdiv(start + count, BLOCK) * BLOCK
            whole = gl.minimum((first + 1) // BLOCK * BLOCK, num_keys)  # blocks before it need no mask
            most = gl.full((ROWS,), float("-inf"), gl.float32, of_sums)
            total = gl.zeros((ROWS,), gl.float32, of_sums)
            mixed = gl.zeros((ROWS, D), gl.float32, of_mixed)

            stage, phase = done % STAGES, done // STAGES & 1
            mbarrier.wait(q_full, turn & 1)
            mbarrier.wait(k_full.index(stage), phase)
            nothing = gl.zeros((ROWS, BLOCK), gl.float32, of_products)
            products = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(0, deps=[products])
            mbarrier.arrive(k_free.index(stage), count=1)
            weights, most, total, _faded = _weights(products, most, total, position, 0, factor, True, BLOCK)
            state = gl.convert_layout(weights.to(dtype), of_weights), most, total, mixed
            done += 1
            for key in range(BLOCK, whole, BLOCK):
                state = _next(
                    state, done, key, queries, keys, values, bars, position, factor, False, BLOCK, STAGES, of_products
                )
                done += 1
            for key in range(gl.maximum(whole, BLOCK), num_keys, BLOCK):
                state = _next(
                    state, done, key, queries, keys, values, bars, position, factor, True, BLOCK, STAGES, of_products
                )
                done += 1
            mbarrier.arrive(q_free, count=1)
            turn += 1

            weights, most, total, mixed = state
            stage = (done - 1) % STAGES
            mbarrier.wait(v_full.index(stage), (done - 1) // STAGES & 1)
            end = start + count - (num_keys - BLOCK)
            if end < BLOCK:
                _clear(GROUP, v_tiles, stage, end, cleared, clears & 1, D, BLOCK, STAGES)
                clears += 1
            mixed = warpgroup_mma(weights, values.index(stage), mixed, is_async=True)
            mixed, weights = warpgroup_mma_wait(0, deps=[mixed, weights])
            mbarrier.arrive(v_free.index(stage), count=1)
            mixed = mixed * gl.convert_layout(1.0 / total, gl.SliceLayout(1, of_mixed))[:, None]
            at = out + ((packed + lines).to(gl.int64) * HEADS + head)[:, None] * D + dims[None, :]
            gl.store(at, mixed.to(dtype), mask=(lines < count)[:, None])


@gluon.jit(do_not_specialize=["table_width", "num_blocks"])
def _prompt_kernel(
    q_bulk, bulk, table, blocks, out, plane_rows, v_rows, table_width, num_blocks, factor,
    HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """q_bulk and bulk describe queries [N, Hq * D] and the cache, as rows of D: of a head's plane there are plane_rows,
    and values come v_rows after keys. Of a tile, `full` says that it was fetched, `free` that both groups are done
    with it; `cleared`, that both have cleared values."""
    dtype: gl.constexpr = bulk.dtype
    COUNT: gl.constexpr = STAGES * (D // WIDE) * (BLOCK // BOX)
    q_tiles = gl.allocate_shared_memory(dtype, [2 * (D // WIDE), ROWS, WIDE], BOXES)
    k_tiles = gl.allocate_shared_memory(dtype, [COUNT, BOX, WIDE], BOXES)
    v_tiles = gl.allocate_shared_memory(dtype, [COUNT, BOX, WIDE], BOXES)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    mbarrier.init(cleared, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    tiles, bars = (q_tiles, k_tiles, v_tiles), (q_full, q_free, k_full, k_free, v_full, v_free, cleared)
    paged = table, table_width, gl.to_tensor(plane_rows)  # a number that is 1 would be a constant
    sizes: gl.constexpr = (HEADS, G, D, PAGE, BOX, BLOCK, STAGES)
    gl.warp_specialize(
        [
            (_attend, (0, blocks, num_blocks, out, factor, tiles, bars, sizes)),
            (_attend, (1, blocks, num_blocks, out, factor, tiles, bars, sizes)),
            (_fetch_queries, (q_bulk, blocks, num_blocks, q_tiles, q_full, q_free, HEADS, D)),
            (_fetch, (bulk, 0, paged, blocks, num_blocks, k_tiles, k_full, k_free, sizes)),
            (_fetch, (bulk, gl.to_tensor(v_rows), paged, blocks, num_blocks, v_tiles, v_full, v_free, sizes)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, FEW, FEW, FEW],
    )


def attend_prompts(
    q: Tensor, cache: Tensor, table: Tensor, blocks: Tensor, out: Tensor, *, scale: float, sinks: None = None
) -> None:
    """`attention.attend_prompts` without a window, a cap or sinks, in blocks of 128 queries. D is 64 or 128, pages are
    of a multiple of 16."""
    if len(blocks) == 0:
        return
    assert cache.dtype == q.dtype
    (num_tokens, num_heads, dim), page = q.shape, cache.shape[3]
    box = math.gcd(page, BLOCK)
    num_programs = min(num_processors(q.device), num_heads * len(blocks))
    _prompt_kernel[(num_programs,)](
        TensorDescriptor(q, [num_tokens, num_heads * dim], [q.stride(0), 1], [ROWS.value, WIDE.value], BOXES.value),
        TensorDescriptor(cache, [cache.numel() // dim, dim], [dim, 1], [box, WIDE.value], BOXES.value),
        table, blocks, out, cache.stride(1) // dim, cache.stride(0) // dim, table.shape[1], len(blocks),
        1.4426950408889634 * scale, HEADS=num_heads, G=num_heads // cache.shape[1], D=dim, PAGE=page, BOX=box,
        BLOCK=BLOCK, STAGES=STAGES, REGISTERS=REGISTERS, FEW=FEW, num_warps=4, maxnreg=168,
    )  # fmt: skip
