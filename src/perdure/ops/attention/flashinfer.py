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

from perdure.ops.attention.base import AttentionRows, CacheShape, LayerAttention
from perdure.ops.attention.turned import TurnedFirst

HEAD_DIMS = (64, 128, 256)
WORKSPACE = 128 << 20
"""Bytes, as FlashInfer advises."""


def why_not(shape: CacheShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why these kernels do not serve here; None = they do."""
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if kv_dtype != dtype:
        return f"it reads pages in the model's type, not in {str(kv_dtype).removeprefix('torch.')}"
    if shape.head_dim not in HEAD_DIMS:
        return f"it has heads of {', '.join(map(str, HEAD_DIMS))}, not of {shape.head_dim}"
    return None


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
            self._parts.append((self._decode, self._index(rows.offsets[ones])))
        if len(prompts := np.flatnonzero(lengths > 1)):
            offsets = _cumulated(lengths[prompts])
            self._prompts.plan(offsets, *self._pages(rows, prompts), *sizes, causal=True, **self._kind)
            queries = [np.arange(rows.offsets[row], rows.offsets[row + 1]) for row in prompts]
            self._parts.append((self._prompts, self._index(np.concatenate(queries))))

    def run(self, q: Tensor, cache: Tensor, rows: object) -> Tensor:
        """As in `PagedAttention`; which rows there are was said to `plan`."""
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
        return _cumulated(counts), torch.from_numpy(pages.astype(np.int32)), torch.from_numpy(last.astype(np.int32))

    def _index(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _cumulated(counts: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
