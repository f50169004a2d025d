"""Pages on the device: fresh ones cleared, free ones poisoned, a step's keys and values written where they belong.

Keys are written as they turn with their positions, in one kernel with the turning of queries.

Shapes: N tokens, Hq query heads, Hkv key heads, D head size, P pages. A layer's cache is [2, Hkv, P, page_size, D].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perdure.ops.rope import Turning
from perdure.ops.triton.early import early_launch
from perdure.ops.triton.launches import cdiv, power_of_2
from perdure.ops.triton.rows import TILE, turned_heads


@triton.jit
def _fill_kernel(pool, pages, stride_plane, stride_page, value, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One page of one plane. A plane is one head's keys or values in one layer."""
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    at = pool + tl.program_id(1).to(tl.int64) * stride_plane + page * stride_page
    for first in range(0, SIZE, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        tl.store(at + columns, tl.full((BLOCK,), value, tl.float32).to(pool.dtype.element_ty), mask=columns < SIZE)


def fill_pages(pool: Tensor, pages: Tensor, value: float) -> None:
    """Set these pages [n] of a pool [L, 2, Hkv, P, page_size, D] to a value."""
    if pages.numel():
        num_planes = pool.shape[0] * pool.shape[1] * pool.shape[2]
        size = pool.stride(3)
        block = min(2048, power_of_2(size))
        _fill_kernel[(pages.numel(), num_planes)](
            pool, pages, pool.stride(2), size, value, SIZE=size, BLOCK=block, num_warps=4
        )


@triton.jit
def as_stored(x, cache):
    """Keys or values as pages hold them: rounded to their type, and of 8 bits (`ops.float8.to_e4m3`)."""
    if cache.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(cache.dtype.element_ty)


@triton.jit
def _write_kernel(
    keys, values, cache, slots, num_heads, k_stride_row, k_stride_head, v_stride_row, v_stride_head,
    stride_kv, stride_head, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All heads of one token. slots [N]: page * page_size + offset in the page, -1 = none."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    heads, columns = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (heads < num_heads)[:, None] & (columns < D)[None, :]
    k = tl.load(keys + row * k_stride_row + (heads * k_stride_head)[:, None] + columns[None, :], mask=inside)
    v = tl.load(values + row * v_stride_row + (heads * v_stride_head)[:, None] + columns[None, :], mask=inside)
    at = cache + (heads.to(tl.int64) * stride_head)[:, None] + slot * D + columns[None, :]
    tl.store(at, as_stored(k, cache), mask=inside)
    tl.store(at + stride_kv, as_stored(v, cache), mask=inside)


def write_kv(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write keys and values, each [N, Hkv, D], into a layer's pages; where slots [N] (int32) has -1, nothing."""
    num_rows, num_heads, dim = keys.shape
    if num_rows:
        _write_kernel[(num_rows,)](
            keys, values, cache, slots, num_heads, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            cache.stride(0), cache.stride(1), D=dim, HEADS=power_of_2(num_heads),
            BLOCK=power_of_2(dim), num_warps=4,
        )  # fmt: skip


@triton.jit
def _turn_and_write_kernel(
    qk, values, cos, sin, norm, out, cache, slots, num_heads, num_kv_heads, stride_row, stride_head, v_stride_row,
    v_stride_head, stride_plane, stride_kv_head, eps, D: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr, ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token: queries go to out, keys and the values beside them into the cache. EARLY: launched before
    the kernel before has ended."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    of_head = (columns < D)[None, :]
    turned = turned_heads(
        qk, cos, sin, norm, row, heads, num_heads + num_kv_heads, stride_row, stride_head, eps, D, R, HEADS, BLOCK,
        NORM, ONCE,
    )  # fmt: skip
    at = out + (row * num_heads + heads)[:, None] * D + columns[None, :]
    tl.store(at, turned.to(out.dtype.element_ty), mask=(heads < num_heads)[:, None] & of_head)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        kv_heads = heads - num_heads
        inside = ((kv_heads >= 0) & (kv_heads < num_kv_heads))[:, None] & of_head
        page = cache + (kv_heads.to(tl.int64) * stride_kv_head)[:, None] + slot * D + columns[None, :]
        tl.store(page, as_stored(turned.to(qk.dtype.element_ty), cache), mask=inside)
        v = tl.load(values + row * v_stride_row + (kv_heads * v_stride_head)[:, None] + columns[None, :], mask=inside)
        tl.store(page + stride_plane, as_stored(v, cache), mask=inside)


def turn_and_write(qk: Tensor, values: Tensor, turning: Turning, cache: Tensor, slots: Tensor) -> Tensor:
    """The queries of qk [N, Hq + Hkv, D], turned, and its keys, turned, with values [N, Hkv, D] in a layer's pages
    (`write_kv`)."""
    cos, sin, norm_weight, eps, once = turning
    assert norm_weight is None or norm_weight.is_contiguous()
    num_rows, num_all, dim = qk.shape
    num_kv_heads = values.shape[1]
    num_heads = num_all - num_kv_heads
    out = torch.empty(num_rows, num_heads, dim, dtype=qk.dtype, device=qk.device)
    if num_rows:
        block = power_of_2(dim)
        heads = min(power_of_2(num_all), max(1, TILE // block))
        early = early_launch(qk.device)
        _turn_and_write_kernel[(num_rows, cdiv(num_all, heads))](
            qk, values, cos, sin, norm_weight, out, cache, slots, num_heads, num_kv_heads, qk.stride(0), qk.stride(1),
            values.stride(0), values.stride(1), cache.stride(0), cache.stride(1), eps, D=dim, R=cos.shape[-1],
            HEADS=heads, BLOCK=block, NORM=norm_weight is not None, ONCE=once, EARLY=bool(early), num_warps=4, **early,
        )  # fmt: skip
    return out
