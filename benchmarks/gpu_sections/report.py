"""What a section is given and what it gives: its part of the report."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perdure import LLM

ROOT = Path(__file__).parents[2]

Found = dict[str, Any]
"""rows, cases, workloads, failed, not_run (what is not here): joined with those of the other sections. Anything else
stands under the section."""

SHARED: dict[str, type[dict[str, Any]] | type[list[str]]] = {
    "rows": dict, "cases": dict, "workloads": dict, "failed": list, "not_run": list,
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """folder: for files, the section's own. profile: say where the time goes, too. seconds: it is cut off after."""

    folder: Path
    profile: bool
    seconds: float


def environment_with(folder: Path) -> dict[str, str]:
    """Of a process that finds modules in this folder, too, computes on one thread and says at once what it says."""
    paths = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def workload(
    value: float,
    unit: str,
    *,
    floor: float | None = None,
    gate: float | None = None,
    goal: float | None = None,
    less_is_better: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """One figure. floor: what the hardware allows; gate: what it is held to; goal: what is hoped for."""
    met = None if gate is None else bool(value <= gate if less_is_better else value >= gate)
    return {"value": value, "unit": unit, "floor": floor, "gate": gate, "goal": goal, "gate_met": met, **more}


def claims(witnessed: Path, failed: Collection[str]) -> Found:
    """Rows and cases that tests showed, each with the values of its last test and how many tests there were; not those
    of tests that then failed."""
    found: dict[str, dict[str, Any]] = {"rows": {}, "cases": {}}
    lines = witnessed.read_text(encoding="utf-8").splitlines() if witnessed.exists() else []
    for claim in map(json.loads, lines):
        if claim["test"] in failed:
            continue
        kind = found["cases" if re.match(r"T\d", claim["id"]) else "rows"]
        tests = kind.get(claim["id"], {"tests": 0})["tests"] + 1
        kind[claim["id"]] = {"tests": tests, "values": claim["values"]}
    return {kind: dict(sorted(claimed.items())) for kind, claimed in found.items()}


def close(llm: LLM) -> None:
    """End it, so that its memory is the next one's."""
    llm.shutdown()
    gc.collect()
    torch.cuda.empty_cache()
