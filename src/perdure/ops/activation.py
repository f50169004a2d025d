"""Gated activations, element by element: an element's bits depend on its own inputs, not on where it lies.

Why not `functional.silu`: on a CPU its vector lanes and the scalars at the end of a thread's share use two different
exponentials, so bits change with the number of rows. `exp` has one form for both, and the rest is rounded exactly.

Shapes: gate_up [N, 2 * I], gates first; result [N, I].
"""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with silu(g) = g / (1 + exp(-g)) in fp32 and rounded to the input's dtype before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    denominator = wide.neg().exp_().add_(1.0)
    silu = torch.div(wide, denominator, out=denominator)
    return silu.to(gate_up.dtype).mul_(up)
