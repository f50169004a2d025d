"""FlashAttention-4's kernels (package flash-attn-4) over our pages: rows are said to it on the host once a step, and it
runs twice a layer, for rows of one query and for prompts.

- It is compiled by its own compiler when it is first used, a few seconds a kind.
- What lies past a row's end in its last page is read and masked, so it must be finite: pages are cleared before use.
- Sequences of queries are as long as a step has them, so no graph holds it, and steps run as they are.

Shapes: as in `base`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perdure.ops.attention import libraries
from perdure.ops.attention.base import AttentionRows, CacheShape, LayerAttention
from perdure.ops.attention.libraries import cumulated, queries_of
from perdure.ops.attention.turned import TurnedFirst
from perdure.ops.transfer import sent

LEAST_CAPABILITY = 9  # of a GPU: what has no wgmma takes another form, that has no pages


def is_installed() -> bool:
    """`flash_attn` alone may be another package, of another version."""
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def why_not(
    shape: CacheShape, layer: LayerAttention, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why these kernels do not serve here; None = they do."""
    if not is_installed():
        return "the package flash-attn-4 is not installed"
    if reason := libraries.why_not(shape, layer, dtype, kv_dtype):
        return reason
    capability = torch.cuda.get_device_capability(device)[0]
    if capability < LEAST_CAPABILITY:
        return f"it needs a GPU of compute capability {LEAST_CAPABILITY}, not of {capability}"
    return None


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a step, all int32 but for the first. index [n]: where their queries are packed. ends [r + 1]: their
    numbers of queries, cumulated, of which one row has most. known [r]: positions with a key. pages [r, W]."""

    index: Tensor
    ends: Tensor
    most: int
    known: Tensor
    pages: Tensor


class FlashAttentionPaged(TurnedFirst):
    """See the module's docstring (`paged.PagedAttention`)."""

    name = kernel = "fa4"
    block_size = 128
    is_planned = True

    def __init__(self, shape: CacheShape, layer: LayerAttention, device: torch.device) -> None:
        from flash_attn.cute.interface import flash_attn_varlen_func

        self._page_size = shape.page_size
        self._device = device
        self._attend = partial(
            flash_attn_varlen_func,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(None, None) if layer.window is None else (layer.window - 1, 0),
            softcap=layer.softcap or 0.0,
        )
        self._parts: list[_Part] = []

    def plan(self, rows: AttentionRows) -> None:
        """What the layers of this step are run with."""
        lengths = np.diff(rows.offsets)
        parts = np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)
        self._parts = [self._part(rows, some, lengths[some]) for some in parts if len(some)]

    def run(self, q: Tensor, cache: Tensor, rows: object, sinks: Tensor | None = None) -> Tensor:
        """As in `PagedAttention`; which rows there are was said to `plan`."""
        assert sinks is None
        keys, values = (plane.permute(1, 2, 0, 3) for plane in cache)  # [P, page_size, Hkv, D]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts:
            found, _ = self._attend(
                q[part.index], keys, values, cu_seqlens_q=part.ends, max_seqlen_q=part.most, seqused_k=part.known,
                page_table=part.pages,
            )  # fmt: skip
            out[part.index] = found
        return out

    def _part(self, rows: AttentionRows, some: NDArray[np.int64], lengths: NDArray[np.int64]) -> _Part:
        known = rows.starts[some] + lengths
        width = -(-int(known.max()) // self._page_size)
        return _Part(
            sent(queries_of(rows, some), self._device),
            sent(cumulated(lengths), self._device),
            int(lengths.max()),
            sent(known.astype(np.int32), self._device),
            sent(rows.block_table[some, :width].astype(np.int32), self._device),
        )
