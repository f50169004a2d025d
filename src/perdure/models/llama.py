"""Llama 2, Llama 3 and what shares their shape (SmolLM2): pre-norm decoder, rotary GQA, gated MLP.

- Single-device code: it is given its weights already joined (`parameters`) and what computes with them.
- `parameters` is the one place where the model's weights meet the names of files, Hugging Face's and GGUF's.
- Norms and rotary are computed per row; with invariant products and attention, a row's hidden state
  depends on its own past alone, to the bit.
- Heads are tied to the embedding by sharing the tensor, not by copying it.
- Families that differ in their layers only build `LlamaModel` with layers of their own.

Shapes: N rows, H = hidden_size, V = vocab_size, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from perdure.models.base import Attend, Family, HeadNorm, ModelConfig, Parts, Turn, Weights
from perdure.models.layers import Layer, RotaryHeads, as_tensor, embedding_and_head, linear, reading, sinks_of, through
from perdure.models.tables import attention_parts, biased_linears, decoder_table, mlp_parts, norm_part
from perdure.ops.kernels import Kernels
from perdure.ops.residual import Stream
from perdure.ops.rope import inverse_frequencies, rotary_table


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). head_norm: see `RotaryHeads`."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        head_norm: HeadNorm | None = None,
    ) -> None:
        name = f"layers.{layer}"
        self._qkv = reading(weights, f"{name}.attention_norm", f"{name}.qkv", config, kernels)
        self._heads = RotaryHeads(layer, config, head_norm=head_norm, sinks=sinks_of(weights, layer, config))
        self._output = kernels.writing(linear(weights, f"{name}.o", kernels))
        self._gate_up = reading(weights, f"{name}.mlp_norm", f"{name}.gate_up", config, kernels, gated=True)
        self._down = kernels.writing(linear(weights, f"{name}.down", kernels))

    def __call__(self, stream: Stream, turn: Turn, attend: Attend, rows: Tensor | None = None) -> Stream:
        stream, qkv = self._qkv(stream)
        mixed = self._heads(qkv, turn, attend)
        if rows is not None:
            stream, mixed = stream.rows(rows), mixed[rows]
        stream = self._output(stream, mixed)
        stream, inner = self._gate_up(stream)
        return self._down(stream, inner)


class LlamaModel:
    """The whole decoder (`perdure.models.base.Model`)."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        make_layer: Callable[[int, ModelConfig, Weights, Kernels], Layer] = LlamaLayer,
    ) -> None:
        self.config = config
        self._embedding, self._head = embedding_and_head(config, weights, kernels)
        self._layers = [make_layer(layer, config, weights, kernels) for layer in range(config.num_layers)]
        self._norm = partial(kernels.normed, weight=as_tensor(weights["norm.weight"]), eps=config.rms_norm_eps)
        inverse = inverse_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
        device = as_tensor(weights["norm.weight"]).device
        self._rotary = rotary_table(inverse.to(device), config.max_position_embeddings)
        self._rotate, self._rotations = kernels.rotate, kernels.rotations

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        stream = Stream(self._embedding(token_ids))
        turn = Turn(*self._rotations(self._rotary, positions, stream.x.dtype), self._rotate)
        stream = through([(layer, turn) for layer in self._layers], stream, attend, rows)
        return self._norm(stream)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


def layer_parts(config: ModelConfig) -> dict[str, Parts]:
    """What one layer holds: our names, and the parts by their names in Hugging Face's files and in GGUF."""
    return {
        "attention_norm": norm_part("input_layernorm", "attn_norm", config),
        **attention_parts(config),
        "mlp_norm": norm_part("post_attention_layernorm", "ffn_norm", config),
        **mlp_parts(config),
    }


def parameters(config: ModelConfig) -> dict[str, Parts]:
    """Every weight `LlamaModel` reads, and the stored tensors it is joined from."""
    return decoder_table(config, layer_parts(config), biased_linears(config))


FAMILY = Family(("LlamaForCausalLM",), "llama", LlamaModel, parameters, gguf_interleaves=True)
