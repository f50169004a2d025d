"""Attention on a device that plans nothing on the host: rows are tensors at fixed addresses, so a graph can hold it.

- `PagedRows` says which packed queries are rows of one query and which are blocks of prompts; padding is in it, not
  around it.
- Five forms: "triton"; "hopper", which is that but for prompts; "reference", the slow oracle of all forms, which looks
  at the rows on the host; and "flashinfer" and "fa4", which plan on the host after all, so that no graph holds them.

Shapes: as in `base`; n rows of one query, b blocks, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from perdure.ops import gluon
from perdure.ops.attention import flash_attention, flashinfer
from perdure.ops.attention.base import AttentionRows, CacheShape, LayerAttention
from perdure.ops.attention.reference import PlannedReference
from perdure.ops.attention.turned import TurnedFirst
from perdure.ops.norm import rms_norm, rms_norm_once
from perdure.ops.rope import Turning, rotate

PAGED_FORMS = ("triton", "hopper", "flashinfer", "fa4", "reference")


@dataclass(frozen=True, slots=True)
class PagedRows:
    """All int32. table [S, W]: pages of each slot. index, slots, positions [n]: where the query of a row of one query
    is packed, its slot, where it stands (-1 = padding). blocks [b, 4]: of a prompt its slot, where the block's first
    query is packed, where that stands, and how many there are (0 = padding)."""

    table: Tensor
    index: Tensor
    slots: Tensor
    positions: Tensor
    blocks: Tensor


class PagedAttention(Protocol):
    """kernel: the form with what its bits depend on. block_size: queries of a prompt that make one block, at most.
    is_planned: `plan` comes before a step's runs."""

    name: str
    kernel: str
    block_size: int
    is_planned: bool

    def plan(self, rows: AttentionRows) -> None: ...

    def run(self, q: Tensor, cache: Tensor, rows: PagedRows, sinks: Tensor | None = None) -> Tensor:
        """Attend q [N, Hq, D] over a layer's cache, which holds this step's keys. [N, Hq, D]; what belongs to no row is
        undefined. sinks [Hq] (fp32): the layer's; None if its kind has none."""
        ...

    def attend(
        self, qk: Tensor, values: Tensor, turning: Turning, cache: Tensor, rows: PagedRows, write: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The same of queries and keys [N, Hq + Hkv, D] that have not turned, after keys and values [N, Hkv, D] were
        written where `write` (`ops.triton.pages`) says."""
        ...


class TritonPaged(TurnedFirst):
    """See `ops.triton.attention`."""

    name = "triton"
    is_planned = False

    def __init__(self, shape: CacheShape, layer: LayerAttention, dtype: torch.dtype, *, batch_invariant: bool) -> None:
        from perdure.ops.triton import attention

        self._decode, self._prompts = (
            partial(form, scale=layer.scale, window=layer.window, softcap=layer.softcap, invariant=batch_invariant)
            for form in (attention.attend_decode, attention.attend_prompts)
        )
        self._has_sinks = layer.sink is not None
        self._most_turning = 0 if batch_invariant else attention.MOST_TURNING // shape.num_kv_heads
        group = shape.num_heads // shape.num_kv_heads
        self.block_size = attention.prompt_block(shape.head_dim, group, dtype, invariant=batch_invariant)
        self.kernel = f"triton by {attention.SPLIT}, {self.block_size} rows" if batch_invariant else "triton"

    def plan(self, rows: AttentionRows) -> None:
        raise AssertionError("nothing is planned on the host")

    def run(self, q: Tensor, cache: Tensor, rows: PagedRows, sinks: Tensor | None = None) -> Tensor:
        assert q.stride(1) == q.shape[2] and q.stride(2) == 1, "heads of a query lie side by side"
        assert (sinks is not None) == self._has_sinks
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._decode(q, cache, rows.table, rows.index, rows.slots, rows.positions, out, sinks=sinks)
        self._prompts(q, cache, rows.table, rows.blocks, out, sinks=sinks)
        return out

    def attend(
        self, qk: Tensor, values: Tensor, turning: Turning, cache: Tensor, rows: PagedRows, write: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        is_few = len(rows.slots) <= self._most_turning and not len(rows.blocks)
        if is_few:
            return self.run_turning(qk, values, turning, cache, rows, sinks)
        return super().attend(qk, values, turning, cache, rows, write, sinks)

    def run_turning(
        self, qk: Tensor, values: Tensor, turning: Turning, cache: Tensor, rows: PagedRows, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of rows of one query, of queries and keys [N, Hq + Hkv, D] that have not turned. Keys and values
        [N, Hkv, D] are written, too."""
        assert not len(rows.blocks) and (sinks is not None) == self._has_sinks
        assert all(x.stride(1) == x.shape[2] and x.stride(2) == 1 for x in (qk, values)), "heads lie side by side"
        out = torch.empty(len(qk), qk.shape[1] - values.shape[1], qk.shape[2], dtype=qk.dtype, device=qk.device)
        at = rows.table, rows.index, rows.slots, rows.positions
        self._decode(qk, cache, *at, out, values=values, turning=turning, sinks=sinks)
        return out


class HopperPaged(TritonPaged):
    """The same, with prompts as `ops.triton.hopper` has them."""

    name = "hopper"

    def __init__(self, shape: CacheShape, layer: LayerAttention, dtype: torch.dtype) -> None:
        from perdure.ops.triton import hopper

        super().__init__(shape, layer, dtype, batch_invariant=False)
        self.kernel = self.name
        self._prompts = partial(hopper.attend_prompts, scale=layer.scale)


def why_not_hopper(
    shape: CacheShape, layer: LayerAttention, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why `HopperPaged` does not serve here; None = it does."""
    if reason := gluon.why_not(device):
        return reason
    if dtype not in (torch.bfloat16, torch.float16) or kv_dtype != dtype:
        return "it computes in bfloat16 and float16, over pages in the same type"
    if shape.head_dim not in (64, 128):
        return f"it has heads of 64 and 128, not of {shape.head_dim}"
    if shape.page_size % 16:
        return f"it has pages of a multiple of 16, not of {shape.page_size}"
    if layer.window is not None or layer.softcap is not None:
        return "it has no windows and no soft caps"
    if layer.sink is not None:
        return "it has no sinks"
    return None


class ReferencePaged:
    """`reference.ReferenceAttention` on any device."""

    name = kernel = "reference"
    block_size = 128
    is_planned = False

    def __init__(self, shape: CacheShape, layer: LayerAttention) -> None:
        self._shape = shape
        self._layer = layer

    def plan(self, rows: AttentionRows) -> None:
        raise AssertionError("rows are looked at when they are run")

    def attend(
        self, qk: Tensor, values: Tensor, turning: Turning, cache: Tensor, rows: PagedRows, write: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """By the plainest steps."""
        from perdure.ops.triton.pages import write_kv

        if turning.norm_weight is not None:
            qk = (rms_norm_once if turning.once else rms_norm)(qk, turning.norm_weight, turning.eps)
        q, keys = rotate(qk, turning.cos, turning.sin).split((qk.shape[1] - values.shape[1], values.shape[1]), 1)
        write_kv(keys, values, cache, write)
        return self.run(q, cache, rows, sinks)

    def run(self, q: Tensor, cache: Tensor, rows: PagedRows, sinks: Tensor | None = None) -> Tensor:
        ones = torch.stack((rows.slots, rows.index, rows.positions, torch.ones_like(rows.index)), 1)
        ones[:, 3] = (rows.positions >= 0).int()
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        table = rows.table.cpu().numpy().astype(np.int64)
        for slot, packed, start, count in torch.cat((ones, rows.blocks)).tolist():
            if count:
                row = AttentionRows(np.array([0, count]), np.array([start]), table[slot : slot + 1])
                part = slice(packed, packed + count)
                out[part] = PlannedReference(self._shape, self._layer, row).run(q[part], cache, sinks)
        return out


def make_paged(
    name: str,
    shape: CacheShape,
    layer: LayerAttention,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> PagedAttention:
    """The form called `name` for models that compute in dtype, over pages in kv_dtype (None = dtype, too); "auto" is
    the fastest as measured. ValueError: a name that is none, or a form that does not serve here or does not
    keep what was asked."""
    why_not = partial(why_not_hopper, shape, layer, dtype, kv_dtype or dtype, device)
    if name == "auto":
        name = "triton" if batch_invariant or why_not() else "hopper"
    if name not in PAGED_FORMS:
        raise ValueError(f"attention_backend={name!r} is not for CUDA; there are auto, {', '.join(PAGED_FORMS)}")
    if batch_invariant and name != "triton":
        raise ValueError(
            f"attention_backend={name!r} is not batch invariant on CUDA; use 'auto' or batch_invariant=False"
        )
    if name == "flashinfer":
        if reason := flashinfer.why_not(shape, layer, dtype, kv_dtype or dtype):
            raise ValueError(f"attention_backend='flashinfer' does not serve here: {reason}")
        return flashinfer.FlashInferPaged(shape, layer, dtype, device)
    if name == "fa4":
        if reason := flash_attention.why_not(shape, layer, dtype, kv_dtype or dtype, device):
            raise ValueError(f"attention_backend='fa4' does not serve here: {reason}")
        return flash_attention.FlashAttentionPaged(shape, layer, device)
    if name == "hopper":
        if reason := why_not():
            raise ValueError(f"attention_backend='hopper' does not serve here: {reason}")
        return HopperPaged(shape, layer, dtype)
    if name == "reference":
        return ReferencePaged(shape, layer)
    return TritonPaged(shape, layer, dtype, batch_invariant=batch_invariant)
