"""Products y = x @ w.T + b in Triton that give a row the same bits whatever rows come with it.

A sum over K is in one order: from beginning to end, by one family of instructions (tiles have whole groups of 64 rows:
`wgmma` on Hopper). How large tiles are and how they are fetched is chosen by the number of rows, and moves no bit.

Shapes: x [M, K], w [N, K], b [N], y [M, N].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from perdure.ops.linear import Product
from perdure.ops.triton.launches import cdiv

PROGRAMS = 96  # that a product should have, at least
FEW_ROWS = 16  # that are fetched faster without the copy engine, for wide weights


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    x, w, bias, y, M, N, K, stride_x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of y. BULK: x and w are descriptions. EVEN: K and N are whole blocks. GROUP: tiles of rows that follow
    each other, so that the weights they share are fetched once."""
    tile = tl.program_id(0)
    row_tiles, col_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tile // (GROUP * col_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    inner = tile - group * GROUP * col_tiles
    row, col = (group * GROUP + inner % height) * BLOCK_M, inner // height * BLOCK_N
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    at_x, at_w = rows.to(tl.int64)[:, None] * stride_x, cols.to(tl.int64)[:, None] * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if BULK:
            a, b = x.load([row, k]), w.load([col, k])
        else:
            ks = (k + tl.arange(0, BLOCK_K))[None, :]
            if EVEN:
                a = tl.load(x + at_x + ks, mask=(rows < M)[:, None], other=0.0)
                b = tl.load(w + at_w + ks)
            else:
                a = tl.load(x + at_x + ks, mask=(rows < M)[:, None] & (ks < K), other=0.0)
                b = tl.load(w + at_w + ks, mask=(cols < N)[:, None] & (ks < K), other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    at = y + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


class Tile(NamedTuple):
    """How a product is computed; no bit depends on it. bulk: by the copy engine, where addresses are such."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    bulk: bool = True


TILES = (Tile(256, 128, 64, 8, 3), Tile(128, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4), Tile(64, 64, 128, 4, 4))
"""The larger ones need fewer bytes for a product, the smaller ones make more programs."""
NARROW = Tile(64, 32, 128, 4, 6)
FEW = Tile(64, 64, 64, 4, 5, bulk=False)
FLOAT32 = Tile(64, 64, 32, 4, 2, bulk=False)


def choose_tile(num_rows: int, num_cols: int) -> Tile:
    """As measured on an H200 (docs/adr). The largest that makes enough programs."""
    if num_rows <= FEW_ROWS and num_cols >= PROGRAMS * 128:
        return FEW
    for tile in TILES:
        fits = tile.rows <= max(64, num_rows)
        if fits and cdiv(num_rows, tile.rows) * cdiv(num_cols, tile.cols) >= PROGRAMS:
            return tile
    return NARROW


def multiply(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x @ w.T + bias, rounded once. w is contiguous; x too but for its rows' distance."""
    (num_rows, depth), num_cols = x.shape, w.shape[0]
    y = torch.empty(num_rows, num_cols, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    tile = FLOAT32 if x.dtype == torch.float32 else choose_tile(num_rows, num_cols)
    bulk = tile.bulk and all(n % 16 == 0 for n in (x.data_ptr(), w.data_ptr(), 2 * depth, 2 * x.stride(0)))
    a, b = x, w
    if bulk:
        a = TensorDescriptor(x, [num_rows, depth], [x.stride(0), 1], [tile.rows, tile.depth])
        b = TensorDescriptor(w, [num_cols, depth], [depth, 1], [tile.cols, tile.depth])
    _product_kernel[(cdiv(num_rows, tile.rows) * cdiv(num_cols, tile.cols),)](
        a, b, bias, y, num_rows, num_cols, depth, x.stride(0), BLOCK_M=tile.rows, BLOCK_N=tile.cols, BLOCK_K=tile.depth,
        GROUP=8, BIAS=bias is not None, BULK=bulk, EVEN=depth % tile.depth == 0 and num_cols % tile.cols == 0,
        STAGES=tile.stages, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tile.warps,
    )  # fmt: skip
    return y


def invariant(w: Tensor, b: Tensor | None = None) -> Product:
    """`ops.linear.LinearForm`."""
    assert w.is_contiguous(), w.stride()
    return lambda x: multiply(x, w, b)
