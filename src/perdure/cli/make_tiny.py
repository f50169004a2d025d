"""`perdure make-tiny`: writes a small seeded checkpoint with a tokenizer, for tests and first steps offline.

It uses no engine, so it is the one command that reaches a module behind the public names: the writer itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure import InvalidValue
from perdure.api.units import in_units
from perdure.cli.output import write

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma3")


def make_tiny(
    family: Annotated[str, typer.Argument(help=f"One of: {', '.join(FAMILIES)}.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; a directory that is new or empty.")],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the weights.")] = 0,
    max_position_embeddings: Annotated[int, typer.Option(min=1, help="Longest request in tokens.")] = 256,
    num_shards: Annotated[int, typer.Option(min=1, max=16, help="How many files hold the weights.")] = 1,
) -> None:
    """Write a small seeded checkpoint with a tokenizer."""
    if directory.is_dir() and any(directory.iterdir()):
        raise InvalidValue(f"{directory}: this directory is not empty, and nothing is overwritten")

    from perdure.models.tiny import make_tiny as write_tiny

    write_tiny(family, directory, seed=seed, max_position_embeddings=max_position_embeddings, num_shards=num_shards)
    for path in sorted(directory.iterdir()):
        write(f"{path}  {in_units(path.stat().st_size)}\n")
