"""sanitizer: tests of each kernel at small sizes under NVIDIA's compute-sanitizer, which watches every access.

- memcheck: outside of what was allocated, or misaligned. Kernels are run with each tensor allocated by itself; a graph
  needs torch's allocator, so steps in graphs are watched over its blocks.
- racecheck: threads of a block that meet in shared memory without a barrier.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_sections.report import Found, Setup

ROOT = Path(__file__).parents[2]
SMALL = (
    "not 6144 and not 4096 and not 14336 and not 20000 and not 3072 and not 1536 and not 256 and not 600 and not both"
)
"""Of products, rows, heads and kinds of attention."""
ONE_HALF = "not -float16 and not [float16"  # which goes the way of bfloat16
KERNELS = (
    "tests/cuda/test_rows.py",
    "tests/cuda/test_few_rows.py",
    "tests/cuda/test_linear.py::test_products",
    "tests/cuda/test_float8.py::test_keys_and_values_are_rounded_as_on_a_cpu",
    "tests/cuda/test_float8.py::test_rows_are_rounded_as_on_a_cpu",
    "tests/cuda/test_float8.py::test_products",
    "tests/cuda/test_sampling.py::test_forced_tokens_and_unusable_rows",
    "tests/cuda/test_sampling.py::test_scores",
    "tests/cuda/test_device_sampler.py::test_a_life_of_steps",
)
ATTENTION = (
    *(
        f"tests/cuda/test_attention.py::test_against_the_reference[{kind}]"
        for kind in (
            "bfloat16--(16, 8, 128)-16-plain", "bfloat16--(16, 8, 128)-16-window", "float32--(16, 8, 128)-16-cap",
            "bfloat16-invariant-(16, 8, 128)-16-plain",
        )
    ),
    "tests/cuda/test_float8.py::test_attention_over_pages_of_8_bits_is_that_over_their_values[bfloat16-32-plain]",
    "tests/cuda/test_float8.py::test_attention_over_pages_of_8_bits_is_that_over_their_values[bfloat16-24-window]",
    "tests/cuda/test_attention.py::test_short_prompts",
)  # fmt: skip
"""Those whose reference computes on the CPU, or over few pages: every kernel of it would be watched, too."""
STEPS = (
    "tests/cuda/test_runner.py::test_the_same_life_as_on_a_cpu",
    "tests/cuda/test_runner.py::test_T59_padding_writes_nowhere",
)
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
RUNS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "memcheck": ("memcheck", KERNELS, ALONE),
    "memcheck of attention": ("memcheck", ATTENTION, ALONE),
    "memcheck of steps in graphs": ("memcheck", STEPS, {}),
    "racecheck": ("racecheck", KERNELS, ALONE),
    "racecheck of attention": ("racecheck", ATTENTION, ALONE),
}


def sanitizer(setup: Setup) -> Found:
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"failed": ["sanitizer: there is no compute-sanitizer here"]}

    def run(name: str) -> Found:
        tool, tests, environment = RUNS[name]
        log = setup.folder / name.replace(" ", "-")
        pytest = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", *tests]
        pytest += ["-k", f"{SMALL} and {ONE_HALF}", f"--basetemp={log}.files"]
        with log.open("w") as out:
            try:
                code = subprocess.run(
                    [program, "--tool", tool, "--error-exitcode", "9", *pytest],
                    cwd=ROOT,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment,
                    stdout=out,
                    stderr=out,
                    timeout=setup.seconds - 10,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        text = log.read_text(errors="replace")
        found: Found = {name: re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*|\d+ passed.*", text)}
        if code is None:
            errors = len(re.findall(r"=========     at ", text))
            found[name] = [f"cut off after {text.count(' PASSED')} tests passed, {errors} errors until then"]
        if code != 0:
            print(text[-6_000:])
            found["failed"] = [f"sanitizer: {name} " + ("was cut off" if code is None else f"ended with {code}")]
        return found

    with ThreadPoolExecutor() as pool:
        each = list(pool.map(run, RUNS))
    failed = [one for found in each for one in found.pop("failed", ())]
    return {name: lines for found in each for name, lines in found.items()} | {"failed": failed}
