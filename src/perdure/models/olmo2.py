"""OLMo 2: norms after attention and MLP instead of before; queries and keys are normalised over all heads at once.

Shapes: N rows, Hq query heads, Hkv key/value heads, D = head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perdure.models.base import Attend, Family, ModelConfig, Part, Parts, Turn, Weights
from perdure.models.layers import GatedMLP, RotaryAttention, RotaryHeads, norm_once, sinks_of
from perdure.models.llama import LlamaModel
from perdure.models.tables import attention_parts, biased_linears, decoder_table, mlp_parts, norm_part
from perdure.ops.kernels import Kernels
from perdure.ops.residual import Stream


class Olmo2Layer:
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, layer: int, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        name, eps = f"layers.{layer}", config.rms_norm_eps
        self._num_heads = config.num_heads
        self._q_norm = norm_once(weights, f"{name}.q_norm", eps, kernels)
        self._k_norm = norm_once(weights, f"{name}.k_norm", eps, kernels)
        heads = RotaryHeads(layer, config, self._normalise, sinks=sinks_of(weights, layer, config))
        self._attention = RotaryAttention(weights, name, kernels, heads)
        self._attention_norm = norm_once(weights, f"{name}.attention_norm", eps, kernels)
        self._mlp = GatedMLP(weights, name, kernels, kernels.silu_mul)
        self._mlp_norm = norm_once(weights, f"{name}.mlp_norm", eps, kernels)

    def __call__(self, stream: Stream, turn: Turn, attend: Attend, rows: Tensor | None = None) -> Stream:
        x = stream.total()
        mixed = self._attention_norm(self._attention(x, turn, attend, rows))
        x = (x if rows is None else x[rows]) + mixed
        return Stream(x, self._mlp_norm(self._mlp(x)))

    def _normalise(self, qk: Tensor) -> Tensor:
        """Of queries and keys [N, Hq + Hkv, D], each as one row of all its heads."""
        q, k = qk.tensor_split((self._num_heads,), dim=1)
        flat = torch.cat((self._q_norm(q.flatten(1)), self._k_norm(k.flatten(1))), dim=1)
        return flat.view(qk.shape)


def build(config: ModelConfig, weights: Weights, kernels: Kernels) -> LlamaModel:
    return LlamaModel(config, weights, kernels, Olmo2Layer)


def parameters(config: ModelConfig) -> dict[str, Parts]:
    """Every weight of the model, and the stored tensors it is joined from."""
    layer = {
        **attention_parts(config),
        "q_norm": (Part("self_attn.q_norm", "attn_q_norm", (config.num_heads * config.head_dim,)),),
        "k_norm": (Part("self_attn.k_norm", "attn_k_norm", (config.num_kv_heads * config.head_dim,)),),
        "attention_norm": norm_part("post_attention_layernorm", "post_attention_norm", config),
        **mlp_parts(config),
        "mlp_norm": norm_part("post_feedforward_layernorm", "post_ffw_norm", config),
    }
    return decoder_table(config, layer, biased_linears(config))


FAMILY = Family(("Olmo2ForCausalLM",), "olmo2", build, parameters, defaults={"rms_norm_eps": 1e-5})
