"""Building blocks of decoder families: a linear layer, norms, rotary attention, a gated MLP.

- Products that read the same rows are one product: q, k, v and gate, up are joined when weights are loaded.
- The form of a product is a function given at construction, so a block knows nothing of padding or kernels.
- Where families differ a block is given another function; no block knows a family.

Shapes: N rows, H = hidden_size, Hq query heads, Hkv key/value heads, D = head_dim, I = intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perdure.models.base import Attend, ModelConfig, Weights
from perdure.ops.activation import silu_mul
from perdure.ops.linear import LinearForm, Product
from perdure.ops.norm import rms_norm, rms_norm_once
from perdure.ops.rope import rotate

RowFunction = Callable[[Tensor], Tensor]
"""A function of rows, each row by itself."""

Turn = tuple[Tensor, Tensor]
"""A step's cos and signed sin (`ops.rope.rotations`)."""

Layer = Callable[[Tensor, Turn, Attend], Tensor]
"""One layer of a decoder: x [N, H] in, x [N, H] out."""


def linear(weights: Weights, name: str, form: LinearForm) -> Product:
    """The product with a weight [M, K] and perhaps a bias [M]. The form owns them from here on."""
    return form(weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None))


def norm(weights: Weights, name: str, eps: float) -> RowFunction:
    """A root-mean-square norm with a weight [H]."""
    weight = weights[f"{name}.weight"]
    return lambda x: rms_norm(x, weight, eps)


def norm_once(weights: Weights, name: str, eps: float, added: float = 0.0) -> RowFunction:
    """The same rounded once at the end, and with weight + added in the weight's place."""
    weight = weights[f"{name}.weight"].float() + added
    return lambda x: rms_norm_once(x, weight, eps)


def weights_of_heads(weights: Weights, name: str, config: ModelConfig) -> Tensor:
    """The weights of a norm of query heads and of one of key heads, laid out for all heads at once: [Hq + Hkv, D]."""
    q, k = weights[f"{name}.q_norm.weight"], weights[f"{name}.k_norm.weight"]
    return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))


class RotaryAttention:
    """Grouped-query attention with rotary positions; the attention over the past itself is `attend`.

    normalise: what is done to queries and keys [N, Hq + Hkv, D] before they turn; None = nothing.
    """

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        weights: Weights,
        name: str,
        form: LinearForm,
        normalise: RowFunction | None = None,
    ) -> None:
        self._layer = layer
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._normalise = normalise
        self._qkv = linear(weights, f"{name}.qkv", form)
        self._output = linear(weights, f"{name}.o", form)

    def __call__(self, x: Tensor, turn: Turn, attend: Attend) -> Tensor:
        num_rows, num_heads, num_kv_heads = x.shape[0], self._num_heads, self._num_kv_heads
        qkv = self._qkv(x).view(num_rows, num_heads + 2 * num_kv_heads, self._head_dim)
        qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if self._normalise is not None:
            qk = self._normalise(qk)
        q, k = rotate(qk, *turn).split((num_heads, num_kv_heads), dim=1)
        mixed = attend(self._layer, q, k, v)  # [N, Hq, D]
        return self._output(mixed.reshape(num_rows, num_heads * self._head_dim))


class GatedMLP:
    """down(activation(gate(x)) * up(x)); `activate` does both, of [N, 2 * I]."""

    def __init__(self, weights: Weights, name: str, form: LinearForm, activate: RowFunction = silu_mul) -> None:
        self._activate = activate
        self._gate_up = linear(weights, f"{name}.gate_up", form)
        self._down = linear(weights, f"{name}.down", form)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._gate_up(x)))
