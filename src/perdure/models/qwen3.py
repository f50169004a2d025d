"""Qwen 3: Llama whose query and key heads are normalised, each by itself, before they turn."""

from __future__ import annotations

from perdure.models import qwen2
from perdure.models.base import Family, ModelConfig, Part, Parts, Weights
from perdure.models.layers import norm_of_heads
from perdure.models.llama import LlamaLayer, LlamaModel, layer_parts
from perdure.models.tables import biased_linears, decoder_table
from perdure.ops.kernels import Kernels


def make_layer(layer: int, config: ModelConfig, weights: Weights, kernels: Kernels) -> LlamaLayer:
    return LlamaLayer(layer, config, weights, kernels, norm_of_heads(weights, f"layers.{layer}", config, kernels))


def build(config: ModelConfig, weights: Weights, kernels: Kernels) -> LlamaModel:
    return LlamaModel(config, weights, kernels, make_layer)


def parameters(config: ModelConfig) -> dict[str, Parts]:
    """Every weight of the model, and the stored tensors it is joined from."""
    layer = {
        **layer_parts(config),
        "q_norm": (Part("self_attn.q_norm", "attn_q_norm", (config.head_dim,)),),
        "k_norm": (Part("self_attn.k_norm", "attn_k_norm", (config.head_dim,)),),
    }
    return decoder_table(config, layer, biased_linears(config))


FAMILY = Family(
    ("Qwen3ForCausalLM",),
    "qwen3",
    build,
    parameters,
    defaults={**qwen2.DEFAULTS, "head_dim": 128},
    read_json=qwen2.read_windows,
)
