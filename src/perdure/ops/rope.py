"""Rotary position embedding, NeoX form: element i of a head turns with element i + R/2, for i < R/2.

- Cosines and sines are computed in fp32 once, for every position a model has, and looked up by position: the bits of a
  position never depend on the step it is computed in.
- A rotation is products and one sum, each rounded exactly: a row's bits depend on that row and its position alone.

Shapes: N rows, H heads, D = head_dim, R <= D elements of it turn, P positions. x [N, H, D], positions [N].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The scalings that configurations name as `rope_type`, and the numbers each needs. One more, "factors", is how GGUF
stores llama3: `factors` holds one divisor a frequency."""


class RotaryTable(NamedTuple):
    """Cosines and sines by position, both [P, R/2]."""

    cos: Tensor
    sin: Tensor


class Turning(NamedTuple):
    """How heads [N, J, D] turn: cos and sin of `rotations`. norm_weight [J, D], eps, once: of a norm of each head
    before it turns, `norm.rms_norm_once` or `norm.rms_norm`; None: there is none."""

    cos: Tensor
    sin: Tensor
    norm_weight: Tensor | None = None
    eps: float = 0.0
    once: bool = False


def inverse_frequencies(rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """Angle per position of each pair, [R/2] fp32. `scaling` holds `rope_type` and its fields; None = none."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inverse = 1.0 / (theta**exponents)
    kind = "default" if scaling is None else scaling["rope_type"]
    if scaling is None or kind == "default":
        return inverse
    if kind == "linear":
        return inverse / scaling["factor"]
    if kind == "llama3":
        return _llama3(inverse, scaling)
    if kind == "factors":
        return inverse / torch.tensor(scaling["factors"], dtype=torch.float32)
    raise ValueError(f"rope_type={kind!r} is none of {', '.join(SCALING_FIELDS)}, factors")


def _llama3(inverse: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended by wavelength."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original_length = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    slowed = torch.where(wavelength > original_length / low, inverse / factor, inverse)
    keep = (original_length / wavelength - low) / (high - low)
    blended = (1 - keep) * slowed / factor + keep * slowed
    between = (wavelength >= original_length / high) & (wavelength <= original_length / low)
    return torch.where(between, blended, slowed)


def rotary_table(inverse: Tensor, num_positions: int) -> RotaryTable:
    """The table of positions 0 .. num_positions - 1, fp32, on the device of `inverse`."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=inverse.device)
    angles = torch.outer(positions, inverse)
    return RotaryTable(angles.cos(), angles.sin())


def rotations(table: RotaryTable, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `rotate` needs for these rows, made once a step for all layers: cos and signed sin, both [N, 1, R]."""
    cos, sin = table.cos[positions], table.sin[positions]
    full_cos = torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1)
    full_sin = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)
    return full_cos, full_sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first R elements of every head of every row of x [N, H, D] by its row's angles."""
    turning = cos.shape[-1]
    if turning < x.shape[-1]:
        return torch.cat((rotate(x[..., :turning], cos, sin), x[..., turning:]), dim=-1)
    half = turning // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return swapped.mul_(sin).add_(x * cos)
