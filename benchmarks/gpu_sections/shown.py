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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from gpu_sections.report import Found, Setup, claims

ROOT = Path(__file__).parents[2]
WORKERS = {"engine": 5, "kernels": 7}  # beside the others; most of the time goes into compiling
WHOLE = [f"tests/cuda/test_{name}.py" for name in ("engine", "engine_sampling", "invariance", "memory", "runner")]
"""Of whole requests and steps; the others are of kernels."""
STORM_SEEDS = 4  # of ten storms each
MARGIN = 10  # seconds before a section's end


OTHERS = "not flashinfer and not storm"


def engine(setup: Setup) -> Found:
    return run_pytest(setup, WORKERS["engine"], "-m", "gpu", "-k", OTHERS, *WHOLE, "tests/engine")


def kernels(setup: Setup) -> Found:
    ignored = [f"--ignore={path}" for path in WHOLE]
    return run_pytest(setup, WORKERS["kernels"], "-m", "gpu", "-k", OTHERS, "tests/cuda", *ignored)


def storms(setup: Setup) -> Found:
    """With graphs, up to four steps in flight; each finished request equals its solo run (`tests/engine/storm.py`)."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
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


def run_pytest(setup: Setup, workers: int, *what: str, dist: str = "worksteal") -> Found:
    """What passed and failed, also of a run that its time was too short for. dist: how xdist shares tests out; "load"
    hands them out in turn, a few at a time."""
    file, log = setup.folder / "witnessed", setup.folder / "log"
    options = ["-v", "-p", "no:cacheprovider", "-p", "gpu_sections.at_once", "--tb=short", "--durations=15"]
    options.append(f"--basetemp={setup.folder / 'files'}")
    if find_spec("xdist"):
        options += ["-n", str(workers), "--dist", dist]
    command = [sys.executable, "-m", "pytest", *options, *what]
    environment = os.environ | {"PERDURE_WITNESS": str(file), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")))
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
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    return claims(file, of_tests) | {"failed": failed, "summary": summary, "slowest": slowest, "skipped": skipped}
