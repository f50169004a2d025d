"""The families this package can run, by the names files give them.

- One file a family, one entry here; `docs/adding-a-family.md` tells how to add one.
- Hugging Face names a family in config.json's `architectures`, GGUF in `general.architecture`.
"""

from __future__ import annotations

from perdure.api.errors import ModelLoadError
from perdure.models import gemma3, llama, mistral, olmo2, phi3, qwen2, qwen3
from perdure.models.base import Family

FAMILIES = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY, phi3.FAMILY, olmo2.FAMILY, gemma3.FAMILY)

HF_ARCHITECTURES = {name: family for family in FAMILIES for name in family.architectures}
GGUF_ARCHITECTURES = {family.gguf: family for family in FAMILIES if family.gguf is not None}


def find_family(architecture: str, file: str) -> Family:
    """The family of a name found in `file`."""
    known = HF_ARCHITECTURES | GGUF_ARCHITECTURES
    if architecture not in known:
        raise ModelLoadError(f"{file}: architecture {architecture!r} is not supported; supported: {', '.join(known)}")
    return known[architecture]
