"""tests: what tests marked `gpu` pass here, and the rows and cases that they witnessed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gpu_sections.report import Found, Setup, claims

ROOT = Path(__file__).parents[2]


def tests(setup: Setup) -> Found:
    file = setup.folder / "witnessed"
    workers = ["-n", "14"] if find_spec("xdist") else []
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--durations=15", *workers]
    command = [sys.executable, "-m", "pytest", *options, "-m", "gpu", "tests/cuda", "tests/engine"]
    environment = os.environ | {"PERDURE_WITNESS": str(file), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if failed or done.returncode:
        print(done.stdout[-20_000:], done.stderr[-5_000:])
        failed = failed or [f"pytest ended with {done.returncode}"]
    summary = next((line for line in reversed(lines) if " passed" in line or " failed" in line), "")
    slowest = [line.strip() for line in lines if " call " in line or " setup " in line]
    return claims(file) | {"failed": failed, "summary": summary, "slowest": slowest}
