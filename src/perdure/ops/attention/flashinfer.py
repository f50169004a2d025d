"""FlashInfer's paged kernels (its "fa2" form) over our pages: planned on the host once a step, run once a layer.

- Its plan is of one step's rows, so no graph holds it, and steps run as they are.
- What splits it makes depends on the step's rows, so a row's bits depend on its company.

Shapes: as in `base`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perdure.ops.attention import libraries
from perdure.ops.attention.base import AttentionRows, CacheShape, LayerAttention
from perdure.ops.attention.libraries import cumulated, queries_of
from perdure.ops.attention.turned import TurnedFirst
from perdure.ops.transfer import sent

WORKSPACE = 128 << 20
"""Bytes, as FlashInfer advises."""


def why_not(shape: CacheShape, layer: LayerAttention, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why these kernels do not serve here; None = they do."""
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    return libraries.why_not(shape, layer, dtype, kv_dtype)


class FlashInferPaged(TurnedFirst):
    """See the module's docstring (`paged.PagedAttention`)."""

    name = kernel = "flashinfer"
    block_size = 128
    is_planned = True

    def __init__(self, shape: CacheShape, layer: LayerAttention, dtype: torch.dtype, device: torch.device) -> None:
        import flashinfer

        self._shape = shape
        self._device = device
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True, backend="fa2"
        )
        self._prompts = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
        self._kind: dict[str, Any] = {
            "sm_scale": layer.scale,
            "window_left": -1 if layer.window is None else layer.window - 1,
            "logits_soft_cap": layer.softcap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self._parts: list[tuple[Any, Tensor]] = []

    def plan(self, rows: AttentionRows) -> None:
        """What the layers of this step are run with."""
        lengths = np.diff(rows.offsets)
        sizes = (self._shape.num_heads, self._shape.num_kv_heads, self._shape.head_dim, self._shape.page_size)
        self._parts = []
        if len(ones := np.flatnonzero(lengths == 1)):
            self._decode.plan(*self._pages(rows, ones), *sizes, **self._kind)
            self._parts.append((self._decode, sent(rows.offsets[ones], self._device)))
        if len(prompts := np.flatnonzero(lengths > 1)):
            offsets = torch.from_numpy(cumulated(lengths[prompts]))
            self._prompts.plan(offsets, *self._pages(rows, prompts), *sizes, causal=True, **self._kind)
            self._parts.append((self._prompts, sent(queries_of(rows, prompts), self._device)))

    def run(self, q: Tensor, cache: Tensor, rows: object, sinks: Tensor | None = None) -> Tensor:
        """As in `PagedAttention`; which rows there are was said to `plan`."""
        assert sinks is None
        pages = tuple(plane.transpose(0, 1) for plane in cache)  # [P, Hkv, page_size, D]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for wrapper, index in self._parts:
            out[index] = wrapper.run(q[index], pages)
        return out

    def _pages(self, rows: AttentionRows, some: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Where each row's pages begin in the list of them all, that list, and how full each last page is."""
        known = rows.starts[some] + np.diff(rows.offsets)[some]
        counts = -(-known // self._shape.page_size)
        pages = np.concatenate([rows.block_table[row, :count] for row, count in zip(some, counts, strict=True)])
        last = known - (counts - 1) * self._shape.page_size
        begins, every, fill = map(torch.from_numpy, (cumulated(counts), pages.astype(np.int32), last.astype(np.int32)))
        return begins, every, fill
