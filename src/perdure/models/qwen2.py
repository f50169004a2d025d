"""Qwen 2 and 2.5: Llama with biases of queries, keys and values; its upper layers may have a window."""

from __future__ import annotations

from perdure.models.base import Family, ModelConfig, Parts
from perdure.models.fields import Fields, layer_types
from perdure.models.llama import LlamaModel, layer_parts
from perdure.models.tables import decoder_table

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def parameters(config: ModelConfig) -> dict[str, Parts]:
    """Every weight of the model, and the stored tensors it is joined from."""
    return decoder_table(config, layer_parts(config), biased=("qkv",))


def read_windows(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Windows where config.json lists them, else from layer `max_window_layers` on; none unless switched on."""
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", least=0)
    local = layer_types(fields, config.num_layers) or [layer >= first for layer in range(config.num_layers)]
    return config.with_windows(window if is_local else None for is_local in local)


FAMILY = Family(("Qwen2ForCausalLM",), "qwen2", LlamaModel, parameters, defaults=DEFAULTS, read_json=read_windows)
