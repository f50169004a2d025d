"""Building blocks of decoder families: a linear layer, norms, rotary attention, a gated MLP.

- Products that read the same rows are one product: q, k, v and gate, up are joined when weights are loaded.
- What computes is given at construction (`ops.kernels`), so a block knows nothing of padding or layouts.
- Where families differ a block is given another function; no block knows a family.

Shapes: N rows, H = hidden_size, Hq query heads, Hkv key/value heads, D = head_dim, I = intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from perdure.models.base import Attend, HeadNorm, ModelConfig, Turn, Weights
from perdure.ops.kernels import Kernels, Weight
from perdure.ops.linear import PackedProduct, Product
from perdure.ops.residual import ReadProduct, Stream

RowFunction = Callable[[Tensor], Tensor]
"""A function of rows, each row by itself."""


class Layer(Protocol):
    """One layer of a decoder: the residual stream [N, H] in, and out. rows: those of it that are wanted, [n, H] then;
    all take part as keys and values."""

    def __call__(self, stream: Stream, turn: Turn, attend: Attend, rows: Tensor | None = None) -> Stream: ...


def through(layers: Iterable[tuple[Layer, Turn]], stream: Stream, attend: Attend, rows: Tensor | None) -> Stream:
    """A stream through layers, each with its turn; of the last one only the rows that are wanted."""
    *others, (last, turn) = layers
    for layer, its_turn in others:
        stream = layer(stream, its_turn, attend)
    return last(stream, turn, attend, rows)


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


def reading(
    weights: Weights, norm_name: str, name: str, config: ModelConfig, kernels: Kernels, *, gated: bool = False
) -> ReadProduct:
    """The product `name` of the norm `norm_name` of a stream."""
    norm_weight = as_tensor(weights[f"{norm_name}.weight"])
    return kernels.reading(linear(weights, name, kernels), norm_weight, config.rms_norm_eps, gated=gated)


def norm_once(weights: Weights, name: str, eps: float, kernels: Kernels, added: float = 0.0) -> RowFunction:
    """The same rounded once at the end, and with weight + added in the weight's place."""
    stored = as_tensor(weights[f"{name}.weight"])
    weight = weights.derive(lambda: stored.float() + added)
    return lambda x: kernels.rms_norm_once(x, weight, eps)


def norm_of_heads(
    weights: Weights, name: str, config: ModelConfig, kernels: Kernels, *, once: bool = False, added: float = 0.0
) -> HeadNorm:
    """The norms of query heads and of key heads. once, added: as in `norm_once`."""
    q, k = as_tensor(weights[f"{name}.q_norm.weight"]), as_tensor(weights[f"{name}.k_norm.weight"])
    num_q, num_k = config.num_heads, config.num_kv_heads

    def joined() -> Tensor:
        weight = torch.cat((q.expand(num_q, -1), k.expand(num_k, -1)))
        return weight.float() + added if once else weight

    return HeadNorm(
        weights.derive(joined), config.rms_norm_eps, once, kernels.rms_norm_once if once else kernels.rms_norm
    )


def sinks_of(weights: Weights, layer: int, config: ModelConfig) -> Tensor | None:
    """A layer's attention sinks [Hq], fp32; None if it has none."""
    kind = config.attention[layer].sink
    if kind is None:
        return None
    if kind == "learnable":
        stored = as_tensor(weights[f"layers.{layer}.sinks"])
        return weights.derive(lambda: stored.to(torch.float32, copy=True))
    return torch.zeros(config.num_heads, device=as_tensor(weights["norm.weight"]).device)


def embedding_and_head(config: ModelConfig, weights: Weights, kernels: Kernels) -> tuple[RowFunction, Product]:
    """The look-up of token ids [N] and the product that gives logits. A tied head shares the weight."""
    weight = weights["embedding.weight"]
    if not config.tie_word_embeddings:
        return kernels.embedding(weight), linear(weights, "head", kernels)
    head = kernels.linear(weight, None)
    if isinstance(head, PackedProduct):
        weights.products["embedding.weight"] = head
    return kernels.embedding(weight), head


class RotaryHeads:
    """Grouped-query attention between its products; norms of heads, turning and attending over the past are
    `attend`'s.

    normalise: what is done to queries and keys [N, Hq + Hkv, D] before all that. head_norm: the norm of each head.
    sinks: of the layer (`sinks_of`).
    """

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        normalise: RowFunction | None = None,
        head_norm: HeadNorm | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._layer = layer
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._normalise = normalise
        self._head_norm = head_norm
        self._sinks = sinks

    def __call__(self, qkv: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """[N, (Hq + 2 * Hkv) * D] in, [N, Hq * D] out."""
        num_rows, num_heads, num_kv_heads = qkv.shape[0], self._num_heads, self._num_kv_heads
        heads = qkv.view(num_rows, num_heads + 2 * num_kv_heads, self._head_dim)
        qk, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if self._normalise is not None:
            qk = self._normalise(qk)
        if self._head_norm is not None or self._sinks is not None:
            turn = replace(turn, head_norm=self._head_norm, sinks=self._sinks)
        mixed = attend(self._layer, qk, v, turn)  # [N, Hq, D]
        return mixed.reshape(num_rows, num_heads * self._head_dim)


class RotaryAttention:
    """`RotaryHeads` with its products."""

    def __init__(self, weights: Weights, name: str, kernels: Kernels, heads: RotaryHeads) -> None:
        self._heads = heads
        self._qkv = linear(weights, f"{name}.qkv", kernels)
        self._output = linear(weights, f"{name}.o", kernels)

    def __call__(self, x: Tensor, turn: Turn, attend: Attend, rows: Tensor | None) -> Tensor:
        mixed = self._heads(self._qkv(x), turn, attend)
        return self._output(mixed if rows is None else mixed[rows])


class GatedMLP:
    """down(activation(gate(x)) * up(x)); `activate` does both, of [N, 2 * I]."""

    def __init__(self, weights: Weights, name: str, kernels: Kernels, activate: RowFunction) -> None:
        self._activate = activate
        self._gate_up = linear(weights, f"{name}.gate_up", kernels)
        self._down = linear(weights, f"{name}.down", kernels)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._gate_up(x)))
