"""Loading a model: from a Hugging Face directory, from a GGUF file, or with random weights for its shape.

- Everything is checked before the first weight is read (`store`); a refusal names file and tensor.
- Tensors are converted piece by piece into their final place, so peak memory is the weights plus some megabytes: for
  the compiled kernels, that is the layout they read.
- `quantization="gguf"` keeps a GGUF's blocks: a quarter of the memory and less, and the same bits as their expansion.
- `quantization="fp8"` holds the weights of layers' products in 8 bits (`ops.float8`), rounded piece by piece as they
  are read; of a checkpoint that stores some so, those alone. Embedding, head and norms stay as they are otherwise.
- On a CPU "auto" is float32 whatever the files store: other types are slower there, and only float32 products are known
  to give a row the same bits in any company.
- Nothing is fetched, and pickled weights are never opened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perdure.api.errors import InvalidValue, ModelLoadError, ModelNotFound
from perdure.models.base import Model, ModelConfig, Parts, Weights, joined_shape
from perdure.models.config import DTYPES, config_from_directory, config_from_gguf, sampling_defaults
from perdure.models.registry import find_family
from perdure.models.store import Store, digest_of, directory_store, gguf_store, open_gguf
from perdure.models.weight_set import WeightSet, packed_type, unread, weights_in_float8
from perdure.ops.choice import Choice, choose
from perdure.ops.float8 import Float8Weight
from perdure.ops.kernels import Kernels, Weight, choose_kernels
from perdure.ops.native import Library, library, why_not
from perdure.ops.native.weights import JoinedWeight, PackedWeight, packed_floats

QUANTIZATIONS = ("gguf", "fp8")
LEAST_CAPABILITY = (8, 9)  # of a GPU, for numbers of 8 bits
LOAD_FORMATS = ("auto", "dummy")
DUMMY_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A built model, the type it computes in, and what else its files say.

    weights: all it holds, to be written anew in place. kernels: what it computes with. products: what serves each
    shape of weight, as measured.
    quantization: "gguf", "fp8" or None (weights are expanded).
    num_parameters, num_bytes: of the weights as loaded; a tied head counts once.
    tokenizer_source: where its tokenizer is. sampling_defaults: settings its generation_config.json suggests, by the
    names of `SamplingParams`.
    """

    model: Model
    weights: WeightSet
    config: ModelConfig
    dtype: torch.dtype
    kernels: Kernels
    products: Mapping[str, str]
    quantization: str | None
    num_parameters: int
    num_bytes: int
    tokenizer_source: Path
    sampling_defaults: Mapping[str, Any]


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    linear: str = "auto",
    batch_invariant: bool = False,
    quantization: str | None = None,
    device: str | torch.device = "cpu",
    waits: bool = True,
) -> LoadedModel:
    """Build the model at `path`, a Hugging Face directory or a GGUF file.

    linear, batch_invariant: the form of products, as `ops.kernels.choose_kernels` takes them.
    quantization: "gguf" keeps the blocks of a GGUF file as they are; "fp8" as the module says; None = "fp8" where the
    checkpoint is stored so, else none.
    load_format "dummy" reads the model's shape only and draws its weights from `seed`.
    waits: False = weights of a GPU may still be on their way when this returns: `weights.finish()` waits for them, and
    until then what is computed with them means nothing (`weights.stop()`: they are not wanted any more).
    """
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
    try:
        kernels = choose_kernels(linear, device, chosen, batch_invariant=batch_invariant)
    except ValueError as error:
        raise InvalidValue(str(error)) from None
    native = library() if kernels.name == "native" else None
    if quantization is None and config.float8 is not None:
        quantization = "fp8"
    if quantization is not None:
        _check_quantization(quantization, path, gguf is not None and load_format != "dummy", native, device)
    if quantization == "fp8" and batch_invariant and device.type == "cuda":
        raise InvalidValue("batch_invariant=True does not go with quantization='fp8' on CUDA: say False")
    keep = quantization == "gguf"
    store: Store | None = None
    if load_format != "dummy":
        store = directory_store(path) if gguf is None else gguf_store(gguf, interleaved=family.gguf_interleaves)
        store.check([part for parts in parameters.values() for part in parts], unread(config))
    narrow = _in_float8(parameters, config, store) if quantization == "fp8" else frozenset()
    if store is not None and not narrow:
        _refuse_float8(store, parameters)
    measured = Choice({})
    if native is not None and linear == "auto" and not keep and store is not None:
        shapes = {name: joined_shape(parts) for name, parts in parameters.items() if name not in narrow}
        measured = choose(native, [shape for shape in shapes.values() if len(shape) == 2])
    num_parameters = sum(math.prod(joined_shape(parts)) for parts in parameters.values())
    draw = _Drawing(chosen, device, seed)
    is_on_gpu = device.type == "cuda"
    weights: dict[str, Weight] = {}
    for name, parts in parameters.items():
        shape = joined_shape(parts)
        if name in narrow:
            assert len(shape) == 2, "what is held in 8 bits is a product's"
            weight = Float8Weight(shape, device, native, None if config.float8 is None else config.float8.most)
            if store is None:
                weight.fill(0, draw(name, parts))
            weights[name] = weight
        elif store is None:
            weights[name] = _packed(draw(name, parts), native)
        elif native is None or len(shape) == 1 or measured.is_packed(shape):
            weights[name] = torch.empty(shape, dtype=chosen, device=device)
        else:
            weights[name] = _to_be_packed(store, parts, native, keep=keep)
        if store is not None and not is_on_gpu:
            store.fill(weights[name], parts, keep_blocks=keep)
    num_bytes = sum(w.nbytes if isinstance(w, Tensor) else w.num_bytes for w in weights.values())
    digest = digest_of(config, {"seed": seed} if store is None else store.checksums)
    held = Weights(weights)
    del weights
    model = family.build(config, held, kernels)
    weight_set = WeightSet(config, family, held, keeps_blocks=keep, dtype=chosen, digest=digest)
    if store is not None and is_on_gpu:
        weight_set.begin(store)
        if waits:
            weight_set.finish()
    return LoadedModel(
        model=model,
        weights=weight_set,
        config=config,
        dtype=chosen,
        kernels=kernels,
        products=measured.describe(),
        quantization=quantization,
        num_parameters=num_parameters,
        num_bytes=num_bytes,
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


def _check_quantization(
    quantization: str, path: Path, is_gguf: bool, native: Library | None, device: torch.device
) -> None:
    if quantization not in QUANTIZATIONS:
        raise InvalidValue(f"quantization={quantization!r} is none of {', '.join(QUANTIZATIONS)}")
    if quantization == "fp8":
        check_float8(f"quantization={quantization!r}", device)
        return
    if not is_gguf:
        raise InvalidValue(f"quantization='gguf' keeps the blocks of a GGUF file; {path} is loaded as none")
    if native is None:
        reason = why_not() or "other products or another type were asked for"
        raise InvalidValue(f"quantization='gguf' needs compiled kernels in float32: {reason}")


def check_float8(setting: str, device: torch.device) -> None:
    """InvalidValue: a GPU that has no numbers of 8 bits."""
    if device.type == "cuda" and (has := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        least, most = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, has))
        raise InvalidValue(f"{setting} needs a GPU of compute capability {least} or more, this one has {most}")


def _in_float8(parameters: Mapping[str, Parts], config: ModelConfig, store: Store | None) -> frozenset[str]:
    """Names of the weights that are held in 8 bits."""
    if config.float8 is not None and store is not None:
        found = weights_in_float8(store, parameters)
        if "embedding.weight" in found:
            raise ModelLoadError(f"{store.path}: an embedding in 8 bits is not supported")
        return frozenset(found)
    return frozenset(
        name for name, parts in parameters.items() if name.startswith("layers.") and len(joined_shape(parts)) == 2
    )


def _refuse_float8(store: Store, parameters: Mapping[str, Parts]) -> None:
    if found := weights_in_float8(store, parameters):
        stored = parameters[found[0]][0].hf
        raise ModelLoadError(f"{store.path}: {stored!r} is stored as F8_E4M3, config.json names no quantization")


def _packed(weight: Tensor, native: Library | None) -> Weight:
    return weight if native is None or weight.dim() == 1 else packed_floats(native, weight)


def _to_be_packed(store: Store, parts: Parts, native: Library, *, keep: bool) -> JoinedWeight:
    """Room for a weight of products in the layout of the kernels: fp32, or (keep) the types it is stored in."""
    shapes = [(packed_type(store, part), part.shape) for part in parts] if keep else [("f32", joined_shape(parts))]
    return JoinedWeight(tuple(PackedWeight(native, stored, *shape) for stored, shape in shapes))


class _Drawing:
    """Random weights: norms are one, the rest is drawn in the order of the calls."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, name: str, parts: Parts) -> Tensor:
        weight = torch.empty(joined_shape(parts), dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return weight.fill_(1.0 - parts[0].gguf_added)  # of a norm that adds one to its weight
        return weight.normal_(0.0, DUMMY_SCALE, generator=self._generator)
