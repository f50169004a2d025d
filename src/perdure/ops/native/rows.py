"""Norms, activations and rotation by the kernels. Shapes and meaning are those of `ops.norm`, `ops.activation` and
`ops.rope`."""

from __future__ import annotations

import torch
from torch import Tensor

from perdure.ops.native.build import Library


class RowKernels:
    """The functions of rows of one library."""

    def __init__(self, library: Library) -> None:
        self._c = library.c

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [N, H] with weight [H], or x [N, heads, D] with weight [heads, D] or [D]."""
        heads = 1 if x.dim() == 2 else x.shape[1]
        x = dense_rows(x)
        y = x.new_empty(x.shape)
        self._c.rms_norm(
            x.data_ptr(),
            x.shape[0],
            x.stride(0),
            heads,
            x.shape[-1],
            weight.data_ptr(),
            weight.dim() == 1,
            eps,
            y.data_ptr(),
        )
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, gelu=False)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, gelu=True)

    def _gate(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        gate_up = dense_rows(gate_up)
        num_rows, width = gate_up.shape
        y = gate_up.new_empty(num_rows, width // 2)
        self._c.gate(gate_up.data_ptr(), num_rows, gate_up.stride(0), width // 2, gelu, y.data_ptr())
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = dense_rows(x)
        num_rows, heads, dim = x.shape
        y = x.new_empty(x.shape)
        turning = cos.shape[-1]
        self._c.rotate(
            x.data_ptr(), num_rows, x.stride(0), heads, dim, cos.data_ptr(), sin.data_ptr(), turning, y.data_ptr()
        )
        return y


def dense_rows(x: Tensor) -> Tensor:
    """x with every row in one piece; rows may lie apart."""
    assert x.dtype == torch.float32 and x.dim() in (2, 3), (x.dtype, x.shape)
    dense = x.stride(-1) == 1 and (x.dim() == 2 or x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if dense else x.contiguous()
