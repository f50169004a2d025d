"""Kernels in Triton and the runner for CUDA: on a GPU where there is one, else on the CPU in Triton's interpreter.

- The interpreter must be chosen before a kernel is defined, so it is chosen here, before any test is imported.
- It runs a program in milliseconds and gets bfloat16 wrong: sizes are small there, and types are float32 and float16.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
HAS_TRITON = find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("gpu")


def pytest_report_header() -> str:
    where = "on the GPU" if ON_GPU else "in Triton's interpreter" if HAS_TRITON else "not run: Triton is not installed"
    return f"tests/cuda: {where}"


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
