"""The slow obvious form of attention: the oracle of the others.

- One query position at a time: gather its keys and values, softmax in float64, weighted sum.
- Not for serving, and not bit-equal to any other form.

Shapes: as in `base`; n keys that one query sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perdure.ops.attention.base import AttentionRows, CacheShape, LayerAttention


class ReferenceAttention:
    """See the module's docstring."""

    name = kernel = "reference"
    batch_invariant = True

    def __init__(self, shape: CacheShape, layer: LayerAttention) -> None:
        self._shape = shape
        self._layer = layer

    def plan(self, rows: AttentionRows) -> PlannedReference:
        return PlannedReference(self._shape, self._layer, rows)


@dataclass(frozen=True, slots=True)
class PlannedReference:
    shape: CacheShape
    layer: LayerAttention
    rows: AttentionRows

    def run(self, q: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert (sinks is None) == (self.layer.sink is None), self.layer
        out = torch.zeros_like(q)
        for row, start in enumerate(self.rows.starts.tolist()):
            first, last = self.rows.offsets[row : row + 2].tolist()
            table = torch.from_numpy(self.rows.block_table[row]).to(q.device)
            for query in range(first, last):
                out[query] = self._attend(q[query], cache, table, start + query - first, sinks)
        return out

    def _attend(
        self, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, position: int, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """One query q [Hq, D] at an absolute position; returns [Hq, D]."""
        window = position + 1 if self.layer.window is None else self.layer.window
        at = torch.arange(max(0, position + 1 - window), position + 1, device=q.device)
        pages, inside = table[at // self.shape.page_size], at % self.shape.page_size
        keys, values = cache[:, :, pages, inside].double()  # each [Hkv, n, D]
        grouped = q.double().view(self.shape.num_kv_heads, self.shape.group_size, self.shape.head_dim)
        scores = torch.einsum("hgd,hnd->hgn", grouped, keys) * self.layer.scale
        if self.layer.softcap is not None:
            scores = torch.tanh(scores / self.layer.softcap) * self.layer.softcap
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(*grouped.shape[:2], 1)), -1)
        weights = torch.softmax(scores, -1)[..., : len(at)]
        mixed = torch.einsum("hgn,hnd->hgd", weights, values)
        return mixed.reshape(self.shape.num_heads, self.shape.head_dim).to(q.dtype)
