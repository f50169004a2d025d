"""sanitizer: tests of each kernel at small sizes under NVIDIA's compute-sanitizer, which watches every access.

- memcheck: outside of what was allocated, or misaligned. Kernels are run with each tensor allocated by itself; a graph
  needs torch's allocator, so steps in graphs are watched over its blocks.
- racecheck: threads of a block that meet in shared memory without a barrier. Where a kernel says which warps do what,
  Triton hands them their part in a way of its own that racecheck does not follow. That is counted, and fails nothing.

Each must have seen every kernel there is, and no test that is named may be skipped.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gpu_sections.report import ROOT, Found, Setup, environment_with
from perdure.ops import gluon

LARGE = (6144, 4096, 4097, 14336, 20000, 3072, 1536, 256, 600, "both")
SMALL = " and ".join(f"not {size}" for size in LARGE)
"""Of products, rows, heads and kinds of attention."""
ONE_HALF = "not -float16 and not [float16"  # which goes the way of bfloat16
KERNELS = (
    "tests/cuda/test_rows.py",
    "tests/cuda/test_few_rows.py",
    "tests/cuda/test_linear.py::test_products",
    "tests/cuda/test_gated.py::test_a_product_with_its_gate",
    "tests/cuda/test_float8.py::test_keys_and_values_are_rounded_as_on_a_cpu",
    "tests/cuda/test_float8.py::test_rows_are_rounded_as_on_a_cpu",
    "tests/cuda/test_float8.py::test_products",
    "tests/cuda/test_sampling.py::test_forced_tokens_and_unusable_rows",
    "tests/cuda/test_sampling.py::test_scores",
    "tests/cuda/test_sampling.py::test_masses_of_what_is_kept",
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
    "tests/cuda/test_attention.py::test_ranges_are_joined_and_pages_fetched",
    "tests/cuda/test_float8.py::test_attention_over_pages_of_8_bits_is_that_over_their_values[bfloat16-32-plain]",
    "tests/cuda/test_float8.py::test_attention_over_pages_of_8_bits_is_that_over_their_values[bfloat16-24-window]",
    "tests/cuda/test_attention.py::test_short_prompts",
)  # fmt: skip
"""Those whose reference computes on the CPU, or over few pages: every kernel of it would be watched, too."""
STEPS = (
    "tests/cuda/test_runner.py::test_the_same_life_as_on_a_cpu",
    "tests/cuda/test_runner.py::test_a_row_that_ends_in_a_burst_writes_no_more",
    "tests/cuda/test_runner.py::test_T59_padding_writes_nowhere",
)
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
OF_16_BITS = {"racecheck": "not float32"}  # it takes long, and types of 32 bits go the same ways
RUNS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "memcheck": ("memcheck", KERNELS, ALONE),
    "memcheck of attention": ("memcheck", ATTENTION, ALONE),
    "memcheck of steps in graphs": ("memcheck", STEPS, {}),
    "racecheck": ("racecheck", KERNELS, ALONE),
    "racecheck of attention": ("racecheck", ATTENTION, ALONE),
    "racecheck of a burst": ("racecheck", STEPS[1:2], {}),
}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Of the modules with kernels, each with its module's name."""
    for path in (ROOT / "src/perdure/ops/triton").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield path.stem, node


def all_kernels() -> set[str]:
    """What is launched, as "module.kernel"; what is for another GPU or another Triton than those here is not."""
    here = ("triton",) if gluon.why_not(torch.device("cuda")) else ("triton", "gluon")
    return {
        f"{module}.{function.name}"
        for module, function in functions()
        if function.name.endswith("_kernel")
        and any(ast.unparse(decorator).partition(".")[0] in here for decorator in function.decorator_list)
    }


def hand_overs() -> set[str]:
    """Lines, as "file:line", at which Triton hands warps their part: of a kernel that says which do what, and where it
    says it. Such a kernel itself reads and writes nothing there."""
    found = set()
    for module, function in functions():
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        specialised = [call.lineno for call in calls if ast.unparse(call.func).endswith(".warp_specialize")]
        if specialised:
            found |= {f"{module}.py:{line}" for line in (function.lineno, *specialised)}
    return found


def races(text: str) -> tuple[int, int]:
    """Reported by racecheck: in all, and those at `hand_overs` only."""
    each = [set(re.findall(r"access at \S+ in (\S+:\d+)", one)) for one in text.split("Race reported between ")[1:]]
    known = hand_overs()
    return len(each), sum(bool(lines) and lines <= known for lines in each)


def sanitizer(setup: Setup) -> Found:
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"failed": ["sanitizer: there is no compute-sanitizer here"]}

    def launched(name: str) -> Path:
        return setup.folder / f"{name.replace(' ', '-')}.launched"

    def run(name: str) -> Found:
        tool, tests, environment = RUNS[name]
        log = setup.folder / name.replace(" ", "-")
        pytest = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", *tests]
        pytest += ["-p", "gpu_sections.launched"]
        chosen = " and ".join((SMALL, ONE_HALF, *([OF_16_BITS[name]] if name in OF_16_BITS else [])))
        pytest += ["-k", chosen, f"--basetemp={log}.files"]
        with log.open("w") as out:
            try:
                code = subprocess.run(
                    [program, "--tool", tool, "--error-exitcode", "9", *pytest],
                    cwd=ROOT,
                    env=environment_with(ROOT / "benchmarks") | environment | {"PERDURE_LAUNCHED": str(launched(name))},
                    stdout=out,
                    stderr=out,
                    timeout=setup.seconds - 10,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        text = log.read_text(errors="replace")
        found: Found = {name: re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*|\d+ passed.*", text)}
        reported, handed_over = races(text)
        if reported:
            found[name].append(f"{reported} races reported, {handed_over} of them where Triton hands warps their part")
            if code == 9 and reported == handed_over and not re.search(r"\d+ failed", text):
                code = 0
        if code is None:
            errors = len(re.findall(r"=========     at ", text))
            found[name] = [f"cut off after {text.count(' PASSED')} tests passed, {errors} errors until then"]
        if code != 0:
            print(text[-6_000:])
            found["failed"] = [f"sanitizer: {name} " + ("was cut off" if code is None else f"ended with {code}")]
        elif " SKIPPED" in text and not gluon.why_not(torch.device("cuda")):
            found["failed"] = [f"sanitizer: {name} skipped tests"]
        return found

    with ThreadPoolExecutor() as pool:
        each = list(pool.map(run, RUNS))
    failed = [one for found in each for one in found.pop("failed", ())]
    watched: dict[str, list[str]] = {}
    for tool in ("memcheck", "racecheck"):
        files = [launched(name) for name in RUNS if RUNS[name][0] == tool]
        names = {line for file in files if file.exists() for line in file.read_text().split()}
        watched[f"kernels watched by {tool}"] = sorted(names)
        failed += [f"sanitizer: {tool} saw no launch of {name}" for name in sorted(all_kernels() - names)]
    return {name: lines for found in each for name, lines in found.items()} | watched | {"failed": failed}
