"""Products of few rows, y = x @ w.T + b, with what stands about them: the norm before, an activation or a sum after.

- They take as long as reading w does: a program sums its columns of y over all of K, in fp32, with as much of w on its
  way as registers hold. The first of it is asked for before the kernel before has ended (`launch_pdl`).
- A norm is its weight on the way in and its quotient at the end, for a sum of products has one factor: fewer roundings
  than `ops.norm.rms_norm` has. Else what is rounded is what torch's forms round.
- More rows are the library's (`perdure.ops.linear.plain`).

Shapes: x [M, K], w [N, K], b [N], y [M, N]; gated w is [2 * N, K].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from perdure.ops.linear import Product
from perdure.ops.residual import ReadProduct, Stream, WriteProduct
from perdure.ops.triton.early import early_launch
from perdure.ops.triton.launches import cdiv, num_processors

FEW = (1, 2, 4)  # rows: those of the smallest steps that graphs are captured for, so others need no kernel compiled
MOST_DEPTH = 3072  # of sums of several rows: those of 4096 take twice as long as the library's
UNROLLED = 4  # tiles of a sum whose order of loads is the compiler's


@triton.jit
def _tile(at, ks, inside, K: tl.constexpr, EVEN: tl.constexpr):
    """Of a weight that nobody reads again soon. EVEN: nothing of it lies outside."""
    if EVEN:
        return tl.load(at + ks[None, :], eviction_policy="evict_first")
    return tl.load(at + ks[None, :], mask=inside[:, None] & (ks < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _queue(tile):
    return (tile,)


@triton.jit
def _summed(totals, squares, tile, x, norm, ks, K: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr):
    """With a tile's part of the sums, and of the sums of x's squares. Each of the ROWS rows has its own."""
    wide, weights = tile.to(tl.float32), 1.0
    if NORM:
        weights = tl.load(norm + ks, mask=ks < K, other=0.0).to(tl.float32)
    values = tl.load(x + ks, mask=ks < K, other=0.0).to(tl.float32)
    new_totals, new_squares = _queue(totals[0] + wide * (values * weights)[None, :]), _queue(squares[0])
    if NORM:
        new_squares = _queue(squares[0] + values * values)
    for row in tl.static_range(1, ROWS):
        values = tl.load(x + row * K + ks, mask=ks < K, other=0.0).to(tl.float32)
        new_totals = new_totals + (totals[row] + wide * (values * weights)[None, :],)
        new_squares = new_squares + (squares[row] + values * values if NORM else squares[row],)
    return new_totals, new_squares


@triton.jit
def _lines(N, LINES: tl.constexpr, GATED: tl.constexpr):
    """The rows of w that a program reads, and which there are. GATED: a gate, then what it lets through."""
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    if GATED:
        return lines // 2 + lines % 2 * N, lines // 2 < N
    return lines, lines < N


@triton.jit
def _gated(pairs):
    """`silu_mul` of gates and what they let through, [..., 2]; in fp32."""
    gate, up = tl.split(pairs)
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@triton.jit
def _few_rows_kernel(
    x, w, bias, norm, added, y, N, eps, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, UNROLL: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of all ROWS rows of y. GATED: w has N rows of gates, then N of what they let through. AHEAD:
    tiles on their way. EVEN: N and K are whole blocks. EARLY: launched before the kernel before has ended."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    LINES: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    rows, inside = _lines(N, LINES, GATED)
    within = tl.arange(0, BLOCK_K)
    at = w + rows.to(tl.int64)[:, None] * K
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tiles = _queue(_tile(at, within, inside, K, EVEN))
    for i in tl.static_range(1, AHEAD):
        tiles = tiles + (_tile(at, i * BLOCK_K + within, inside, K, EVEN),)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    totals = _queue(tl.zeros((LINES, BLOCK_K), tl.float32))
    squares = _queue(tl.zeros((BLOCK_K,), tl.float32))
    for _ in tl.static_range(1, ROWS):
        totals, squares = totals + (totals[0],), squares + (squares[0],)
    NEXT: tl.constexpr = AHEAD * BLOCK_K
    if UNROLL:
        for k in tl.static_range(0, K, BLOCK_K):
            totals, squares = _summed(totals, squares, tiles[0], x, norm, k + within, K, ROWS, NORM)
            if k + NEXT < K:
                tiles = tiles[1:] + (_tile(at, k + NEXT + within, inside, K, EVEN),)
            else:
                tiles = tiles[1:]
    else:
        for k in tl.range(0, K, BLOCK_K):
            totals, squares = _summed(totals, squares, tiles[0], x, norm, k + within, K, ROWS, NORM)
            ahead = tl.minimum(k + NEXT, K - BLOCK_K) if EVEN else k + NEXT
            tiles = tiles[1:] + (_tile(at, ahead + within, inside, K, EVEN),)
    for row in tl.static_range(ROWS):
        result = tl.sum(totals[row], axis=1)
        if NORM:
            result *= tl.rsqrt(tl.sum(squares[row]) / K + eps)
        if BIAS:
            result += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            result = _gated(tl.reshape(result.to(y.dtype.element_ty), (BLOCK_N, 2)))
        here = row * N + columns
        if ADD:
            before = tl.load(added + here, mask=columns < N, other=0.0).to(tl.float32)
            result = before + result.to(y.dtype.element_ty).to(tl.float32)
        tl.store(y + here, result.to(y.dtype.element_ty), mask=columns < N)


class Tile(NamedTuple):
    """Columns of y that a program computes, and tiles it asks for ahead. Its warps lie side by side along K, for then
    x and w are laid out alike."""

    cols: int
    ahead: int
    warps: int

    @property
    def depth(self) -> int:
        """Elements of K at once: 16 bytes a thread."""
        return 256 * self.warps


def choose_tile(num_rows: int, num_cols: int, depth: int, gated: bool, device: torch.device) -> Tile:
    """As measured on an H200 (docs/adr): 8 to 16 loads of 16 bytes a thread on their way, and enough programs."""
    if device.type != "cuda":  # the interpreter, which takes as long for a small tile as for a large one
        return Tile(64, 1, 1)
    long = depth >= 8192
    warps = next((warps for warps in (8 if long else 4, 4, 2) if depth % (256 * warps) == 0), 1)
    num_tiles = cdiv(depth, 256 * warps)
    lines = (8 if num_tiles == 1 else 2 if long else 4) // (1 if num_rows == 1 else 2)
    cols = max(1, lines // 2) if gated else lines
    while cols > 1 and cdiv(num_cols, cols) < 2 * num_processors(device):
        cols //= 2
    return Tile(cols, min(4, num_tiles), warps)


def few_rows_product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    added: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x @ w.T + bias of as many rows as `FEW` has. norm, eps: of x's norm (`ops.norm.rms_norm`) instead. gated:
    `silu_mul` of it. added [M, N]: and the sum with it."""
    num_rows, depth, num_cols = x.shape[0], w.shape[1], w.shape[0] // (2 if gated else 1)
    assert num_rows in FEW and x.shape[1] == depth and w.is_contiguous(), (x.shape, w.shape, w.stride())
    y = torch.empty(num_rows, num_cols, dtype=x.dtype, device=x.device)
    tile = tile or choose_tile(num_rows, num_cols, depth, gated, x.device)
    num_tiles = cdiv(depth, tile.depth)
    early = early_launch(x.device)
    _few_rows_kernel[(cdiv(num_cols, tile.cols),)](
        x.contiguous(), w, bias, norm, None if added is None else added.contiguous(), y, num_cols, eps, K=depth,
        ROWS=num_rows, BLOCK_N=tile.cols, BLOCK_K=tile.depth, AHEAD=min(tile.ahead, num_tiles),
        UNROLL=num_tiles <= UNROLLED, NORM=norm is not None, GATED=gated, BIAS=bias is not None, ADD=added is not None,
        EVEN=depth % tile.depth == 0 and num_cols % tile.cols == 0, EARLY=bool(early), num_warps=tile.warps, **early,
    )  # fmt: skip
    return y


def _are_few(x: Tensor, w: Tensor) -> bool:
    return len(x) == 1 or (len(x) in FEW and w.shape[1] <= MOST_DEPTH)


class FewRowsProduct:
    """The library's product, or for few rows Triton's."""

    def __init__(self, w: Tensor, b: Tensor | None) -> None:
        self.w, self.b = w, b

    def __call__(self, x: Tensor) -> Tensor:
        return few_rows_product(x, self.w, self.b) if _are_few(x, self.w) else functional.linear(x, self.w, self.b)


class FewRowsKernels:
    """`ops.residual.FewRows`. Products of other kinds stay as they are."""

    def reading(
        self, product: Product, norm_weight: Tensor, eps: float, gated: bool, otherwise: ReadProduct
    ) -> ReadProduct:
        if not isinstance(product, FewRowsProduct):
            return otherwise
        w, b = product.w, product.b

        def read(stream: Stream) -> tuple[Stream, Tensor]:
            if stream.more is not None or not _are_few(stream.x, w):
                return otherwise(stream)
            return stream, few_rows_product(stream.x, w, b, norm=norm_weight, eps=eps, gated=gated)

        return read

    def writing(self, product: Product, otherwise: WriteProduct) -> WriteProduct:
        if not isinstance(product, FewRowsProduct):
            return otherwise
        w, b = product.w, product.b

        def write(stream: Stream, y: Tensor) -> Stream:
            if stream.more is not None or not _are_few(y, w):
                return otherwise(stream, y)
            return Stream(few_rows_product(y, w, b, added=stream.x))

        return write
