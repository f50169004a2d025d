"""Phi-3 and Phi-4: Llama stored with q, k, v joined and gate, up joined; a part of each head may turn.

- Scaling by two lists of factors ("longrope") is refused by name: which list holds depends on how long a request is,
  so the same position would have other keys in a longer request.
"""

from __future__ import annotations

from perdure.models.base import Family, ModelConfig, Part, Parts
from perdure.models.llama import LlamaModel, layer_parts
from perdure.models.mistral import read_json
from perdure.models.tables import decoder_table


def parameters(config: ModelConfig) -> dict[str, Parts]:
    """Every weight of the model, and the stored tensors it is joined from."""
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = {
        **layer_parts(config),
        "qkv": (Part("self_attn.qkv_proj", "attn_qkv", (qkv_rows, hidden)),),
        "gate_up": (Part("mlp.gate_up_proj", "ffn_up", (2 * inner, hidden)),),
    }
    return decoder_table(config, layer)


FAMILY = Family(
    ("Phi3ForCausalLM",),
    "phi3",
    LlamaModel,
    parameters,
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    required={"hidden_act": "silu"},
    read_json=read_json,
)
