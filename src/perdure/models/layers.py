"""Building blocks of decoder families: a linear layer, rotary attention, a gated MLP.

- Products that read the same rows are one product: q, k, v and gate, up are joined when weights are loaded.
- The form of a product is a function given at construction, so a block knows nothing of padding or kernels.

Shapes: N rows, H = hidden_size, Hq query heads, Hkv key/value heads, D = head_dim, I = intermediate_size.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor

from perdure.models.base import Attend, ModelConfig
from perdure.ops.activation import silu_mul
from perdure.ops.linear import LinearForm, Product
from perdure.ops.rope import rotate

Weights = MutableMapping[str, Tensor]
"""A model's weights by name. Building a model takes them out one by one, so that a form may lay each out anew without
two copies of all of them."""


def linear(weights: Weights, name: str, form: LinearForm) -> Product:
    """The product with a weight [M, K] and perhaps a bias [M]. The form owns them from here on."""
    return form(weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None))


class RotaryAttention:
    """Grouped-query attention with rotary positions; the attention over the past itself is `attend`."""

    def __init__(self, layer: int, config: ModelConfig, weights: Weights, name: str, form: LinearForm) -> None:
        self._layer = layer
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._qkv = linear(weights, f"{name}.qkv", form)
        self._output = linear(weights, f"{name}.o", form)

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
        self._gate_up = linear(weights, f"{name}.gate_up", form)
        self._down = linear(weights, f"{name}.down", form)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(silu_mul(self._gate_up(x)))
