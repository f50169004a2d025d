"""A digest of a model: of its configuration and of every byte of its weights, at the speed of memory.

- Each tensor's bytes are laid out as a table of 64-bit numbers; its row sums and column sums, modulo 2^64, are hashed.
  They hold every byte: one number changed or any two swapped change it. It is no defence against forgery.
- Measured for the default model on 2 cores: 0.05 s of its 2.3 s of loading, where SHA-256 of the bytes takes 0.35 s.
- Weights are taken by the model's names, in the type they are computed in, whatever file they come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from perdure.models.base import ModelConfig

COLUMNS = 1024
DIGEST_BYTES = 16


def model_digest(config: ModelConfig, weights: Mapping[str, Tensor]) -> str:
    """In hexadecimal. Weights are contiguous."""
    digest = hashlib.blake2b(repr(config).encode(), digest_size=DIGEST_BYTES)
    for name in sorted(weights):
        weight = weights[name]
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        _add(digest, weight)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, weight: Tensor) -> None:
    flat = weight.view(-1).view(torch.uint8)
    whole = flat.numel() // (8 * COLUMNS) * (8 * COLUMNS)
    table = flat[:whole].view(torch.int64).view(-1, COLUMNS)
    for part in (table.sum(0), table.sum(1), flat[whole:]):
        digest.update(part.cpu().numpy().tobytes())
