"""Kernels in Triton and the runner for CUDA: on a GPU where there is one, else on the CPU in Triton's interpreter.

- The interpreter must be chosen before a kernel is defined, so it is chosen here, before any test is imported.
- It runs a program in milliseconds and gets bfloat16 wrong: sizes are small there, and types are float32 and float16.
- That of Triton 3.6 cannot loop up to a number with numpy 2.4 or later; that of 3.9 can.
"""

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def _missing() -> str | None:
    """Why no kernel can run here; None: they can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    found, numpy = (tuple(map(int, text.split(".")[:2])) for text in (version("triton"), np.__version__))
    if not ON_GPU and found < (3, 9) and numpy >= (2, 4):
        return f"the interpreter of Triton {version('triton')} does not work with numpy {np.__version__}, 3.9's does"
    return None


MISSING = _missing()
collect_ignore_glob = [] if MISSING is None else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("gpu")


def pytest_report_header() -> str:
    where = "on the GPU" if ON_GPU else "in Triton's interpreter"
    return f"tests/cuda: {where if MISSING is None else f'not run: {MISSING}'}"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if request.param == "bfloat16" and not ON_GPU:
        pytest.skip("Triton's interpreter is wrong in bfloat16")
    return getattr(torch, request.param)


@pytest.fixture
def gpu() -> torch.device:
    if not ON_GPU:
        pytest.skip("no CUDA device here")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float16 with heads of 64, which every form of attention serves."""
    from perdure.models.tiny import make_tiny_llama

    directory = tmp_path_factory.mktemp("half") / "llama"
    return make_tiny_llama(directory, seed=1, hidden_size=256, dtype="float16")  # whose best ids lead by 0.13 at least


@pytest.fixture
def nothing_on_host(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row may be sampled on the host, and no launch may wait for what runs on the GPU."""
    from perdure.runner.cuda.runner import CudaRunner

    def sample(*_: Any) -> None:
        raise AssertionError("a row was sampled on the host")

    launch = CudaRunner._launch

    def launch_at_once(runner: CudaRunner, plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(runner, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(CudaRunner, "_sample_on_host", sample)
    monkeypatch.setattr(CudaRunner, "_launch", launch_at_once)
