"""Checkpoints whose weights are stored in 8 bits (e4m3): what their `quantization_config` says, or the refusal of it.

- Read are those that have one factor a row or a tensor, for inputs that are rounded row by row as they come: the
  `float-quantized` form of compressed-tensors, `fbgemm_fp8`, and `fp8` without blocks.
- Whatever else a field may say changes the numbers, so it is refused by the field's name.
- Which weights are stored so is seen by their type; the rest stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perdure.api.errors import ModelLoadError
from perdure.models.fields import Fields

NAME = "quantization_config"
_WEIGHTS: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("channel", "tensor"),
    "symmetric": (True,),
    "dynamic": (False, None),
    "group_size": (None,),
    "block_structure": (None,),
}
_INPUTS: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("token",),
    "symmetric": (True,),
    "dynamic": (True,),
    "group_size": (None,),
    "block_structure": (None,),
}


@dataclass(frozen=True, slots=True)
class StoredFloat8:
    """most: no magnitude of a product's input counts as larger when its row's factor is found; None = all count."""

    most: float | None = None


def stored_float8(fields: Fields) -> StoredFloat8 | None:
    """What a config.json says of weights in 8 bits; None if it says nothing. ModelLoadError: another quantization."""
    values = fields.values.get(NAME)
    if values is None:
        return None
    said = fields.section(NAME)
    method = said.values.get("quant_method", "unnamed")
    if method == "compressed-tensors":
        return _compressed_tensors(said)
    if method == "fbgemm_fp8":
        return StoredFloat8(said.real("activation_scale_ub", 1200.0))
    if method == "fp8":
        _require(said.file, NAME, said.values, {"activation_scheme": ("dynamic",), "weight_block_size": (None,)})
        return StoredFloat8()
    raise ModelLoadError(
        f"{fields.file}: quantization {method!r} is not supported; give a plain checkpoint, one in fp8 or a GGUF"
    )


def _compressed_tensors(said: Fields) -> StoredFloat8:
    _require(said.file, NAME, said.values, {"format": ("float-quantized",), "kv_cache_scheme": (None,)})
    _require(said.file, NAME, said.values, {"sparsity_config": (None, {}), "transform_config": (None, {})})
    groups = said.section("config_groups").values
    if not groups:
        raise ModelLoadError(f"{said.file}: {NAME}.config_groups is missing")
    for name, group in groups.items():
        at = f"{NAME}.config_groups.{name}"
        if not isinstance(group, dict):
            raise ModelLoadError(f"{said.file}: {at}={group!r} is no JSON object")
        for part, allowed in (("weights", _WEIGHTS), ("input_activations", _INPUTS)):
            values = group.get(part)
            if not isinstance(values, dict):
                raise ModelLoadError(f"{said.file}: {at}.{part}={values!r} is not supported; it must say 8-bit floats")
            _require(said.file, f"{at}.{part}", values, allowed)
        _require(said.file, at, group, {"output_activations": (None,), "format": (None, "float-quantized")})
    return StoredFloat8()


def _require(file: str, at: str, values: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Each of these fields has one of the values that are understood."""
    for name, choices in allowed.items():
        value = values.get(name)
        if value not in choices:
            words = " or ".join(repr(choice) for choice in choices if choice is not None) or "none"
            raise ModelLoadError(f"{file}: {at}.{name}={value!r} is not supported; supported: {words}")
