"""Root-mean-square normalisation, row by row: a row's bits depend on that row alone.

Shapes: x [..., H], weight [H] or whatever broadcasts to x.
"""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), the quotient in fp32 and rounded to x's dtype before the weight."""
    return _normalised(x, eps).to(x.dtype) * weight


def rms_norm_once(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same, with the weight (fp32) multiplied in fp32 too and one rounding at the end."""
    return (_normalised(x, eps) * weight).to(x.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
