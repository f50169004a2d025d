"""The speed gates on a CPU: against transformers' padded batch on the same weights, in turns, by ratio alone.

A machine that others use can spoil a turn, so a turn below the gate is followed by three more, whose median counts, by
the clock or by CPU time: what either engine loses to others is in the first and not in the second.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.helpers import gguf_to_bf16_directory
from tests.witness import witness

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
PEER = ROOT / "benchmarks" / "peers" / "transformers_cpu.py"
DATA = ROOT / "tests" / "data" / "cpu16.json"


@pytest.fixture(scope="module")
def rounded(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_to_bf16_directory(smollm2_path, tmp_path_factory.mktemp("rounded") / "model")


@pytest.mark.parametrize(("workload", "gate"), [("cpu16", 1.55), ("one", 1 / 0.68)])
def test_faster_than_transformers(workload: str, gate: float, rounded: Path, tmp_path: Path) -> None:
    against = shlex.join([sys.executable, str(PEER), "{model}", "{workload}"])
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "perdure", "bench", "offline", workload, "--model", str(rounded)]
    command += ["--data", str(DATA), "--json", str(report), "--against", against]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for turns in (1, 3):
        done = subprocess.run([*command, "--repeat", str(turns)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found = json.loads(report.read_text())
        ours, theirs = found["runs"], found["against"]["runs"]
        pairs = list(zip(ours, theirs, strict=True))
        speedup = max(
            statistics.median(their[clock] / our[clock] for our, their in pairs) for clock in ("seconds", "cpu_seconds")
        )
        if speedup >= gate:
            break
    witness(f"speed-{workload}", times_transformers=round(speedup, 2), turns=turns)
    outputs = found["outputs"]
    assert outputs["num_as_expected"] == outputs["num_expected"] > 0
    assert all(their["output_sha256"] == outputs["sha256"] for their in theirs)
    assert speedup >= gate
