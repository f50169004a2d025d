"""The engine on a GPU: what its tests show, whole jobs against what the hardware allows, and where time goes.

    python benchmarks/gpu.py [--only engine,storms,...,nano,...] [--limit SECONDS] [--profile] [--json FILE]

- A section is a function in `gpu_sections` and a line in `SECTIONS`, with the most seconds it may take. Each runs in a
  process of its own: one that hangs, or that breaks the device for its process, costs no other.
- What is only right or wrong comes first, side by side; then what watches every access, which keeps others from the
  GPU (not from compiling); then, in turn, what is timed.
- `--limit`: when so many seconds are over, nothing more is begun, and the report says what was not run. Ten minutes are
  enough on 16 cores; with more, each section may take longer, too.

The report has rows and cases with the values that tests read from the engine, and workloads with value, unit, floor,
gate and goal. It is written after every section.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_sections.attention import attention
from gpu_sections.jobs import JOBS, costs, job
from gpu_sections.parity import parity
from gpu_sections.report import SHARED, Found, Setup
from gpu_sections.sampling import sampling
from gpu_sections.sanitizer import sanitizer
from gpu_sections.serving import serving
from gpu_sections.shown import engine, flashinfer, kernels, storms, unseen
from gpu_sections.wake import wake


class Section(NamedTuple):
    """seconds: it is cut off after so many. is_alone: it is not one of those side by side. is_long: it mostly compiles,
    and may go on beside what is alone, unless that is_timed."""

    run: Callable[[Setup], Found]
    seconds: int
    is_alone: bool = True
    is_long: bool = False
    is_timed: bool = True


def _job(name: str) -> dict[str, Section]:
    return {name: Section(partial(job, name), 75)}


SECTIONS: dict[str, Section] = {
    "engine": Section(engine, 250, is_alone=False),
    "kernels": Section(kernels, 250, is_alone=False),
    "storms": Section(storms, 170, is_alone=False),
    "parity": Section(parity, 170, is_alone=False),
    "flashinfer": Section(flashinfer, 300, is_alone=False, is_long=True),
    "sanitizer": Section(sanitizer, 120, is_timed=False),
    "attention": Section(attention, 75),
    **_job("nano"),
    **_job("b64"),
    **_job("b256"),
    **_job("b1"),
    **_job("q1"),
    "wake": Section(wake, 60),
    "serving": Section(serving, 60),
    **_job("b64-fp8"),
    "sampling": Section(sampling, 75),
    **_job("b64 invariant"),
    **_job("b256 invariant"),
    **_job("nano invariant"),
    **_job("nano without bursts"),
    **_job("b256-fp8"),
}
ASKED_FOR = ("b256-fp8",)  # run only where they are named
assert {*JOBS} <= {*SECTIONS}, "a job that nothing runs"
LIMIT = 585  # seconds of a whole run that sections' own are for
LEAST_SECONDS = 20  # that are left when a section is begun

CLAIMS = ("rows", "cases")
SECONDS = "seconds"  # that a section took, in what its process found
ALWAYS = {"value", "unit", "floor", "gate", "goal", "gate_met", "kernels"}


class Child:
    """A process that imports what a section needs, and runs it once it is told until when it may."""

    def __init__(self, name: str, folder: Path, profile: bool) -> None:
        self.name = name
        self._folder = folder / name.replace(" ", "-")
        self._folder.mkdir()
        self._out = self._folder / "out"
        command = [sys.executable, __file__, "--run", name, "--folder", str(self._folder)]
        with self._out.open("w") as out:
            self._process = subprocess.Popen(
                command + ["--profile"] * profile,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                text=True,
                start_new_session=True,
            )
        self._begun: float | None = None
        self._seconds = 0.0

    def begin(self, seconds: float) -> None:
        self._begun, self._seconds = time.monotonic(), seconds
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._begun + seconds}\n")
        self._process.stdin.close()

    def end(self) -> tuple[Found, float]:
        """What it found, and after how many seconds."""
        assert self._begun is not None
        why = ""
        try:
            code = self._process.wait(max(0.0, self._begun + self._seconds - time.monotonic()))
            why = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"cut off after {self._seconds:.0f} s"
        self.kill()
        print(self._out.read_text(errors="replace")[-100_000:], end="")
        file = self._folder / "found.json"
        found: Found = json.loads(file.read_text()) if file.exists() else {}
        seconds = found.pop(SECONDS, time.monotonic() - self._begun)
        return (found | {"failed": [*found.get("failed", ()), f"{self.name}: {why}"]} if why else found), seconds

    def kill(self) -> None:
        """End it with all it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_child(name: str, folder: Path, profile: bool) -> int:
    """The other side of `Child`: run a section when there is a line that says until when (all clocks here are one)."""
    line = sys.stdin.readline()
    if not line:
        return 0
    begin = time.monotonic()
    try:
        found = SECTIONS[name].run(Setup(folder, profile, float(line) - time.monotonic()))
    except Exception as error:
        found = {"failed": [f"{name}: {type(error).__name__}: {error}"]}
    found[SECONDS] = round(time.monotonic() - begin, 1)
    (folder / "found.json").write_text(json.dumps(found))
    return 0


def _commit() -> str | None:
    """Of the tree, where git knows."""
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    return None


def _versions() -> list[str]:
    """Of what figures may depend on, as far as it is here."""
    found = [f"Python {platform.python_version()}", f"CUDA {torch.version.cuda}"]
    for package in ("torch", "triton", "transformers", "flashinfer-python", "flash-attn-4"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return found


class Report:
    """What all sections found, on the screen and in a file."""

    def __init__(self, command: str, file: Path | None) -> None:
        self._file = file
        self.values: dict[str, Any] = {
            "command": command,
            "commit": _commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "device": torch.cuda.get_device_name(),
            "versions": ", ".join(_versions()),
            "seconds": {},
            **{kind: make() for kind, make in SHARED.items()},
        }

    def add(self, name: str, found: Found, seconds: float) -> None:
        self.values["seconds"][name] = round(seconds, 1)
        for kind, values in found.items():
            if kind not in SHARED:
                self.values.setdefault(name, {})[kind] = values
            elif isinstance(values, list):
                self.values[kind] += values
            elif kind in CLAIMS:
                before = self.values[kind]
                for shown, one in values.items():
                    tests = one["tests"] + before.get(shown, {"tests": 0})["tests"]
                    before[shown] = {**one, "tests": tests}
            else:
                self.values[kind] |= values
        show(name, found, seconds)
        if self._file:
            self._file.write_text(json.dumps(self.values, indent=1) + "\n")


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


def run_all(names: list[str], report: Report, end: float, profile: bool) -> None:
    """Those that may be side by side, then the others in turn, timed ones last. The next one imports while one runs."""
    longer = max(1.0, (end - time.monotonic()) / LIMIT)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        children: list[Child] = []

        def make(name: str) -> Child:
            children.append(Child(name, Path(folder), profile))
            return children[-1]

        def add(child: Child) -> None:
            report.add(child.name, *child.end())

        def begin(child: Child) -> None:
            child.begin(min(longer * SECTIONS[child.name].seconds, end - time.monotonic()))

        try:
            beside = [make(name) for name in names if not SECTIONS[name].is_alone]
            alone = sorted((name for name in names if SECTIONS[name].is_alone), key=lambda x: SECTIONS[x].is_timed)
            for child in beside:
                begin(child)
            following = make(alone[0]) if alone else None
            late = [child for child in beside if SECTIONS[child.name].is_long]
            for child in beside:
                if child not in late:
                    add(child)
            for at, name in enumerate(alone):
                while late and SECTIONS[name].is_timed:
                    add(late.pop())
                if end - time.monotonic() < LEAST_SECONDS:
                    report.add(name, {"failed": [f"{name}: not begun, no time was left"]}, 0)
                    continue
                child = following or make(name)
                begin(child)
                following = make(alone[at + 1]) if at + 1 < len(alone) else None
                add(child)
            for child in late:
                add(child)
        finally:
            for child in children:
                child.kill()


def main() -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ",".join(name for name in SECTIONS if name not in ASKED_FOR)
    parser.add_argument("--only", default=usual, help="sections, in this order, timed ones last")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds; then nothing is begun or goes on")
    parser.add_argument("--profile", action="store_true", help="tables of kernels; how long nano waits for the host")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run_child(args.run, args.folder, args.profile)
    names = args.only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    command = f"python benchmarks/gpu.py --only {args.only} --limit {args.limit:g}" + " --profile" * args.profile
    report = Report(command, args.json)
    run_all(names, report, begin + args.limit, args.profile)
    values = report.values
    report.add("costs", {"workloads": costs(values["workloads"])}, 0)
    report.add("all", {"failed": unseen(names, values)}, time.monotonic() - begin)
    below = [name for name, one in values["workloads"].items() if one["gate_met"] is False]
    print(*values["failed"], *values["not_run"], *(f"{name} misses its gate" for name in below), sep="\n")
    return int(bool(values["failed"] or below))


if __name__ == "__main__":
    sys.exit(main())
