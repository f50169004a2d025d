"""What these tests share."""

from __future__ import annotations

import torch

from perdure.ops.attention import LayerAttention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative error of a function of a few sums, by the type it computes in."""


class Random:
    """Tensors without a pattern, the same for the same order of calls."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device, dtype)

    def order(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self._generator)


def sinks_of(layer: LayerAttention, num_heads: int, random: Random) -> torch.Tensor | None:
    """Of a size that matters, if there are any."""
    return None if layer.sink is None else 2.0 * random(num_heads) * (layer.sink == "learnable")


def check_close(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    """right may be of a wider type. NaN never passes."""
    error = (found.double() - right.double()).norm() / right.double().norm()
    assert error <= TOLERANCE[dtype], f"relative error {error:.1e}"
