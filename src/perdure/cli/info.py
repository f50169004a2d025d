"""`perdure info`: what a command would run: the configuration as resolved, the weights, the pool."""

from __future__ import annotations

import json
from typing import Any

from perdure.api.units import in_units
from perdure.cli.options import EngineOptions, JsonOption, spelled_out
from perdure.cli.output import write


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
