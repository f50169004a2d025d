"""Kernels compile for a GPU, in the types that the interpreter does not have (`compiled`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.conftest import ON_GPU

ROOT = Path(__file__).parents[2]
LAUNCHED = {
    "_adjust_kernel", "combine_kernel", "_decode_kernel", "_draw_kernel", "_few_best_kernel",
    "_few_rows_kernel", "_fill_kernel", "_filter_kernel", "_finish_kernel", "_gated_kernel", "join_kernel",
    "_learn_kernel", "_mass_kernel", "_norm_kernel", "_prompt_kernel", "_quantise_kernel", "_rotations_kernel",
    "_scale_kernel", "_score_kernel", "_turn_and_write_kernel", "_turn_kernel", "_write_kernel",
}  # fmt: skip


@pytest.mark.skipif(ON_GPU, reason="a GPU compiles what it runs")
def test_a_step_in_bfloat16_over_pages_of_8_bits():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    command = [sys.executable, "-m", "tests.cuda.compiled"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout).keys() == LAUNCHED
