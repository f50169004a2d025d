"""Llama 2, Llama 3 and what shares their shape (SmolLM2): pre-norm decoder, rotary GQA, gated MLP.

- Single-device code: it is given its weights already joined (`parameters`) and its form of linear layer.
- `parameters` is the one place where the model's weights meet the names of files, Hugging Face's and GGUF's.
- Norms and rotary are computed per row; with an invariant form of linear layer and of attention, a row's hidden state
  depends on its own past alone, to the bit.
- Heads are tied to the embedding by sharing the tensor, not by copying it.

Shapes: N rows, H = hidden_size, V = vocab_size, D = head_dim.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from perdure.models.base import Attend, ModelConfig, Part, Parts
from perdure.models.layers import GatedMLP, RotaryAttention, Weights, linear
from perdure.ops.linear import LinearForm
from perdure.ops.norm import rms_norm
from perdure.ops.rope import inverse_frequencies, rotary_table, rotations

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rope_freqs.weight")
"""Stored tensors that hold no weight: frequencies are computed from the configuration."""


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layer: int, config: ModelConfig, weights: Weights, form: LinearForm) -> None:
        name = f"layers.{layer}"
        self._eps = config.rms_norm_eps
        self._attention_norm = weights[f"{name}.attention_norm.weight"]
        self._attention = RotaryAttention(layer, config, weights, name, form)
        self._mlp_norm = weights[f"{name}.mlp_norm.weight"]
        self._mlp = GatedMLP(weights, name, form)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self._attention(rms_norm(x, self._attention_norm, self._eps), cos, sin, attend)
        return x + self._mlp(rms_norm(x, self._mlp_norm, self._eps))


class LlamaModel:
    """The whole decoder (`perdure.models.base.Model`)."""

    def __init__(self, config: ModelConfig, weights: Weights, form: LinearForm) -> None:
        self.config = config
        self._embedding = weights["embedding.weight"]
        self._layers = [LlamaLayer(layer, config, weights, form) for layer in range(config.num_layers)]
        self._norm = weights["norm.weight"]
        self._head = form(self._embedding, None) if config.tie_word_embeddings else linear(weights, "head", form)
        inverse = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._rotary = rotary_table(inverse.to(self._embedding.device), config.max_position_embeddings)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = functional.embedding(token_ids, self._embedding)
        cos, sin = rotations(self._rotary, positions, x.dtype)
        for layer in self._layers:
            x = layer(x, cos, sin, attend)
        return rms_norm(x, self._norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden).float()


STORED_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "attention_norm": (("input_layernorm", "attn_norm"),),
    "qkv": (("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v")),
    "o": (("self_attn.o_proj", "attn_output"),),
    "mlp_norm": (("post_attention_layernorm", "ffn_norm"),),
    "gate_up": (("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up")),
    "down": (("mlp.down_proj", "ffn_down"),),
}
"""A layer's weights: our name, then the names of the parts it is joined from in Hugging Face's files and in GGUF."""


def parameters(config: ModelConfig) -> dict[str, Parts]:
    """Every weight `LlamaModel` reads, and the stored tensors it is joined from."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (q_rows, hidden),
        "attn_k": (kv_rows, hidden),
        "attn_v": (kv_rows, hidden),
        "attn_output": (hidden, q_rows),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    rotary_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    biased = {name: config.attention_bias for name in ("qkv", "o")} | {
        name: config.mlp_bias for name in ("gate_up", "down")
    }

    table: dict[str, Parts] = {
        "embedding.weight": (Part("model.embed_tokens.weight", "token_embd.weight", (config.vocab_size, hidden)),)
    }
    for layer in range(config.num_layers):
        for name, stored in STORED_NAMES.items():
            for kind in ("weight", "bias") if biased.get(name) else ("weight",):
                table[f"layers.{layer}.{name}.{kind}"] = tuple(
                    Part(
                        hf=f"model.layers.{layer}.{hf}.{kind}",
                        gguf=f"blk.{layer}.{gguf}.{kind}",
                        shape=shapes[gguf] if kind == "weight" else shapes[gguf][:1],
                        rotary_heads=rotary_heads.get(gguf, 0),
                    )
                    for hf, gguf in stored
                )
    table["norm.weight"] = (Part("model.norm.weight", "output_norm.weight", (hidden,)),)
    if not config.tie_word_embeddings:
        table["head.weight"] = (Part("lm_head.weight", "output.weight", (config.vocab_size, hidden)),)
    return table
