"""What an attention form is: planned once a step on the host, run once a layer on the device.

- `AttentionRows` says where each row's queries lie in the packed batch, where they stand and which pages hold its keys.
- A form plans a step (index tensors, masks) and the plan is run for each layer with that layer's cache.
- A form serves layers of one kind (`LayerAttention`); a model with several kinds takes a form for each.
- Forms differ in speed and in bits, never in meaning: each is causal softmax(cap(scale * q k^T)) v per query position,
  over the positions its window leaves.
- A layer may have attention sinks: its softmax has one more column, which no key and no value belong to. Where its
  head has the sink s, in natural units and not capped, weights are exp(x_i - m) / (sum_j exp(x_j - m) + exp(s - m)):
  what a query does not want to spend on anybody goes there (Xiao et al. 2023, StreamingLLM). s = 0 is Miller's softmax
  that is off by one; gpt-oss learns s (eager attention in transformers).

Shapes: N packed queries, R rows, Hq query heads, Hkv key heads, G = Hq / Hkv, D head size, P pages of `page_size`.
A layer's cache is one tensor [2, Hkv, P, page_size, D]: keys, then values; in the type of the queries, or of 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes that stay for the life of the pool."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)

    @property
    def group_size(self) -> int:
        """G: query heads that share one key head."""
        return self.num_heads // self.num_kv_heads


Sink = Literal["off-by-one", "learnable"]
"""0 for all heads, or a weight of the layer. What computes is given numbers either way."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What a layer's attention is, beyond its sizes.

    scale: factor of the products q k^T.
    window: a query sees itself and the window - 1 positions before it; None = all before it.
    softcap: scaled products x become softcap * tanh(x / softcap); None = they stay.
    sink: what its sinks are; None = there are none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sink: Sink | None = None

    def first_visible(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position that a query at each of these sees."""
        return np.zeros_like(position) if self.window is None else np.maximum(position - self.window + 1, 0)


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """A step's rows. Row r computes absolute positions starts[r] .. starts[r] + offsets[r + 1] - offsets[r] - 1.

    offsets [R + 1]: row r's queries are packed at offsets[r] : offsets[r + 1]; every row has at least one.
    starts [R]: absolute position of the row's first query.
    block_table [R, W]: page of each `page_size` positions; entries past the row's last position are never followed.
    """

    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    block_table: NDArray[np.int64]


class PlannedAttention(Protocol):
    """One step's attention, the same for each layer of a kind."""

    def run(self, q: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attend q [N, Hq, D] over a layer's cache [2, Hkv, P, page_size, D], which already holds this step's keys.
        sinks [Hq] (fp32): the layer's; None if its kind has none.

        Returns [N, Hq, D]. Queries that belong to no row (padding at the end) give zeros. The result may live in
        memory the form uses again at its next run.
        """
        ...


class AttentionForm(Protocol):
    """A way to compute attention. `batch_invariant`: a query's bits depend on nothing but its keys and position.

    kernel: the form in words, with everything of its settings that its bits depend on.
    """

    name: str
    kernel: str
    batch_invariant: bool

    def plan(self, rows: AttentionRows) -> PlannedAttention: ...
