"""The scenarios are exact and quick because nothing heavy is under them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_scenarios_import_no_torch() -> None:
    names = [f"tests.scenarios.{file.stem}" for file in sorted(Path(__file__).parent.glob("*.py"))]
    program = f"""
import importlib, sys
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
for name in {names!r}:
    importlib.import_module(name)
print(sorted({{"torch", "transformers", "tokenizers"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
