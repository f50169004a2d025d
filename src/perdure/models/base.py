"""What a model family is to the rest: a configuration, a forward pass over packed rows, a head, a table of weights.

- A model computes on one device and knows neither requests nor pages: attention over the past is given to it.
- It is a plain object holding tensors; nothing here trains.
- Rows of a step are packed: row i is one token of some request at absolute position positions[i].

Shapes: N rows, H = hidden_size, Hq query heads, Hkv key/value heads, D = head_dim, V = vocab_size (logits' width).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's shape, as its files state it.

    vocab_size: rows of the head, which may be more than the tokenizer has ids.
    rope_scaling: None, or `rope_type` and its numbers (`ops.rope.inverse_frequencies`).
    eos_token_ids: every id the files name as an end, ascending; empty when they name none.
    dtype: what the files store (float32 for a GGUF, whatever its blocks); what is computed in is chosen at load.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
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


class Attend(Protocol):
    """Attention of one layer, given by whoever owns the KV memory.

    Stores k and v [N, Hkv, D] of these rows, then returns for each row its causal attention [N, Hq, D] over everything
    stored for its request up to its own position. q and k come rotated; the scale 1/sqrt(D) is applied here. The inputs
    may be strided views.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Model(Protocol):
    """One built model with its weights."""

    config: ModelConfig

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, H] after the final norm, ready for the head. token_ids and positions are int64 [N]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [n, V] of the rows of hidden [n, H]."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor as stored: its name in each format, and its shape.

    rotary_heads: the rows are those of so many heads that turn with position. GGUF stores such heads with their two
    halves interleaved, and the loader takes them apart. 0 = an ordinary tensor.
    """

    hf: str
    gguf: str
    shape: tuple[int, ...]
    rotary_heads: int = 0


Parts = tuple[Part, ...]
"""The stored tensors that, joined along their rows, make one weight of the model."""


def joined_shape(parts: Parts) -> tuple[int, ...]:
    """The shape of the weight the parts make."""
    assert len({part.shape[1:] for part in parts}) == 1, "joined parts have rows of one width"
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
