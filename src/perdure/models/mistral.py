"""Mistral: Llama whose layers may all have a window. A GGUF calls it llama."""

from __future__ import annotations

from perdure.models.base import Family, ModelConfig
from perdure.models.fields import Fields
from perdure.models.llama import LlamaModel, parameters


def read_json(fields: Fields, config: ModelConfig) -> ModelConfig:
    return config.with_windows([fields.optional_integer("sliding_window")] * config.num_layers)


FAMILY = Family(
    ("MistralForCausalLM",),
    None,
    LlamaModel,
    parameters,
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    read_json=read_json,
)
