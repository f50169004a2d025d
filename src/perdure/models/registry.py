"""The families this package can run, by the names files give them.

- One entry a family: how it is built, what it reads, what it may leave unread.
- Hugging Face names a family in config.json's `architectures`, GGUF in `general.architecture`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perdure.api.errors import ModelLoadError
from perdure.models import llama
from perdure.models.base import Model, ModelConfig, Parts
from perdure.models.layers import Weights
from perdure.ops.linear import LinearForm


@dataclass(frozen=True, slots=True)
class Family:
    """How one family is built from its files."""

    build: Callable[[ModelConfig, Weights, LinearForm], Model]
    parameters: Callable[[ModelConfig], dict[str, Parts]]
    ignored_suffixes: tuple[str, ...]


LLAMA = Family(llama.LlamaModel, llama.parameters, llama.IGNORED_SUFFIXES)

HF_ARCHITECTURES: dict[str, Family] = {"LlamaForCausalLM": LLAMA}
GGUF_ARCHITECTURES: dict[str, Family] = {"llama": LLAMA}


def find_family(architecture: str, file: str) -> Family:
    """The family of a name found in `file`."""
    known = HF_ARCHITECTURES | GGUF_ARCHITECTURES
    if architecture not in known:
        raise ModelLoadError(f"{file}: architecture {architecture!r} is not supported; supported: {', '.join(known)}")
    return known[architecture]
