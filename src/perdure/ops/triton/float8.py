"""Products in 8 bits on a GPU: rows rounded by a kernel of ours, multiplied by torch's (`torch._scaled_mm`).

- What is rounded has the same codes and factors as on a CPU, to the bit (`ops.float8`).
- The library multiplies sizes that are multiples of 16, so weights are held padded with zeros.
- For many rows the library scales them, too, and rounds once. For few rows, and where the result is no bfloat16, it
  gives the bare sums in fp32 (by other kernels, that are up to twice as fast there) and a kernel of ours scales them.

Shapes: x [N, K], codes [M', K'] (M and K padded), factors [M'], y [N, M].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perdure.ops.float8 import E4M3, TILE, Float8Weight
from perdure.ops.linear import Product
from perdure.ops.triton.launches import cdiv, power_of_2

BLOCK = 16384  # elements of a row held at once
FEW_ROWS = 512


@triton.jit
def _quantise_kernel(
    x, codes, factors, stride_x, num_columns, num_padded, MOST: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row. ROW: it is held whole. MOST: no magnitude counts as larger; 0 = all count as they are."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x += row * stride_x
    values = tl.load(x + lanes, mask=lanes < num_columns, other=0.0).to(tl.float32)
    largest = tl.abs(values)
    if not ROW:
        for first in range(BLOCK, num_columns, BLOCK):
            more = tl.load(x + first + lanes, mask=first + lanes < num_columns, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(more), propagate_nan=tl.PropagateNan.ALL)
    is_nan = tl.max((largest != largest).to(tl.int32), 0) > 0
    most = tl.max(largest, 0)
    if MOST > 0:
        most = tl.minimum(most, MOST)
    factor = tl.where(most == 0.0, 1.0, tl.div_rn(most, 448.0))
    factor = tl.where(is_nan, float("nan"), factor)
    tl.store(factors + row, factor)
    for first in range(0, num_padded, BLOCK):
        if not ROW:
            values = tl.load(x + first + lanes, mask=first + lanes < num_columns, other=0.0).to(tl.float32)
        scaled = tl.clamp(tl.div_rn(values, factor), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        scaled = tl.where(first + lanes < num_columns, scaled, 0.0)
        tl.store(codes + row * num_padded + first + lanes, scaled.to(tl.float8e4nv), mask=first + lanes < num_padded)


def quantised_rows(x: Tensor, most: float | None = None) -> tuple[Tensor, Tensor]:
    """`ops.float8.quantised_rows` of x [N, K], the codes padded to whole tiles with zeros."""
    num_rows, num_columns = x.shape
    padded = -(-num_columns // TILE) * TILE
    codes = torch.empty(num_rows, padded, dtype=E4M3, device=x.device)
    factors = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        assert x.stride(1) == 1, "a row lies in one piece"
        block = min(BLOCK, power_of_2(padded))
        _quantise_kernel[(num_rows,)](
            x, codes, factors, x.stride(0), num_columns, padded, MOST=most or 0.0, ROW=padded <= block, BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return codes, factors


@triton.jit
def _scale_kernel(
    sums, row_factors, factors, bias, out, num_columns, stride_sums, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """sums * row's factor * column's factor + bias."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    y = tl.load(sums + row * stride_sums + columns, mask=inside) * tl.load(row_factors + row)
    y = y * tl.load(factors + columns, mask=inside)
    if BIAS:
        y += tl.load(bias + columns, mask=inside).to(tl.float32)
    tl.store(out + row * num_columns + columns, y.to(out.dtype.element_ty), mask=inside)


def scaled(
    sums: Tensor, row_factors: Tensor, factors: Tensor, bias: Tensor | None, num_out: int, dtype: torch.dtype
) -> Tensor:
    """The first num_out columns of sums (fp32), scaled and rounded to a type."""
    out = torch.empty(sums.shape[0], num_out, dtype=dtype, device=sums.device)
    block = min(1024, power_of_2(num_out))
    _scale_kernel[(sums.shape[0], cdiv(num_out, block))](
        sums, row_factors, factors, factors if bias is None else bias, out, num_out, sums.stride(0),
        BIAS=bias is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def product(weight: Float8Weight, bias: Tensor | None) -> Product:
    """x @ w.T + bias."""
    num_out, codes, factors = weight.shape[0], weight.codes, weight.factors
    assert isinstance(codes, Tensor) and codes.is_cuda, "codes lie on the GPU"
    turned, one = codes.t(), factors.new_ones(())
    is_whole = codes.shape[0] == num_out

    def multiply(x: Tensor) -> Tensor:
        if not x.shape[0]:
            return x.new_empty(0, num_out)
        of_x, row_factors = quantised_rows(x, weight.most)
        if x.dtype == torch.bfloat16 and is_whole and x.shape[0] > FEW_ROWS:
            by_rows, by_columns = row_factors[:, None], factors[None, :]
            return torch._scaled_mm(of_x, turned, by_rows, by_columns, bias=bias, out_dtype=torch.bfloat16)
        sums = torch._scaled_mm(of_x, turned, one, one, out_dtype=torch.float32)
        return scaled(sums, row_factors, factors, bias, num_out, x.dtype)

    return multiply
