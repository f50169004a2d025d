"""A one-line fault in a copy of the package, and whether a simulation notices it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check_caught(folder: Path, file: str, right: str, wrong: str, simulation: str, *arguments: str) -> None:
    """simulation: a module of tests.sim, which fails on the copy in this folder, and says how to replay it."""
    shutil.copytree(ROOT / "src" / "perdure", folder / "perdure", ignore=shutil.ignore_patterns("__pycache__"))
    planted = folder / "perdure" / file
    source = planted.read_text()
    assert source.count(right) == 1, "the line to change is not there any more"
    planted.write_text(source.replace(right, wrong))
    run = subprocess.run(
        [sys.executable, "-m", f"tests.sim.{simulation}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0, f"not noticed by {simulation} {' '.join(arguments)}"
    assert f"replay: python -m tests.sim.{simulation}" in run.stderr
