"""sanitizer: tests of each kernel at small sizes under NVIDIA's compute-sanitizer, which watches every access.

memcheck: outside of what was allocated (each tensor by itself then), or misaligned. racecheck: threads of a block that
meet in shared memory without a barrier.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_sections.report import Found, Setup

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/cuda/test_rows.py",
    "tests/cuda/test_linear.py::test_products",
    "tests/cuda/test_attention.py::test_against_the_reference",
    "tests/cuda/test_sampling.py::test_forced_tokens_and_unusable_rows",
    "tests/cuda/test_sampling.py::test_scores",
)
SMALL = "not 6144 and not 4096 and not 3072 and not 1536 and not 256 and not float16"
"""Of products and heads; float16 goes the way of bfloat16."""


def sanitizer(setup: Setup) -> Found:
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"failed": ["sanitizer: there is no compute-sanitizer here"]}
    found: Found = {"failed": []}
    for tool in ("memcheck", "racecheck"):
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *TESTS, "-k", SMALL]
        done = subprocess.run(
            [program, "--tool", tool, "--error-exitcode", "9", *pytest],
            cwd=ROOT,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        found[tool] = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*|\d+ passed.*", done.stdout)
        if done.returncode:
            print(done.stdout[-10_000:], done.stderr[-3_000:])
            found["failed"].append(f"sanitizer: {tool} ended with {done.returncode}")
    return found
