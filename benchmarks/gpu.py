"""The engine on a GPU: what its tests show, whole jobs against what the hardware allows, and where time goes.

    python benchmarks/gpu.py [--only tests,parity,attention,wake,nano,...,sampling] [--profile] [--json FILE]

A section is a function in `gpu_sections` and a line in `SECTIONS`. The report has rows and cases with the values that
tests read from the engine, and workloads with value, unit, floor, gate and goal.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_sections.attention import attention
from gpu_sections.jobs import JOBS, job
from gpu_sections.parity import parity
from gpu_sections.report import SHARED, Found, Setup
from gpu_sections.sampling import sampling
from gpu_sections.sanitizer import sanitizer
from gpu_sections.shown import tests
from gpu_sections.wake import wake

SECTIONS: dict[str, Callable[[Setup], Found]] = {
    "tests": tests,
    "parity": parity,
    "attention": attention,
    "sanitizer": sanitizer,
    "wake": wake,
    **{name: partial(job, name) for name in JOBS},
    "sampling": sampling,
}


ALWAYS = {"value", "unit", "floor", "gate", "goal", "gate_met", "kernels"}


def show(name: str, found: Found, seconds: float) -> None:
    """A line a figure, for who waits for it."""
    counts = ", ".join(f"{len(found[kind])} {kind}" for kind in SHARED if found.get(kind))
    print(f"{name}: {seconds:.0f} s, {counts}", flush=True)
    for what, one in found.get("workloads", {}).items():
        bounds = ", ".join(f"{bound} {one[bound]:g}" for bound in ("floor", "gate", "goal") if one[bound] is not None)
        print(f"  {what}: {one['value']:g} {one['unit']} ({bounds})")
        for key in sorted(one.keys() - ALWAYS):
            print(f"    {key}: {one[key]}")
        for line in one.get("kernels", ()):
            print(f"    {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, in this order")
    parser.add_argument("--profile", action="store_true", help="a table of kernels for each workload")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    begin = time.monotonic()
    report: dict[str, Any] = {
        "command": f"python benchmarks/gpu.py --only {args.only}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}",
        "seconds": {},
        **{kind: make() for kind, make in SHARED.items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            own = Path(folder) / name
            own.mkdir()
            started = time.monotonic()
            try:
                found = SECTIONS[name](Setup(own, args.profile))
            except Exception as error:  # the others are worth having
                found = {"failed": [f"{name}: {type(error).__name__}: {error}"]}
            report["seconds"][name] = round(time.monotonic() - started, 1)
            for kind, values in found.items():
                if kind not in SHARED:
                    report.setdefault(name, {})[kind] = values
                elif kind == "failed":
                    report[kind] += values
                else:
                    report[kind] |= values
            show(name, found, report["seconds"][name])
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    below = [name for name, one in report["workloads"].items() if one["gate_met"] is False]
    print(f"{time.monotonic() - begin:.0f} s in all")
    print(*report["failed"], *(f"{name} misses its gate" for name in below), sep="\n")
    return int(bool(report["failed"] or below))


if __name__ == "__main__":
    sys.exit(main())
