"""engine, kernels, storms, flashinfer: what tests marked `gpu` pass here, and the rows and cases that they witnessed.

Among the tests are real models' recorded results, where the model is installed, and every kernel against its reference.
Two come apart: storms, the longest test, whose seeds can run side by side; and FlashInfer's, since its kernels are
compiled when first used, which takes minutes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec

from gpu_sections.report import ROOT, Found, Setup, claims, environment_with
from perdure.ops.attention import flash_attention

WORKERS = {"engine": 5, "kernels": 7}  # beside the others; most of the time goes into compiling
WHOLE = [f"tests/cuda/test_{name}.py" for name in ("engine", "engine_sampling", "invariance", "memory", "runner")]
"""Of whole requests and steps; the others are of kernels."""
STORM_SEEDS = 4  # of ten storms each
MARGIN = 10  # seconds before a section's end


OTHERS = "not flashinfer and not storm"
FILTERS = [
    f"{name}-{weights}-{scores}"
    for name in ("top-k", "top-p", "joint")
    for weights in ("shared", "per_replica")
    for scores in ("raw", "processed")
]
BY_FLASHINFER = ("back-fa2", "sampling-flashinfer-kept", *(f"sample-flashinfer-{name}" for name in FILTERS))
EXPECTED = (
    *("T11", "T38", "T41", "T45", "T58", "T59", "T61", "T66", "cpu16", "storm", "structured-cuda"),
    *("back-optimized", "burst", "burst-ends-on-device", "burst-runner"),
    *("feat-alternating-swa-sink", "feat-cuda-graph", "feat-fp8", "feat-fused-rope", "feat-swa-sink"),
    *("invariant-padding-boundary", "invariant-products", "life-offload-fp8", "life-uvm-reset"),
    *(f"life-{how}-{form}" for how in ("sync", "async") for form in ("persist", "offload", "recompute")),
    *(f"graph-{rule}-all{n}" for rule in ("exponential", "linear", "hybrid") for n in (0, 1)),
    *("sampling-cuda-adjusted", "sampling-cuda-draw", "vpage-admission", "vpage-saturation"),
    *(f"sample-torch-{name}" for name in FILTERS),
)
"""Rows and cases that tests on a GPU witness."""


def engine(setup: Setup) -> Found:
    return run_pytest(setup, WORKERS["engine"], "-m", "gpu", "-k", OTHERS, *WHOLE, "tests/engine")


def kernels(setup: Setup) -> Found:
    ignored = [f"--ignore={path}" for path in WHOLE]
    found = run_pytest(setup, WORKERS["kernels"], "-m", "gpu", "-k", OTHERS, "tests/cuda", *ignored)
    missing = [] if flash_attention.is_installed() else ["back-fa4: flash-attn-4 is not installed"]
    return found | {"not_run": [*found.get("not_run", []), *missing]}


def storms(setup: Setup) -> Found:
    """With graphs and two steps in flight; each finished request equals its solo run (`tests/engine/storm.py`)."""
    environment = environment_with(ROOT / "src")
    marks: Counter[str] = Counter()
    failed: list[str] = []

    def run(seed: int) -> None:
        command = [sys.executable, "-m", "tests.engine.storm", "--device", "cuda", "--seed", str(seed)]
        log = setup.folder / str(seed)
        with log.open("w") as out:
            try:
                seconds = setup.seconds - MARGIN
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=seconds
                )
                why = f"ended with {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                why = f"cut off after {seconds:.0f} s"
        if why:
            failed.append(f"storms: seed {seed} {why}")
            print(log.read_text(errors="replace")[-6_000:])
        else:
            marks.update({name: int(count) for name, count in re.findall(r"^  (.+): (\d+)$", log.read_text(), re.M)})

    with ThreadPoolExecutor(STORM_SEEDS) as pool:
        list(pool.map(run, range(STORM_SEEDS)))
    seeds = STORM_SEEDS - len(failed)
    rows = {"storm": {"tests": seeds, "values": dict(sorted(marks.items()))}} if marks else {}
    return {"rows": rows, "failed": failed}


def flashinfer(setup: Setup) -> Found:
    if find_spec("flashinfer") is None:
        return {"not_run": ["flashinfer: flashinfer-python is not installed"]}
    os.environ.setdefault("MAX_JOBS", "5")  # compilers at a time: each kind of attention is ten files
    files = [f"tests/cuda/test_{name}.py" for name in ("flashinfer", "engine_sampling", "sampling")]
    return run_pytest(setup, 3, "-m", "gpu", "-k", "flashinfer", *files, dist="load")


def unseen(names: Collection[str], report: Found) -> list[str]:
    """Of a run of these sections: rows and cases that should be shown, and were not."""
    if not {"engine", "kernels", "storms"} <= {*names}:
        return []
    expected = EXPECTED + BY_FLASHINFER * ("flashinfer" in names and find_spec("flashinfer") is not None)
    expected += ("back-fa4",) * flash_attention.is_installed()
    shown = report["rows"].keys() | report["cases"].keys()
    return [f"{name} was not shown" for name in expected if name not in shown]


def run_pytest(setup: Setup, workers: int, *what: str, dist: str = "worksteal") -> Found:
    """What passed and failed, also of a run that its time was too short for. dist: how xdist shares tests out; "load"
    hands them out in turn, a few at a time."""
    file, log = setup.folder / "witnessed", setup.folder / "log"
    options = ["-v", "-p", "no:cacheprovider", "-p", "gpu_sections.at_once", "--tb=short", "--durations=15"]
    options.append(f"--basetemp={setup.folder / 'files'}")
    if find_spec("xdist"):
        options += ["-n", str(workers), "--dist", dist]
    command = [sys.executable, "-m", "pytest", *options, *what]
    environment = environment_with(ROOT / "benchmarks") | {"PERDURE_WITNESS": str(file)}
    with log.open("w") as out:
        seconds = setup.seconds - MARGIN
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)  # it tells of what failed until then
            with suppress(subprocess.TimeoutExpired):
                process.wait(MARGIN / 2)
            process.kill()
    text = log.read_text(errors="replace")
    lines = text.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    of_tests = {line.partition("FAILED ")[2].partition(" - ")[0].strip() for line in lines if "FAILED tests/" in line}
    summary = next((line for line in reversed(lines) if " passed" in line or " failed" in line), "")
    if code is None:  # there is no summary
        failed = failed or [line for line in lines if " FAILED" in line]
        failed.append(f"pytest was cut off after {seconds:.0f} s")
        summary = f"{text.count(' PASSED')} passed until it was cut off"
    elif code and not failed:
        failed = [f"pytest ended with {code}"]
    elif " passed" not in summary:
        failed.append("pytest passed nothing")
    if failed:
        print(text[-100_000:])
    slowest = [line.strip() for line in lines if " call " in line or " setup " in line]
    skipped = [line.replace(str(ROOT.parent), "..") for line in lines if line.startswith("SKIPPED")]
    return claims(file, of_tests) | {"failed": failed, "summary": summary, "slowest": slowest, "skipped": skipped}
