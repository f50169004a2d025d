"""Activations, element by element: an element's bits depend on its own inputs, not on where it lies.

Why not torch's silu, gelu and tanh: on a CPU its vector lanes and the scalars at the end of a thread's share use two
different exponentials, so bits change with the number of rows. `exp` has one form for both, and the rest is rounded
exactly.

Shapes: gate_up [N, 2 * I], gates first; result [N, I].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with silu(g) = g / (1 + exp(-g)) in fp32 and rounded to the input's dtype before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    denominator = wide.neg().exp_().add_(1.0)
    silu = torch.div(wide, denominator, out=denominator)
    return silu.to(gate_up.dtype).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of gelu, in fp32 and rounded to the input's dtype before the product.

    g * (1 + tanh(u)) / 2 is g / (1 + exp(-2 u)), where u = sqrt(2 / pi) * (g + 0.044715 * g^3).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    cubic = wide.square().mul_(0.044715).add_(1.0).mul_(wide)
    denominator = cubic.mul_(-2 * math.sqrt(2 / math.pi)).exp_().add_(1.0)
    gelu = torch.div(wide, denominator, out=denominator)
    return gelu.to(gate_up.dtype).mul_(up)


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) in place of x (fp32), to within a few units in the last place of cap.

    tanh(y) is 1 - 2 / (exp(2 y) + 1).
    """
    return x.mul_(2 / cap).exp_().add_(1.0).reciprocal_().mul_(-2 * cap).add_(cap)
