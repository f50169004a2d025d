"""Named values of a model's file, each checked as it is taken, and what several families read from them alike.

- A missing or odd value is refused with the file's name and its own.
- null in JSON is as good as absent.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from perdure.api.errors import ModelLoadError
from perdure.ops.rope import SCALING_FIELDS

SMALLEST = sys.float_info.min
"""The least real number that counts as positive."""


class Fields:
    """Named values of one file."""

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        return int(self._number(name, int, default, least))

    def real(self, name: str, default: float | None = None) -> float:
        return float(self._number(name, (int, float), default, SMALLEST))

    def optional_integer(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.integer(name)

    def optional_real(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.real(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self.file}: {name}={value!r} is not true or false")
        return value

    def section(self, name: str) -> Fields:
        """The values of an object within the file; none if it is not there."""
        value = self.values.get(name)
        if not isinstance(value, dict | None):
            raise ModelLoadError(f"{self.file}: {name}={value!r} is no JSON object")
        return Fields(self.file, value or {})

    def _number(
        self, name: str, kind: type[int] | tuple[type[int], type[float]], default: float | None, least: float
    ) -> Any:
        value: Any = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelLoadError(f"{self.file}: {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:
            raise ModelLoadError(f"{self.file}: {name}={value!r} is not a positive number of its kind")
        return value


def rope_fields(fields: Fields) -> Fields:
    """What newer config.json call rope_parameters and older ones rope_scaling."""
    newer = fields.section("rope_parameters")
    if "full_attention" in newer.values:  # one section a kind of layer
        return newer.section("full_attention")
    return newer if newer.values else fields.section("rope_scaling")


def rope_scaling(rope: Fields) -> Mapping[str, Any] | None:
    """The scaling of rotary positions (`ops.rope.inverse_frequencies`) that a section states; None = none."""
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SCALING_FIELDS:
        supported = ", ".join(SCALING_FIELDS)
        raise ModelLoadError(f"{rope.file}: rope_type={kind!r} is not supported; supported: {supported}")
    return {"rope_type": kind} | {name: rope.real(name) for name in SCALING_FIELDS[kind]}


def layer_types(fields: Fields, num_layers: int) -> list[bool] | None:
    """Which layers have a window, as config.json lists them; None when it does not."""
    listed = fields.values.get("layer_types")
    if listed is None:
        return None
    known = {"sliding_attention": True, "full_attention": False}
    if not isinstance(listed, list) or len(listed) != num_layers or not set(listed) <= set(known):
        raise ModelLoadError(
            f"{fields.file}: layer_types={listed!r} does not name {' or '.join(known)} for each of {num_layers} layers"
        )
    return [known[name] for name in listed]
