"""The numerics fingerprint of an engine: what the bits of its results depend on (`api.fingerprint`)."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import numpy as np
import torch

from perdure import __version__
from perdure.api.fingerprint import Fingerprint
from perdure.models.weights import LoadedModel
from perdure.runner.runner import Runner

if TYPE_CHECKING:
    from perdure.runner.cuda.runner import CudaRunner


def fingerprint_of(loaded: LoadedModel, runner: Runner | CudaRunner) -> Fingerprint:
    """Products choose their kernels by the kind of processor, and threads share out their sums. The size of a page
    counts where it is part of a tile."""
    kernels = loaded.kernels
    packed = [shape for shape, words in loaded.products.items() if words.startswith("packed")]
    filters = "" if runner.sampling_backend == "torch" else f", {runner.sampling_backend} filters"
    narrow = " in e4m3" if loaded.quantization == "fp8" else ""
    products = f"{kernels.name} products{narrow}" + (f" ({', '.join(packed)} packed)" if packed else "")
    return Fingerprint(
        weights=loaded.weights.digest,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=_device() if isinstance(runner, Runner) else _gpu(),
        kernels=f"{products}, {runner.attention} attention{filters}, {kernels.version}",
        threads=str(torch.get_num_threads()) if isinstance(runner, Runner) else "",
        libraries=f"perdure {__version__}, torch {torch.__version__}, numpy {np.__version__}",
    )


def _gpu() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"cuda {torch.version.cuda}, {torch.cuda.get_device_name()}, sm_{major}{minor}"


def _device() -> str:
    return f"cpu, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {_processor()}"


def _processor() -> str:
    """The processor's name, family and model, as far as the system says."""
    fields: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                fields.setdefault(name.strip(), value.strip())
    except OSError:
        return platform.processor()
    return " ".join(fields[name] for name in ("model name", "cpu family", "model") if name in fields)
