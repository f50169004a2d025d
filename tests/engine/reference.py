"""`ref` of the cases: a plain Llama in float64, a full forward for every token, no cache, no pages, no batch. It knows
windows and attention sinks.

It shares no code with the engine but the reader of tensors, so equality with it is not equality with ourselves.

Shapes: N positions, V vocabulary, Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

CLEAR_LEAD = 1e-3
"""Ids are compared only where the best logit leads by more: two right programs may differ below it."""


@dataclass(frozen=True)
class Continuation:
    """Greedy ids, each one's score and the lead of its logit over the second best."""

    token_ids: list[int]
    scores: list[float]
    leads: list[float]


class Reference:
    """The model of a directory made by `make_tiny_llama`, or of a family with windows and biases of queries, keys and
    values beside that; without rope scaling. config: values of config.json that are to be others."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self._config = json.loads((directory / "config.json").read_text()) | config
        self._weights = {name: w.double() for name, w in load_file(directory / "model.safetensors").items()}

    def __call__(self, prompt: Sequence[int], num_tokens: int) -> Continuation:
        """ref(ids, n)"""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return self.judge(prompt, ids[len(prompt) :])

    def judge(self, prompt: Sequence[int], token_ids: Sequence[int]) -> Continuation:
        """The best id at each of these output positions, given the ids before it.

        If these equal the ids, the ids are `ref(prompt, n)`: a later position never changes an earlier one's logits. So
        one forward judges a whole output.
        """
        if not token_ids:
            return Continuation([], [], [])
        rows = self.logits([*prompt, *token_ids])[len(prompt) - 1 : -1]
        best, ids = rows.topk(2).values, rows.argmax(-1)
        scores = best[:, 0] - rows.logsumexp(-1)
        return Continuation(ids.tolist(), scores.tolist(), (best[:, 0] - best[:, 1]).tolist())

    def scores(self, ids: Sequence[int]) -> Tensor:
        """log-softmax [N, V] of the logits at every position."""
        return self.logits(ids).log_softmax(-1)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[N, V]"""
        c, w = self._config, self._weights
        x = w["model.embed_tokens.weight"][list(ids)]
        rotate = self._rotation(len(ids))
        for layer in range(c["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            h = self._norm(x, f"{name}.input_layernorm")
            q, k, v = (self._heads(h, f"{name}.self_attn.{part}_proj") for part in "qkv")
            x = x + self._attend(layer, rotate(q), rotate(k), v) @ w[f"{name}.self_attn.o_proj.weight"].T
            h = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (h @ w[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (silu(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T
        return self._norm(x, "model.norm") @ w["lm_head.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale: Tensor = (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).rsqrt()
        y: Tensor = x * scale * self._weights[f"{name}.weight"]
        return y

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """[heads, N, D]"""
        y: Tensor = x @ self._weights[f"{name}.weight"].T
        y = y + self._weights.get(f"{name}.bias", 0.0)
        return y.view(len(x), -1, self._config["head_dim"]).transpose(0, 1)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of [Hq, N, D] over [Hkv, N, D]; gives [N, Hq * D]."""
        group, length = q.shape[0] // k.shape[0], q.shape[1]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        distance = torch.arange(length)[:, None] - torch.arange(length)
        scores = scores.masked_fill((distance < 0) | (distance >= self._window(layer)), -math.inf)
        sinks = self._sinks(layer)[:, None].expand(-1, length, -1)  # one more column, or none
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :length]
        return (weights @ v).transpose(0, 1).flatten(1)

    def _window(self, layer: int) -> float:
        is_local = self._config.get("layer_types", {layer: "sliding_attention"})[layer] == "sliding_attention"
        return (is_local and self._config.get("sliding_window")) or math.inf

    def _sinks(self, layer: int) -> Tensor:
        """[Hq, 1], or [Hq, 0] where there are none."""
        num_heads = self._config["num_attention_heads"]
        match self._config.get("softmax_type"):
            case "off-by-one":
                return torch.zeros(num_heads, 1, dtype=torch.float64)
            case "learnable":
                return self._weights[f"model.layers.{layer}.self_attn.sinks"][:, None]
        return torch.zeros(num_heads, 0, dtype=torch.float64)

    def _rotation(self, length: int) -> Callable[[Tensor], Tensor]:
        half = self._config["head_dim"] // 2
        # Angles are rounded to fp32 by everybody who runs such models: that rounding belongs to the model.
        frequencies = 1.0 / self._config["rope_theta"] ** (torch.arange(half, dtype=torch.float32) / half)
        angles = (torch.arange(length, dtype=torch.float32)[:, None] * frequencies).double()  # [N, D / 2]

        def rotate(x: Tensor) -> Tensor:
            low, high = x[..., :half], x[..., half:]
            return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

        return rotate
