"""Gemma 3, text: two kinds of layer, local ones with a window and a rotary base of their own, and global ones.

- Norms stand before and after attention and MLP, and multiply by 1 + weight; GGUF stores that sum.
- Query and key heads are normalised, each by itself; scores are scaled by `query_pre_attn_scalar`.
- Embeddings are scaled by the root of the width, and the head is the embedding.
- Attention scores and logits may be capped softly, each by its own cap or not at all.
- Models that see images name another architecture and are refused.

Shapes: N rows, H = hidden_size, Hq query heads, Hkv key/value heads, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from perdure.models.base import PARTIAL, Attend, Family, ModelConfig, Part, Parts, Turn, Weights
from perdure.models.fields import Fields, layer_types
from perdure.models.layers import (
    GatedMLP,
    RotaryAttention,
    RotaryHeads,
    as_tensor,
    embedding_and_head,
    norm_of_heads,
    norm_once,
    sinks_of,
    through,
)
from perdure.models.tables import attention_parts, biased_linears, decoder_table, mlp_parts, norm_part
from perdure.ops.activation import soft_cap_
from perdure.ops.kernels import Kernels
from perdure.ops.residual import Stream
from perdure.ops.rope import inverse_frequencies, rotary_table

LOCAL_THETA = 10000.0
PATTERN = 6
"""Every layer whose number, from 1, is a multiple of it is global, unless a file says otherwise."""

LAYERS_OF_27B = 62
"""A GGUF says nothing of the scale of scores: it is that of the head size for all models but the one so deep."""


@dataclass(frozen=True, slots=True)
class Gemma3Config(ModelConfig):
    """local_theta: rotary base of layers with a window (`rope_theta` and its scaling are those of the others)."""

    local_theta: float
    final_softcap: float | None


class Gemma3Layer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, layer: int, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        name, eps = f"layers.{layer}", config.rms_norm_eps
        head_norm = norm_of_heads(weights, name, config, kernels, once=True, added=1.0)
        self._attention_norm = norm_once(weights, f"{name}.attention_norm", eps, kernels, added=1.0)
        heads = RotaryHeads(layer, config, head_norm=head_norm, sinks=sinks_of(weights, layer, config))
        self._attention = RotaryAttention(weights, name, kernels, heads)
        self._attention_end_norm = norm_once(weights, f"{name}.attention_end_norm", eps, kernels, added=1.0)
        self._mlp_norm = norm_once(weights, f"{name}.mlp_norm", eps, kernels, added=1.0)
        self._mlp = GatedMLP(weights, name, kernels, kernels.gelu_tanh_mul)
        self._mlp_end_norm = norm_once(weights, f"{name}.mlp_end_norm", eps, kernels, added=1.0)

    def __call__(self, stream: Stream, turn: Turn, attend: Attend, rows: Tensor | None = None) -> Stream:
        x = stream.total()
        mixed = self._attention_end_norm(self._attention(self._attention_norm(x), turn, attend, rows))
        x = (x if rows is None else x[rows]) + mixed
        return Stream(x, self._mlp_end_norm(self._mlp(self._mlp_norm(x))))


class Gemma3Model:
    """The whole decoder (`perdure.models.base.Model`)."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        assert isinstance(config, Gemma3Config)
        self.config: ModelConfig = config
        self._final_softcap = config.final_softcap
        of_weights = as_tensor(weights["norm.weight"])
        self._embedding, self._head = embedding_and_head(config, weights, kernels)
        # Rounded to the type of the weights, as the model was trained.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5).to(of_weights)
        self._layers = [Gemma3Layer(layer, config, weights, kernels) for layer in range(config.num_layers)]
        self._is_local = [kind.window is not None for kind in config.attention]
        self._norm = norm_once(weights, "norm", config.rms_norm_eps, kernels, added=1.0)
        device, length = of_weights.device, config.max_position_embeddings
        of_local = inverse_frequencies(config.rotary_dim, config.local_theta)
        of_global = inverse_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
        self._rotary = [rotary_table(inverse.to(device), length) for inverse in (of_global, of_local)]
        self._rotate, self._rotations = kernels.rotate, kernels.rotations

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        stream = Stream(self._embedding(token_ids) * self._embedding_scale)
        turns = [Turn(*self._rotations(table, positions, stream.x.dtype), self._rotate) for table in self._rotary]
        layers = [(layer, turns[is_local]) for layer, is_local in zip(self._layers, self._is_local, strict=True)]
        stream = through(layers, stream, attend, rows)
        return self._norm(stream.total())

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden)
        return logits if self._final_softcap is None else soft_cap_(logits.float(), self._final_softcap)


def parameters(config: ModelConfig) -> dict[str, Parts]:
    """Every weight of the model, and the stored tensors it is joined from."""
    layer = {
        "attention_norm": norm_part("input_layernorm", "attn_norm", config),
        **attention_parts(config),
        "q_norm": (Part("self_attn.q_norm", "attn_q_norm", (config.head_dim,)),),
        "k_norm": (Part("self_attn.k_norm", "attn_k_norm", (config.head_dim,)),),
        "attention_end_norm": norm_part("post_attention_layernorm", "post_attention_norm", config),
        "mlp_norm": norm_part("pre_feedforward_layernorm", "ffn_norm", config),
        **mlp_parts(config),
        "mlp_end_norm": norm_part("post_feedforward_layernorm", "post_ffw_norm", config),
    }
    table = decoder_table(config, layer, biased_linears(config))
    return {
        name: tuple(replace(part, gguf_added=1.0) for part in parts) if name.endswith("norm.weight") else parts
        for name, parts in table.items()
    }


def read_json(given: Fields, config: ModelConfig) -> ModelConfig:
    local = layer_types(given, config.num_layers) or _pattern(given, "sliding_window_pattern", config.num_layers)
    local_rope = given.section("rope_parameters").section("sliding_attention")
    return _extended(
        config,
        window=given.integer("sliding_window"),
        local=local,
        scale=given.real("query_pre_attn_scalar") ** -0.5,
        softcap=given.optional_real("attn_logit_softcapping"),
        local_theta=local_rope.real("rope_theta", given.real("rope_local_base_freq", LOCAL_THETA)),
        final_softcap=given.optional_real("final_logit_softcapping"),
    )


def read_gguf(given: Fields, config: ModelConfig) -> ModelConfig:
    width = config.hidden_size / config.num_heads if config.num_layers == LAYERS_OF_27B else config.head_dim
    return _extended(
        config,
        window=given.integer("attention.sliding_window"),
        local=_pattern(given, "attention.sliding_window_pattern", config.num_layers),
        scale=given.real("attention.scale", width**-0.5),
        softcap=given.optional_real("attn_logit_softcapping"),
        local_theta=given.real("rope.freq_base_swa", LOCAL_THETA),
        final_softcap=given.optional_real("final_logit_softcapping"),
    )


def _pattern(given: Fields, name: str, num_layers: int) -> list[bool]:
    """Which layers are local when each n-th is global."""
    period = given.integer(name, PATTERN)
    return [bool((layer + 1) % period) for layer in range(num_layers)]


def _extended(
    config: ModelConfig,
    *,
    window: int,
    local: list[bool],
    scale: float,
    softcap: float | None,
    local_theta: float,
    final_softcap: float | None,
) -> Gemma3Config:
    kinds = (
        replace(kind, scale=scale, window=window if is_local else None, softcap=softcap)
        for kind, is_local in zip(config.attention, local, strict=True)
    )
    common = {field.name: getattr(config, field.name) for field in fields(config)}
    return Gemma3Config(**{**common, "attention": tuple(kinds)}, local_theta=local_theta, final_softcap=final_softcap)


FAMILY = Family(
    ("Gemma3ForCausalLM",),
    "gemma3",
    Gemma3Model,
    parameters,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    required={
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
        PARTIAL: 1.0,
    },
    read_json=read_json,
    read_gguf=read_gguf,
)
