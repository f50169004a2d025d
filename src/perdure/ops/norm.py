"""Root-mean-square normalisation, row by row: a row's bits depend on that row alone.

Shapes: x [N, H], weight [H].
"""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), the quotient in fp32 and rounded to x's dtype before the weight."""
    wide = x.float()
    inverse = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * inverse).to(x.dtype) * weight
