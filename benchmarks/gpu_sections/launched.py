"""A plugin of pytest's: which kernels the tests launched, as lines "module.kernel" of the file that PERDURE_LAUNCHED
names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.jit import KernelInterface


class Launched:
    """Notes the name of whatever is launched by `kernel[grid](...)`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._names: set[str] = set()
        taken = KernelInterface.__getitem__

        def noted(kernel: Any, grid: Any) -> Any:
            self._names.add(f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}")
            return taken(kernel, grid)

        KernelInterface.__getitem__ = noted

    def pytest_sessionfinish(self) -> None:
        self._file.write_text("".join(f"{name}\n" for name in sorted(self._names)))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Launched(Path(os.environ["PERDURE_LAUNCHED"])))
