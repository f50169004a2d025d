"""Values as rows are drawn from them, and their weights: what the kernels of draws, filters and scores have in common.

- exp is the polynomial that numpy's vector form uses (AVX2 and AVX512), to every rounding of it; sums of blocks of 64
  ids go by halves. So equal logits give the weights and sums that a CPU has.
- Divisions are correctly rounded without the branches of the general form, which keep a program from having several
  under way: the reciprocal is known to be right, and what a product with it leaves over is put in. That holds away from
  overflow and denormals; others take the general form (`_is_easy`).
- A row that asked for something before its temperature is read where that was done (`adjust`), others where they are.

Shapes: n rows, V = vocabulary, C = chunks of CHUNK ids, nb = blocks of 64 ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from perdure.ops.triton.adjust import Adjusted

BLOCK = 64  # ids of one block of the draw's sum
COLDEST = tl.constexpr(1.1754943508222875e-38)
"""The least temperature there is: the smallest normal fp32."""
FAR = tl.constexpr(-(2.0**90))
"""Below any value that matters."""


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
class Masses:
    """sums [n, nb] (fp32): of each block's weights; of chunks [n, C] (fp64) where top_p asks. Rows that have a top_k
    get none until it is known what they keep."""

    sums: Tensor
    of_chunks: Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """What may be drawn of each row [n]: scaled values above border, and its equals up to the id last_tie. All fp32."""

    border: Tensor
    last_tie: Tensor


Filter = Callable[[Adjusted, Settings, Masses], Kept]
"""Says what is kept, and makes the masses those of what is."""


@triton.jit
def _all(x, value):
    return tl.full(x.shape, value, tl.float32)


@triton.jit
def exp(x):
    """numpy's exp of fp32 for x <= 0, every rounding of it."""
    return _exp(tl.maximum(x, -104.0))  # of which it is 0


@triton.jit
def _exp(x):
    """The same for x >= -106: the quotient of two polynomials and a power of 2."""
    shifted = x * 1.4426950408889634 + 12582912.0  # ends in the power
    steps = shifted - 12582912.0
    r = tl.fma(steps, _all(x, -6.93145752e-1), x)
    r = tl.fma(steps, _all(x, -1.42860677e-6), r)
    over = tl.fma(r, _all(x, 5.082762527590693718096e-04), _all(x, 6.757896990527504603057e-03))
    over = tl.fma(over, r, _all(x, 5.114512081637298353406e-02))
    over = tl.fma(over, r, _all(x, 2.473615434895520810817e-01))
    over = tl.fma(over, r, _all(x, 7.257664613233124478488e-01))
    over = tl.fma(over, r, _all(x, 9.999999999980870924916e-01))
    under = tl.fma(r, _all(x, 2.159509375685829852307e-02), _all(x, -2.742335390411667452936e-01))
    under = tl.fma(under, r, _all(x, 1.0))
    # 1 / under near enough that over / under comes out rounded right: tried for every x.
    inverse = tl.fma(r, _all(x, 1.533389877e-04), _all(x, 1.252589282e-03))
    inverse = tl.fma(inverse, r, _all(x, 8.779260330e-03))
    inverse = tl.fma(inverse, r, _all(x, 5.360881612e-02))
    inverse = tl.fma(inverse, r, _all(x, 2.742335498e-01))
    inverse = tl.fma(inverse, r, _all(x, 1.0))
    power = shifted.to(tl.int32, bitcast=True) - (0x4B400000 - 191)  # + 64 + 127
    scale = (power << 23).to(tl.float32, bitcast=True)
    return quotient(over, under, inverse) * scale * 5.421010862427522e-20  # 2 ** -64: a denormal is rounded once


@triton.jit
def quotient(a, b, inverse):
    """a / b with 1 / b at hand."""
    q = a * inverse
    return tl.fma(tl.fma(-q, b, a), inverse, q)


@triton.jit
def halved(w, N: tl.constexpr):
    """Sums [N] of w [N, 64], each in order of the halves."""
    w = tl.sum(tl.reshape(w, (N, 2, 32)), 1)
    return halved_16(tl.sum(tl.reshape(w, (N, 2, 16)), 1), N)


@triton.jit
def halved_16(w, N: tl.constexpr):
    """The same of w [N, 16]."""
    w = tl.sum(tl.reshape(w, (N, 2, 8)), 1)
    w = tl.sum(tl.reshape(w, (N, 2, 4)), 1)
    w = tl.sum(tl.reshape(w, (N, 2, 2)), 1)
    return tl.sum(w, 1)


@triton.jit
def is_adjusted(asked, masks, row):
    return (tl.load(asked + row) | tl.load(masks + row)) != 0


@triton.jit
def read(logits, adjusted, elsewhere, row, ids, V, stride):
    """Values of a row, -inf where it has no id. elsewhere: `is_adjusted`."""
    here, there = tl.where(elsewhere, 0, V), tl.where(elsewhere, V, 0)
    x = tl.load(logits + row * stride + ids, mask=ids < here, other=float("-inf")).to(tl.float32)
    y = tl.load(adjusted + row * V + ids, mask=ids < there, other=float("-inf")).to(tl.float32)
    return tl.maximum(x, y)


@triton.jit
def largest_of(best, row, C, CP: tl.constexpr):
    """A row's largest value, of a row that has one."""
    chunks = tl.arange(0, CP)
    return tl.max(tl.load(best + row * C + chunks, mask=chunks < C, other=float("-inf")), 0)


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
def _is_easy(top, heat):
    """No value but what is FAR overflows, and none that is not the largest is so near that digits are lost."""
    size = tl.abs(top)
    return (heat > 9.0e-10) & (heat < 1.0e9) & (size > 1.0e-18) & (size < 1.0e24)


@triton.jit
def scaled(x, top, heat):
    """(x - top) / heat, correctly rounded; FAR stands for what is below it."""
    x = x - top
    if _is_easy(top, heat):
        x = quotient(tl.maximum(x, FAR), _all(x, heat), _all(x, tl.div_rn(1.0, heat)))
    else:
        x = tl.div_rn(x, _all(x, heat))
    return x


@triton.jit
def weight(x, top, heat):
    """exp of `scaled`, where that alone is wanted."""
    x = x - top
    if _is_easy(top, heat):
        w = _exp(quotient(tl.maximum(x, -105.0 * heat), _all(x, heat), _all(x, tl.div_rn(1.0, heat))))
    else:
        w = exp(tl.div_rn(x, _all(x, heat)))
    return w


@triton.jit
def is_kept(x, w, ids, V, edge, tie, least):
    """Of scaled values x, and w = exp(x)."""
    return ((x > edge) | ((x == edge) & (ids <= tie))) & (w >= least) & (ids < V)


@triton.jit
def has_filter(k, p, least, V):
    return ((k > 1) & (k < V)) | (p < 1.0) | (least > 0.0)
