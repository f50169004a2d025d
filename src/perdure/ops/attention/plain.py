"""Attention by torch's own fused kernel: a plain form, for where bits need not be invariant.

- Decode rows share one call over keys padded to the longest; a row of several queries gets a call of its own.
- Not batch invariant: the kernel's blocks follow the shapes of the call.
- The kernel has no soft cap; layers with one are refused. A sink is a key of zeros with a mask of its own.

Shapes: as in `base`; B rows handled together, C = keys gathered for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from perdure.ops.attention.base import AttentionRows, CacheShape, LayerAttention


class PlainAttention:
    """See the module's docstring."""

    name = kernel = "plain"
    batch_invariant = False

    def __init__(self, shape: CacheShape, layer: LayerAttention) -> None:
        if layer.softcap is not None:
            raise ValueError(f"attention_backend='plain' has no soft cap (softcap={layer.softcap}); use 'tiled'")
        self._shape = shape
        self._layer = layer

    def plan(self, rows: AttentionRows) -> PlannedPlain:
        lengths = np.diff(rows.offsets)
        groups = [np.flatnonzero(lengths == 1)] if np.any(lengths == 1) else []
        groups += [np.array([row]) for row in np.flatnonzero(lengths > 1)]
        return PlannedPlain(self._shape, self._layer, [self._plan_call(rows, group) for group in groups])

    def _plan_call(self, rows: AttentionRows, group: NDArray[np.int64]) -> _Call:
        """Rows of equal length."""
        shape = self._shape
        lengths = rows.offsets[group + 1] - rows.offsets[group]
        known = rows.starts[group] + lengths
        num_pages = -(-int(known.max()) // shape.page_size)
        at = np.arange(num_pages)
        used = at < -(-known[:, None] // shape.page_size)
        pages = np.where(used, rows.block_table[group, :num_pages], rows.block_table[group, :1])
        heads = np.arange(2 * shape.num_kv_heads, dtype=np.int64) * shape.num_pages
        queries = rows.offsets[group, None] + np.arange(lengths[0])  # [B, queries]
        positions = rows.starts[group, None] + np.arange(lengths[0])
        keys, last = np.arange(num_pages * shape.page_size), positions[:, :, None]
        visible = (keys <= last) & (keys >= self._layer.first_visible(last))  # [B, queries, C]
        return _Call(
            queries=torch.from_numpy(queries),
            gather=torch.from_numpy((heads[:, None, None] + pages).reshape(-1)),
            mask=torch.from_numpy(visible)[:, None],
        )


@dataclass(frozen=True, slots=True)
class _Call:
    queries: torch.Tensor  # [B, queries]
    gather: torch.Tensor  # rows of the cache seen as [2 * Hkv * P, page_size * D]
    mask: torch.Tensor  # [B, 1, queries, C] bool


@dataclass(frozen=True, slots=True)
class PlannedPlain:
    shape: CacheShape
    layer: LayerAttention
    calls: list[_Call]

    def run(self, q: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert (sinks is None) == (self.layer.sink is None), self.layer
        shape = self.shape
        out = torch.zeros_like(q)
        for call in self.calls:
            pages = cache.view(-1, shape.page_size * shape.head_dim).index_select(0, call.gather).to(q.dtype)
            both = pages.view(2, shape.num_kv_heads, call.queries.shape[0], -1, shape.head_dim)
            keys, values = both.transpose(1, 2)  # each [B, Hkv, C, D]
            queries, mask = q[call.queries].transpose(1, 2), call.mask  # [B, Hq, queries, D]
            if sinks is not None:
                keys, values, mask = _with_sinks(keys, values, mask, sinks)
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=self.layer.scale, enable_gqa=shape.group_size > 1
            )
            out[call.queries] = mixed.transpose(1, 2)
        return out


def _with_sinks(
    keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with one more key and value, of zeros, and a mask [B, Hq, queries, C + 1] that is added to scores."""
    added = torch.where(mask, 0.0, -torch.inf).expand(-1, len(sinks), -1, -1)
    of_sinks = sinks[:, None, None].expand(*added.shape[:3], 1)
    keys, values = (functional.pad(x, (0, 0, 0, 1)) for x in (keys, values))
    return keys, values, torch.cat((added, of_sinks), -1)
