"""What forms by libraries share (`flashinfer`, `flash_attention`): where they serve, and how rows are said to them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.ops.attention.base import AttentionRows, CacheShape, LayerAttention

HEAD_DIMS = (64, 128, 256)


def why_not(shape: CacheShape, layer: LayerAttention, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why such kernels do not serve for this; None = they do."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if kv_dtype != dtype:
        return f"it reads pages in the model's type, not in {str(kv_dtype).removeprefix('torch.')}"
    if shape.head_dim not in HEAD_DIMS:
        return f"it has heads of {', '.join(map(str, HEAD_DIMS))}, not of {shape.head_dim}"
    if layer.sink is not None:
        return "it is run without sinks"
    return None


def queries_of(rows: AttentionRows, some: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the queries of some rows are packed."""
    return np.concatenate([np.arange(rows.offsets[row], rows.offsets[row + 1]) for row in some])


def cumulated(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Where each of them begins, and the last ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
