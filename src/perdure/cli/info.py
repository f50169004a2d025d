"""`perdure info`: what a command would run: the configuration as resolved, the weights, the pool."""

from __future__ import annotations

import json
from typing import Any

from perdure.cli.options import EngineOptions, JsonOption, spelled_out
from perdure.cli.output import write

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@spelled_out
def info(engine: EngineOptions, as_json: JsonOption = False) -> None:
    """Show the model and every setting as resolved."""
    settings = engine.settings()

    from perdure import LLM

    with LLM(**settings) as llm:
        found = llm.describe()
    if as_json:
        write(json.dumps(found) + "\n")
        return
    width = max(map(len, found))
    write("".join(f"{name:<{width}}  {_worded(name, value)}\n" for name, value in found.items()))


def _worded(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int):
        return in_units(value)
    if isinstance(value, int) and name != "seed":
        return f"{value:,}"
    return str(value)


def in_units(num_bytes: int) -> str:
    """A size for people, in the largest unit of which there is at least one."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} bytes"
