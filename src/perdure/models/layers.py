"""Building blocks of decoder families: a linear layer, rotary attention, a gated MLP.

- Products that read the same rows are one product: q, k, v and gate, up are joined when weights are loaded.
- The form of a product is a function given at construction, so a block knows nothing of padding or kernels.

Shapes: N rows, H = hidden_size, Hq query heads, Hkv key/value heads, D = head_dim, I = intermediate_size.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from perdure.models.base import Attend, ModelConfig
from perdure.ops.activation import silu_mul
from perdure.ops.linear import LinearForm
from perdure.ops.rope import rotate

Weights = Mapping[str, Tensor]


class Linear:
    """A weight [M, K], perhaps a bias [M], and the form of their product."""

    def __init__(self, weights: Weights, name: str, form: LinearForm) -> None:
        self.weight = weights[f"{name}.weight"]
        self.bias = weights.get(f"{name}.bias")
        self._form = form

    def __call__(self, x: Tensor) -> Tensor:
        return self._form(x, self.weight, self.bias)


class RotaryAttention:
    """Grouped-query attention with rotary positions; the attention over the past itself is `attend`."""

    def __init__(self, layer: int, config: ModelConfig, weights: Weights, name: str, form: LinearForm) -> None:
        self._layer = layer
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._qkv = Linear(weights, f"{name}.qkv", form)
        self._output = Linear(weights, f"{name}.o", form)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        num_rows, num_heads, num_kv_heads = x.shape[0], self._num_heads, self._num_kv_heads
        qkv = self._qkv(x).view(num_rows, num_heads + 2 * num_kv_heads, self._head_dim)
        qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        q, k = rotate(qk, cos, sin).split((num_heads, num_kv_heads), dim=1)
        mixed = attend(self._layer, q, k, v)  # [N, Hq, D]
        return self._output(mixed.reshape(num_rows, num_heads * self._head_dim))


class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: Weights, name: str, form: LinearForm) -> None:
        self._gate_up = Linear(weights, f"{name}.gate_up", form)
        self._down = Linear(weights, f"{name}.down", form)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(silu_mul(self._gate_up(x)))
