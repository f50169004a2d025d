"""Loading a model: from a Hugging Face directory, from a GGUF file, or with random weights for its shape.

- Everything is checked before the first weight is read (`store`); a refusal names file and tensor.
- Tensors are converted piece by piece into their final place, so peak memory is the weights plus some megabytes.
- On a CPU "auto" is float32 whatever the files store: other types are slower there, and only float32 products are known
  to give a row the same bits in any company.
- Nothing is fetched, and pickled weights are never opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perdure.api.errors import InvalidValue, ModelNotFound
from perdure.models.base import Model, ModelConfig, Parts, joined_shape
from perdure.models.config import DTYPES, config_from_directory, config_from_gguf, sampling_defaults
from perdure.models.digest import model_digest
from perdure.models.registry import find_family
from perdure.models.store import Store, directory_store, gguf_store, open_gguf
from perdure.ops.linear import LINEAR_FORMS, can_pack, row_tile

LOAD_FORMATS = ("auto", "dummy")
DUMMY_SCALE = 0.02

NO_WEIGHTS = ("rotary_emb.inv_freq", "rope_freqs.weight")
"""Stored tensors that hold no weight, by their ends: frequencies are computed from the configuration."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A built model, the type it computes in, and what else its files say.

    linear: the form of its products; row_tile: what a step's rows are best padded to for it.
    num_parameters, num_bytes: of the weights as loaded; a tied head counts once. digest: of all of it (`digest`).
    tokenizer_source: where its tokenizer is. sampling_defaults: settings its generation_config.json suggests, by the
    names of `SamplingParams`.
    """

    model: Model
    config: ModelConfig
    dtype: torch.dtype
    linear: str
    row_tile: int
    num_parameters: int
    num_bytes: int
    digest: str
    tokenizer_source: Path
    sampling_defaults: Mapping[str, Any]


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    linear: str = "auto",
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """Build the model at `path`, a Hugging Face directory or a GGUF file.

    linear: the form of its products, a name of `ops.linear.LINEAR_FORMS`, or "auto" for the fastest invariant one.
    load_format "dummy" reads the model's shape only and draws its weights from `seed`.
    """
    if linear not in ("auto", *LINEAR_FORMS):
        raise InvalidValue(f"linear={linear!r} is none of auto, {', '.join(LINEAR_FORMS)}")
    if load_format not in LOAD_FORMATS:
        raise InvalidValue(f"load_format={load_format!r} is none of {', '.join(LOAD_FORMATS)}")
    path, device = Path(path), torch.device(device)
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file or directory")

    gguf = None if path.is_dir() else open_gguf(path)
    config = config_from_directory(path) if gguf is None else config_from_gguf(gguf)
    chosen = resolve_dtype(dtype, config.dtype, device)
    family = find_family(config.architecture, str(path))
    parameters = family.parameters(config)
    if load_format == "dummy":
        weights = _drawn(parameters, chosen, device, seed)
    else:
        store = directory_store(path) if gguf is None else gguf_store(gguf, interleaved=family.gguf_interleaves)
        unread = (*NO_WEIGHTS, "lm_head.weight") if config.tie_word_embeddings else NO_WEIGHTS
        store.check([part for parts in parameters.values() for part in parts], unread)
        weights = {name: _read(store, parts, chosen, device) for name, parts in parameters.items()}
    num_parameters = sum(weight.numel() for weight in weights.values())
    num_bytes = sum(weight.nbytes for weight in weights.values())
    digest = model_digest(config, weights)  # now: building takes the weights apart
    if linear == "auto":
        linear = "packed" if can_pack(device, chosen) else "invariant"
    return LoadedModel(
        model=family.build(config, weights, LINEAR_FORMS[linear]),
        config=config,
        dtype=chosen,
        linear=linear,
        row_tile=row_tile(linear),
        num_parameters=num_parameters,
        num_bytes=num_bytes,
        digest=digest,
        tokenizer_source=path,
        sampling_defaults=sampling_defaults(path) if gguf is None else {},
    )


def resolve_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The type to compute in."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else stored
    if name not in DTYPES:
        raise InvalidValue(f"dtype={name!r} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _read(store: Store, parts: Parts, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One weight of the model, its parts joined along their rows."""
    weight = torch.empty(joined_shape(parts), dtype=dtype, device=device)
    offset = 0
    for part in parts:
        for start, rows in store.pieces(part):
            weight[offset + start : offset + start + rows.shape[0]] = rows
        offset += part.shape[0]
    return weight


def _drawn(parameters: Mapping[str, Parts], dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Random weights: norms are one, the rest is drawn in the order of the table."""
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, parts in parameters.items():
        weight = torch.empty(joined_shape(parts), dtype=dtype, device=device)
        is_norm = name.endswith("norm.weight")
        one = 1.0 - parts[0].gguf_added  # of a norm that adds one to its weight
        weights[name] = weight.fill_(one) if is_norm else weight.normal_(0.0, DUMMY_SCALE, generator=generator)
    return weights
