"""Building blocks of decoder families: a linear layer, norms, rotary attention, a gated MLP.

- Products that read the same rows are one product: q, k, v and gate, up are joined when weights are loaded.
- What computes is given at construction (`ops.kernels`), so a block knows nothing of padding or layouts.
- Where families differ a block is given another function; no block knows a family.

Shapes: N rows, H = hidden_size, Hq query heads, Hkv key/value heads, D = head_dim, I = intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perdure.models.base import Attend, ModelConfig, Turn, Weights
from perdure.ops.kernels import Kernels, Weight
from perdure.ops.linear import PackedProduct, Product

RowFunction = Callable[[Tensor], Tensor]
"""A function of rows, each row by itself."""

Layer = Callable[[Tensor, Turn, Attend], Tensor]
"""One layer of a decoder: x [N, H] in, x [N, H] out."""


def linear(weights: Weights, name: str, kernels: Kernels) -> Product:
    """The product with a weight [M, K] and perhaps a bias [M]."""
    bias = weights.get(f"{name}.bias")
    product = kernels.linear(weights[f"{name}.weight"], None if bias is None else as_tensor(bias))
    if isinstance(product, PackedProduct):
        del weights[f"{name}.weight"]
        weights.products[f"{name}.weight"] = product
    return product


def as_tensor(weight: Weight) -> Tensor:
    """A weight that is no product's."""
    assert isinstance(weight, Tensor), "only the weights of products are packed"
    return weight


def norm(weights: Weights, name: str, eps: float, kernels: Kernels) -> RowFunction:
    """A root-mean-square norm with a weight [H]."""
    weight = as_tensor(weights[f"{name}.weight"])
    return lambda x: kernels.rms_norm(x, weight, eps)


def add_norm(
    weights: Weights, name: str, eps: float, kernels: Kernels
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A sum and the norm of it."""
    weight = as_tensor(weights[f"{name}.weight"])
    return lambda x, y: kernels.add_norm(x, y, weight, eps)


def norm_once(weights: Weights, name: str, eps: float, kernels: Kernels, added: float = 0.0) -> RowFunction:
    """The same rounded once at the end, and with weight + added in the weight's place."""
    stored = as_tensor(weights[f"{name}.weight"])
    weight = weights.derive(lambda: stored.float() + added)
    return lambda x: kernels.rms_norm_once(x, weight, eps)


def weights_of_heads(
    weights: Weights, name: str, config: ModelConfig, change: Callable[[Tensor], Tensor] = lambda w: w
) -> Tensor:
    """The weights of a norm of query heads and of one of key heads, laid out for all heads at once: [Hq + Hkv, D].

    change: what is done to them first.
    """
    q, k = as_tensor(weights[f"{name}.q_norm.weight"]), as_tensor(weights[f"{name}.k_norm.weight"])
    num_q, num_k = config.num_heads, config.num_kv_heads
    return weights.derive(lambda: change(torch.cat((q.expand(num_q, -1), k.expand(num_k, -1)))))


def embedding_and_head(config: ModelConfig, weights: Weights, kernels: Kernels) -> tuple[RowFunction, Product]:
    """The look-up of token ids [N] and the product that gives logits. A tied head shares the weight."""
    weight = weights["embedding.weight"]
    if not config.tie_word_embeddings:
        return kernels.embedding(weight), linear(weights, "head", kernels)
    head = kernels.linear(weight, None)
    if isinstance(head, PackedProduct):
        weights.products["embedding.weight"] = head
    return kernels.embedding(weight), head


class RotaryAttention:
    """Grouped-query attention with rotary positions; turning and attending over the past is `attend`'s.

    normalise: what is done to queries and keys [N, Hq + Hkv, D] before they turn; None = nothing.
    """

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        weights: Weights,
        name: str,
        kernels: Kernels,
        normalise: RowFunction | None = None,
    ) -> None:
        self._layer = layer
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._normalise = normalise
        self._qkv = linear(weights, f"{name}.qkv", kernels)
        self._output = linear(weights, f"{name}.o", kernels)

    def __call__(self, x: Tensor, turn: Turn, attend: Attend) -> Tensor:
        num_rows, num_heads, num_kv_heads = x.shape[0], self._num_heads, self._num_kv_heads
        qkv = self._qkv(x).view(num_rows, num_heads + 2 * num_kv_heads, self._head_dim)
        qk, v = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        if self._normalise is not None:
            qk = self._normalise(qk)
        mixed = attend(self._layer, qk, v, turn)  # [N, Hq, D]
        return self._output(mixed.reshape(num_rows, num_heads * self._head_dim))


class GatedMLP:
    """down(activation(gate(x)) * up(x)); `activate` does both, of [N, 2 * I]. None: silu."""

    def __init__(self, weights: Weights, name: str, kernels: Kernels, activate: RowFunction | None = None) -> None:
        self._activate = activate or kernels.silu_mul
        self._gate_up = linear(weights, f"{name}.gate_up", kernels)
        self._down = linear(weights, f"{name}.down", kernels)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._gate_up(x)))
