"""The slow obvious form of attention: the oracle of the others.

- One query position at a time: gather its keys and values, softmax in float64, weighted sum.
- Not for serving, and not bit-equal to any other form.

Shapes: as in `base`; n = position + 1 keys of one query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perdure.ops.attention.base import AttentionRows, CacheShape


class ReferenceAttention:
    """See the module's docstring."""

    name = "reference"
    batch_invariant = True

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape

    def plan(self, rows: AttentionRows) -> PlannedReference:
        return PlannedReference(self._shape, rows)


@dataclass(frozen=True, slots=True)
class PlannedReference:
    shape: CacheShape
    rows: AttentionRows

    def run(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q)
        for row, start in enumerate(self.rows.starts.tolist()):
            first, last = self.rows.offsets[row : row + 2].tolist()
            table = torch.from_numpy(self.rows.block_table[row])
            for query in range(first, last):
                out[query] = self._attend(q[query], cache, table, start + query - first)
        return out

    def _attend(self, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, position: int) -> torch.Tensor:
        """One query q [Hq, D] at an absolute position; returns [Hq, D]."""
        at = torch.arange(position + 1)
        pages, inside = table[at // self.shape.page_size], at % self.shape.page_size
        keys, values = cache[:, :, pages, inside].double()  # each [Hkv, n, D]
        grouped = q.double().view(self.shape.num_kv_heads, self.shape.group_size, self.shape.head_dim)
        scores = torch.einsum("hgd,hnd->hgn", grouped, keys) / self.shape.head_dim**0.5
        mixed = torch.einsum("hgn,hnd->hgd", torch.softmax(scores, -1), values)
        return mixed.reshape(self.shape.num_heads, self.shape.head_dim).to(q.dtype)
