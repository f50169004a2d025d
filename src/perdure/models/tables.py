"""Tables of weights: from what one layer holds to every weight of a decoder, by our names and by those of files.

- A family states one layer's parts; around them all decoders here look alike.

Shapes: H = hidden_size, V = vocab_size, I = intermediate_size, Hq query heads, Hkv key/value heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from perdure.models.base import ModelConfig, Part, Parts


def norm_part(hf: str, gguf: str, config: ModelConfig) -> Parts:
    """A norm over the hidden state."""
    return (Part(hf, gguf, (config.hidden_size,)),)


def attention_parts(config: ModelConfig) -> dict[str, Parts]:
    """Queries, keys and values stored apart, which is usual, and the output."""
    hidden, head_dim = config.hidden_size, config.head_dim
    kv_rows, q_rows = config.num_kv_heads * head_dim, config.num_heads * head_dim
    return {
        "qkv": (
            Part("self_attn.q_proj", "attn_q", (q_rows, hidden), rotary_heads=config.num_heads),
            Part("self_attn.k_proj", "attn_k", (kv_rows, hidden), rotary_heads=config.num_kv_heads),
            Part("self_attn.v_proj", "attn_v", (kv_rows, hidden)),
        ),
        "o": (Part("self_attn.o_proj", "attn_output", (hidden, q_rows)),),
    }


def mlp_parts(config: ModelConfig) -> dict[str, Parts]:
    """A gated MLP, gate and up stored apart, which is usual."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "gate_up": (
            Part("mlp.gate_proj", "ffn_gate", (inner, hidden)),
            Part("mlp.up_proj", "ffn_up", (inner, hidden)),
        ),
        "down": (Part("mlp.down_proj", "ffn_down", (hidden, inner)),),
    }


def decoder_table(config: ModelConfig, layer: Mapping[str, Parts], biased: Container[str] = ()) -> dict[str, Parts]:
    """Every weight of a decoder whose layers hold these parts; those of `biased` have a bias, too."""
    vocab_shape = (config.vocab_size, config.hidden_size)
    table: dict[str, Parts] = {
        "embedding.weight": (Part("model.embed_tokens.weight", "token_embd.weight", vocab_shape),)
    }
    for index in range(config.num_layers):
        for name, parts in layer.items():
            for kind in ("weight", "bias") if name in biased else ("weight",):
                table[f"layers.{index}.{name}.{kind}"] = tuple(
                    Part(
                        hf=f"model.layers.{index}.{part.hf}.{kind}",
                        gguf=f"blk.{index}.{part.gguf}.{kind}",
                        shape=part.shape if kind == "weight" else part.shape[:1],
                        rotary_heads=part.rotary_heads,
                    )
                    for part in parts
                )
        if config.attention[index].sink == "learnable":
            table[f"layers.{index}.sinks"] = (
                Part(f"model.layers.{index}.self_attn.sinks", f"blk.{index}.attn_sinks.weight", (config.num_heads,)),
            )
    table["norm.weight"] = norm_part("model.norm.weight", "output_norm.weight", config)
    if not config.tie_word_embeddings:
        table["head.weight"] = (Part("lm_head.weight", "output.weight", vocab_shape),)
    return table


def biased_linears(config: ModelConfig) -> tuple[str, ...]:
    """The products that have a bias where the configuration says of attention and MLP whether they have."""
    return (*(("qkv", "o") if config.attention_bias else ()), *(("gate_up", "down") if config.mlp_bias else ()))
