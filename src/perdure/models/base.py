"""What a model family is to the rest: a configuration, a forward pass over packed rows, a head, a table of weights.

- `Family` is everything that differs from family to family: one value a file, listed in `registry`.
- A model computes on one device and knows neither requests nor pages: attention over the past is given to it.
- It is a plain object holding tensors; nothing here trains.
- Rows of a step are packed: row i is one token of some request at absolute position positions[i].

Shapes: N rows, H = hidden_size, Hq query heads, Hkv key/value heads, D = head_dim, V = vocab_size (logits' width).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from perdure.models.fields import Fields
from perdure.models.float8 import StoredFloat8
from perdure.ops.attention import LayerAttention
from perdure.ops.kernels import Kernels, Weight
from perdure.ops.linear import PackedProduct
from perdure.ops.rope import Turning


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's shape, as its files state it. A family that needs more makes a subclass of its own.

    rotary_dim: elements of a head that turn with position. attention: one entry a layer.
    vocab_size: rows of the head, which may be more than the tokenizer has ids.
    rope_scaling: None, or `rope_type` and its numbers (`ops.rope.inverse_frequencies`).
    eos_token_ids: every id the files name as an end, ascending; empty when they name none.
    dtype: what the files store (float32 for a GGUF, whatever its blocks); what is computed in is chosen at load.
    float8: of files that store weights in 8 bits.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    attention: tuple[LayerAttention, ...]
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    float8: StoredFloat8 | None = field(default=None, kw_only=True)

    def with_windows(self, windows: Iterable[int | None]) -> ModelConfig:
        """The same with each layer's window."""
        kinds = zip(self.attention, windows, strict=True)
        return replace(self, attention=tuple(replace(kind, window=window) for kind, window in kinds))


class Weights(dict[str, Weight]):
    """A model's weights by name. Building a model takes out what it lays out anew, one by one, so that there are never
    two copies of all of them; it notes what it makes of weights, so that others can be written in their place.

    products: those that laid a weight out anew, by its name. derived: tensors computed from weights, and how.
    """

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        super().__init__(weights)
        self.products: dict[str, PackedProduct] = {}
        self.derived: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def derive(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor computed from weights, which will be computed anew, in place, when they change."""
        tensor = make()
        self.derived.append((tensor, make))
        return tensor


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The root-mean-square norm of each query and key head by itself. weight [Hq + Hkv, D]. once: rounded at the end
    alone. apply: `ops.norm.rms_norm`, or its form of one rounding."""

    weight: Tensor
    eps: float
    once: bool
    apply: Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, slots=True)
class Turn:
    """How a step's rows turn with their positions: cos and signed sin (`ops.rope.rotations`), what turns by them.
    head_norm: done to queries and keys before. sinks [Hq] (fp32): of the layer that attends with what has turned."""

    cos: Tensor
    sin: Tensor
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    head_norm: HeadNorm | None = None
    sinks: Tensor | None = None

    @property
    def turning(self) -> Turning:
        """The same for a kernel that does more."""
        norm = self.head_norm
        return Turning(self.cos, self.sin, *(() if norm is None else (norm.weight, norm.eps, norm.once)))

    def __call__(self, qk: Tensor) -> Tensor:
        """Heads [N, Hq + Hkv, D], normalised and turned."""
        if self.head_norm is not None:
            qk = self.head_norm.apply(qk, self.head_norm.weight, self.head_norm.eps)
        return self.rotate(qk, self.cos, self.sin)


class Attend(Protocol):
    """Attention of one layer, given by whoever owns the KV memory.

    Turns queries and keys qk [N, Hq + Hkv, D] (`Turn`), stores the keys and v [N, Hkv, D] of these rows, then returns
    for each row its causal attention [N, Hq, D] over what is stored for its request up to its own position, as
    `config.attention[layer]` says (window, scale, soft cap, sinks). The inputs may be strided views.
    """

    def __call__(self, layer: int, qk: Tensor, v: Tensor, turn: Turn) -> Tensor: ...


class Model(Protocol):
    """One built model with its weights."""

    config: ModelConfig

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Hidden states [N, H] after the final norm, ready for the head. token_ids and positions are int64 [N].

        rows: int64 [n], those whose hidden states are wanted, [n, H] then; None = all. Of the others the last layer
        computes keys and values alone.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of the rows of hidden [n, H], in fp32 or a narrower type, of which fp32 holds each value."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor as stored: its name in each format, and its shape.

    rotary_heads: the rows are those of so many heads that turn with position. GGUF stores such heads with their two
    halves interleaved for some families, and the loader takes them apart. 0 = an ordinary tensor.
    gguf_added: what GGUF stores is the value plus this.
    """

    hf: str
    gguf: str
    shape: tuple[int, ...]
    rotary_heads: int = 0
    gguf_added: float = 0.0


Parts = tuple[Part, ...]
"""The stored tensors that, joined along their rows, make one weight of the model."""


def joined_shape(parts: Parts) -> tuple[int, ...]:
    """The shape of the weight the parts make."""
    assert len({part.shape[1:] for part in parts}) == 1, "joined parts have rows of one width"
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


PARTIAL = "partial_rotary_factor"
"""What config.json calls the part of a head that turns. A family that can turn less than all does not require 1."""


def _as_it_is(fields: Fields, config: ModelConfig) -> ModelConfig:
    return config


@dataclass(frozen=True, slots=True)
class Family:
    """How one family is read from its files and built.

    architectures: its names in config.json. gguf: its name in a GGUF, None if it shares another's or has none.
    parameters: every weight the model reads, by our names, and the stored tensors each is joined from.
    defaults: what config.json may leave out because transformers knows it, where that differs from Llama's.
    required: values config.json must have if it names them; others are not implemented.
    read_json, read_gguf: what the files say beyond the common part, put into the configuration.
    gguf_interleaves: GGUF stores its rotary heads interleaved (`Part.rotary_heads`).
    """

    architectures: tuple[str, ...]
    gguf: str | None
    build: Callable[[ModelConfig, Weights, Kernels], Model]
    parameters: Callable[[ModelConfig], dict[str, Parts]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu", PARTIAL: 1.0})
    read_json: Callable[[Fields, ModelConfig], ModelConfig] = _as_it_is
    read_gguf: Callable[[Fields, ModelConfig], ModelConfig] = _as_it_is
    gguf_interleaves: bool = False
