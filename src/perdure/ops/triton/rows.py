"""Functions of rows: norms, norms of sums, gated activations, rotary positions.

Each is computed in fp32 and rounded where torch's form of it (`ops.norm`, `ops.activation`, `ops.rope`) rounds.

Shapes: N rows, H width of a row, J heads, D elements of a head, R of them turn, I = width of an MLP.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perdure.ops.rope import RotaryTable
from perdure.ops.triton.early import early_launch
from perdure.ops.triton.launches import cdiv, power_of_2

TILE = 2048  # elements a program of a norm holds at once, where rows are short


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x, added, weight, total, out, num_rows, num_heads, stride_row, stride_head, stride_weight, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS rows of [N * J, H]. ADD: x + added is what is normalised, and goes to total. ONCE: one rounding, at last.
    EARLY: see `early`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < H)[None, :]
    head = rows % num_heads
    at = (rows // num_heads).to(tl.int64) * stride_row + head * stride_head
    flat = rows.to(tl.int64)[:, None] * H + columns[None, :]
    values = tl.load(x + at[:, None] + columns[None, :], mask=inside, other=0.0)
    if ADD:
        values = (values.to(tl.float32) + tl.load(added + flat, mask=inside, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(total + flat, values, mask=inside)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / H
    normal = wide * tl.rsqrt(mean + eps)[:, None]
    w = tl.load(weight + (head * stride_weight)[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if not ONCE:
        normal = normal.to(values.dtype).to(tl.float32)
    tl.store(out + flat, (normal * w).to(out.dtype.element_ty), mask=inside)


def _launch_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float, once: bool) -> tuple[Tensor, Tensor]:
    """(the sum, its norm), both contiguous."""
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        x = x.contiguous().view(-1, width)
        heads = 1
    num_rows = x.numel() // width
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if added is not None else out
    block = power_of_2(width)
    rows = max(1, TILE // block)
    early = early_launch(x.device)
    if num_rows:
        _norm_kernel[(cdiv(num_rows, rows),)](
            x, x if added is None else added, weight, total, out, num_rows, heads,
            x.stride(0), x.stride(1) if heads > 1 else 0, weight.stride(0) if weight.dim() == 2 else 0, eps,
            H=width, BLOCK=block, ROWS=rows, ADD=added is not None, ONCE=once, EARLY=bool(early),
            num_warps=8 if block >= 4096 else 4, **early,
        )  # fmt: skip
    return total, out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.norm.rms_norm`; x is [N, H], or [N, J, H] with a weight [H] or [J, H]."""
    return _launch_norm(x, None, weight, eps, once=False)[1].view(x.shape)


def rms_norm_once(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.norm.rms_norm_once`."""
    return _launch_norm(x, None, weight, eps, once=True)[1].view(x.shape)


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its `rms_norm`; both [N, H]."""
    return _launch_norm(x, y.contiguous(), weight, eps, once=False)


@triton.jit
def _gated_kernel(
    gate_up, out, num_columns, stride_row, GELU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    gate = tl.load(gate_up + row * stride_row + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride_row + num_columns + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if GELU:
        turned = (wide * wide * 0.044715 + 1.0) * wide
        active = wide / (1.0 + tl.exp(-1.5957691216057308 * turned))
    else:
        active = wide / (1.0 + tl.exp(-wide))
    result = active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * num_columns + columns, result.to(out.dtype.element_ty), mask=inside)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    num_rows, width = gate_up.shape
    out = torch.empty(num_rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        block, early = min(1024, power_of_2(width // 2)), early_launch(gate_up.device)
        _gated_kernel[(num_rows, cdiv(width // 2, block))](
            gate_up, out, width // 2, gate_up.stride(0), GELU=gelu, BLOCK=block, EARLY=bool(early), num_warps=4, **early
        )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """`ops.activation.silu_mul`: [N, 2 * I] to [N, I]."""
    return _gated(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """`ops.activation.gelu_tanh_mul`."""
    return _gated(gate_up, gelu=True)


@triton.jit
def _normalised(values, weights, factor, type: tl.constexpr, ONCE: tl.constexpr):
    """As `_norm_kernel` rounds."""
    normal = values * factor
    if not ONCE:
        normal = normal.to(type).to(tl.float32)
    return (normal * weights.to(tl.float32)).to(type).to(tl.float32)


@triton.jit
def turned_heads(
    x, cos, sin, norm, row, heads, num_heads, stride_row, stride_head, eps, D: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Heads [HEADS] of a row of x, turned, [HEADS, BLOCK] in fp32. cos and sin [N, R], the sines of the first half
    negative. NORM: each is normalised before, with weights norm [J, D]. ONCE: see `_norm_kernel`."""
    columns = tl.arange(0, BLOCK)
    turning = columns < R
    partner = tl.where(turning, (columns + R // 2) % R, columns)
    inside = (heads < num_heads)[:, None] & (columns < D)[None, :]
    at = x + row * stride_row + (heads * stride_head)[:, None]
    own = tl.load(at + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(own * own, axis=1) / D + eps)[:, None]
        weights = norm + heads[:, None] * D
        own_weights = tl.load(weights + columns[None, :], mask=inside, other=0.0)
        other_weights = tl.load(weights + partner[None, :], mask=inside, other=0.0)
        own = _normalised(own, own_weights, factor, x.dtype.element_ty, ONCE)
        other = _normalised(other, other_weights, factor, x.dtype.element_ty, ONCE)
    c = tl.load(cos + row * R + columns, mask=turning, other=1.0).to(tl.float32)
    s = tl.load(sin + row * R + columns, mask=turning, other=0.0).to(tl.float32)
    cosines, sines = tl.broadcast_to(c[None, :], (HEADS, BLOCK)), tl.broadcast_to(s[None, :], (HEADS, BLOCK))
    return tl.fma(other, sines, own * cosines)


@triton.jit
def _rotate_kernel(
    x, cos, sin, out, num_heads, stride_row, stride_head,
    D: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    inside = (heads < num_heads)[:, None] & (columns < D)[None, :]
    result = turned_heads(
        x, cos, sin, x, row, heads, num_heads, stride_row, stride_head, 0.0, D, R, HEADS, BLOCK, False, False
    )
    at = out + (row * num_heads + heads)[:, None] * D + columns[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`ops.rope.rotate`, with one rounding at the end. x [N, J, D]; cos and sin [N, 1, R]."""
    num_rows, num_heads, dim = x.shape
    out = torch.empty(num_rows, num_heads, dim, dtype=x.dtype, device=x.device)
    if num_rows:
        block = power_of_2(dim)
        heads = min(power_of_2(num_heads), max(1, TILE // block))
        _rotate_kernel[(num_rows, cdiv(num_heads, heads))](
            x, cos, sin, out, num_heads, x.stride(0), x.stride(1),
            D=dim, R=cos.shape[-1], HEADS=heads, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _rotations_kernel(cosines, sines, positions, cos, sin, R: tl.constexpr, BLOCK: tl.constexpr):
    """A row of both, from its position's row of the tables."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < R
    at = tl.load(positions + row).to(tl.int64) * (R // 2) + columns % (R // 2)
    c, s = tl.load(cosines + at, mask=inside, other=0.0), tl.load(sines + at, mask=inside, other=0.0)
    s = tl.where(columns < R // 2, -s, s)
    tl.store(cos + row * R + columns, c.to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + row * R + columns, s.to(sin.dtype.element_ty), mask=inside)


def rotations(table: RotaryTable, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`ops.rope.rotations`."""
    num_rows, width = len(positions), 2 * table.cos.shape[1]
    cos, sin = torch.empty(2, num_rows, 1, width, dtype=dtype, device=positions.device)
    if num_rows:
        _rotations_kernel[(num_rows,)](*table, positions, cos, sin, R=width, BLOCK=power_of_2(width), num_warps=1)
    return cos, sin
