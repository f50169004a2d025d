"""silu(x @ gate.T) * (x @ up.T) of many rows in one product, as Hopper is fastest at it.

What the library's product and `rows.silu_mul` after it give, but for the order of sums: a product is rounded before it
meets the other, as in memory, yet never goes there. So half as much is written, and nothing read again.

- A program has three groups of four warps. Each multiplies 64 rows of x with the same columns of gate and of up: of
  both a thread has the same columns, and they meet in registers.
- What a product takes here is power, and bytes fetched are much of it. Tiles are as large as registers hold, so none
  are left for a warp that only fetches: group 0 has the copy engine fetch, STAGES steps of K ahead.
- There are as many programs as processors. Tiles of rows that share weights follow each other.

Of Gluon `hopper` says what is to be known.

Shapes: x [M, K], w [2 * N, K] (gate, then up), out [M, N]. A tile of x is [64, DEPTH], one of w has HALF rows of gate
and as many of up, one below the other.
"""

from __future__ import annotations

import torch
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

from perdure.ops.triton.launches import cdiv, num_processors

STAGES = 3  # steps in shared memory
TOGETHER = 11  # tiles of rows next to each other: with their weights they stay in the cache
REGISTERS = 168  # of a thread
LEAST_ROUNDS = 8  # tiles a processor from which on it is worth it: what the last round leaves idle is little then
GROUPS = gl.constexpr(3)
ROWS = gl.constexpr(64)  # of x that a group has
DEPTH = gl.constexpr(64)  # of K at once: lines of 128 bytes, by which shared memory is laid out
HALF = gl.constexpr(128)  # columns of out
LINES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def _place(number, shape, TOGETHER: gl.constexpr):
    """A tile's row and column in rows and columns of tiles."""
    M, N, _K = shape
    row_tiles, col_tiles = gl.cdiv(M, GROUPS * ROWS), gl.cdiv(N, HALF)
    first = number // (TOGETHER * col_tiles) * TOGETHER
    height = gl.minimum(row_tiles - first, TOGETHER)
    inner = number - first * col_tiles
    return first + inner % height, inner // height


@gluon.jit
def _next_stage(stage, phase, STAGES: gl.constexpr):
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _fetch(step, x_bulk, w_bulk, shape, tiles, bars, STAGES: gl.constexpr, TOGETHER: gl.constexpr):
    """Has a step fetched once its stage is free. step: a tile's number and place, what is to come of K, stage, phase;
    the next one is returned."""
    number, row, col, k, stage, phase = step
    _M, N, K = shape
    x_tiles, w_tiles = tiles
    full, free = bars
    mbarrier.wait(free.index(stage), phase)
    mbarrier.expect(full.index(stage), (GROUPS * ROWS + 2 * HALF) * DEPTH * 2)
    for group in gl.static_range(GROUPS):
        at = [(row * GROUPS + group) * ROWS, k]
        tma.async_copy_global_to_shared(x_bulk, at, full.index(stage), x_tiles.index(stage * GROUPS + group))
    for half in gl.static_range(2):
        at = [half * N + col * HALF, k]
        tma.async_copy_global_to_shared(w_bulk, at, full.index(stage), w_tiles.index(stage * 2 + half))
    k += DEPTH
    if k >= K:
        k = gl.to_tensor(0)
        number += gl.num_programs(0)
        row, col = _place(number, shape, TOGETHER)
    stage, phase = _next_stage(stage, phase, STAGES)
    return number, row, col, k, stage, phase


@gluon.jit
def _rounded(values, dtype: gl.constexpr):
    """To dtype, and in float32 again. To bfloat16 in pairs: one by one they take the unit that exponentials take."""
    if dtype == gl.bfloat16:
        values = gl.inline_asm_elementwise(
            """
            {
                .reg .b32 pair, low, high;
                cvt.rn.bf16x2.f32 pair, $3, $2;
                shl.b32 low, pair, 16;
                and.b32 high, pair, 0xffff0000;
                mov.b32 $0, low;
                mov.b32 $1, high;
            }
            """,
            "=f,=f,f,f", [values], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        values = values.to(dtype).to(gl.float32)
    return values


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, x_bulk, w_bulk, out, shape, tiles, bars, STAGES: gl.constexpr, TOGETHER: gl.constexpr
):
    """A group of warps."""
    FETCHES: gl.constexpr = GROUP == 0
    M, N, K = shape
    x_tiles, w_tiles = tiles
    full, free = bars
    dtype: gl.constexpr = x_tiles.dtype
    both = w_tiles._reinterpret(dtype, [STAGES, 2 * HALF, DEPTH], LINES)
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF, 16])
    # Four threads that had 2 columns of a line side by side each then have 8.
    of_out: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [ROWS, HALF],
    )  # fmt: skip
    num_tiles = gl.cdiv(M, GROUPS * ROWS) * gl.cdiv(N, HALF)
    if FETCHES:
        row, col = _place(gl.program_id(0), shape, TOGETHER)
        step = gl.program_id(0), row, col, gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(1)
        for _ in gl.static_range(STAGES):
            if step[0] < num_tiles:
                step = _fetch(step, x_bulk, w_bulk, shape, tiles, bars, STAGES, TOGETHER)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        total = gl.zeros((ROWS, 2 * HALF), gl.float32, of_total)
        before = gl.to_tensor(0)  # not `stage`: a name that begins as another's value would not change in the loop
        for k in range(0, K, DEPTH):
            mbarrier.wait(full.index(stage), phase)
            x_tile, w_tile = x_tiles.index(stage * GROUPS + GROUP), both.index(stage).permute((1, 0))
            total = warpgroup_mma(x_tile, w_tile, total, use_acc=k > 0, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(free.index(before), count=1, pred=k > 0)
            if FETCHES:
                if (k > 0) & (step[0] < num_tiles):
                    step = _fetch(step, x_bulk, w_bulk, shape, tiles, bars, STAGES, TOGETHER)
            before = stage
            stage, phase = _next_stage(stage, phase, STAGES)
        total = warpgroup_mma_wait(0, deps=[total])
        # It is there, yet without a loop here the assembler moves roundings to float16 before the end of the products.
        mbarrier.wait(full.index(before), gl.where(stage == 0, phase ^ 1, phase))
        mbarrier.arrive(free.index(before), count=1)
        if FETCHES:
            if step[0] < num_tiles:
                step = _fetch(step, x_bulk, w_bulk, shape, tiles, bars, STAGES, TOGETHER)
        gate, up = total.reshape((ROWS, 2, HALF)).permute((0, 2, 1)).split()
        gate = _rounded(gate, dtype)
        active = (gate / (1.0 + gl.exp2(gate * -1.4426950408889634))).to(dtype).to(gl.float32)
        result = gl.convert_layout((active * up.to(dtype).to(gl.float32)).to(dtype), of_out)
        row, col = _place(number, shape, TOGETHER)
        lines = (row * GROUPS + GROUP) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, of_out))
        columns = col * HALF + gl.arange(0, HALF, gl.SliceLayout(0, of_out))
        inside = (lines < M)[:, None] & (columns < N)[None, :]
        gl.store(out + lines.to(gl.int64)[:, None] * N + columns[None, :], result, mask=inside)


@gluon.jit(do_not_specialize=["M"])
def _gated_product_kernel(
    x_bulk, w_bulk, out, M, N, K, STAGES: gl.constexpr, TOGETHER: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Of a stage, `full` says that it was fetched, `free` that all groups are done with it."""
    dtype: gl.constexpr = x_bulk.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, ROWS, DEPTH], LINES)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES * 2, HALF, DEPTH], LINES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    shape = gl.to_tensor(M), gl.to_tensor(N), gl.to_tensor(K)  # a number that is 1 would be a constant
    tiles, bars = (x_tiles, w_tiles), (full, free)
    gl.warp_specialize(
        [
            (_multiply, (0, x_bulk, w_bulk, out, shape, tiles, bars, STAGES, TOGETHER)),
            (_multiply, (1, x_bulk, w_bulk, out, shape, tiles, bars, STAGES, TOGETHER)),
            (_multiply, (2, x_bulk, w_bulk, out, shape, tiles, bars, STAGES, TOGETHER)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def _num_tiles(num_rows: int, width: int) -> int:
    return cdiv(num_rows, GROUPS.value * ROWS.value) * cdiv(width, HALF.value)


def serves(x: Tensor, w: Tensor) -> bool:
    """Whether it can be computed here, and is worth it."""
    return (
        _num_tiles(len(x), len(w) // 2) >= LEAST_ROUNDS * num_processors(x.device)
        and x.dtype == w.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % 8 == 0
        and all(of_any.is_contiguous() and of_any.data_ptr() % 16 == 0 for of_any in (x, w))
    )


def gated_product(x: Tensor, w: Tensor) -> Tensor:
    """`ops.activation.silu_mul` of x @ w.T; both are contiguous, in bfloat16 or float16, K a multiple of 8."""
    (num_rows, depth), width = x.shape, len(w) // 2
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    num_programs = min(num_processors(x.device), _num_tiles(num_rows, width))
    _gated_product_kernel[(num_programs,)](
        TensorDescriptor(x, [num_rows, depth], [depth, 1], [ROWS.value, DEPTH.value], LINES.value),
        TensorDescriptor(w, [2 * width, depth], [depth, 1], [HALF.value, DEPTH.value], LINES.value),
        out, num_rows, width, depth, STAGES=STAGES, TOGETHER=TOGETHER, REGISTERS=REGISTERS,
        num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
    return out
