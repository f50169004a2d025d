"""Bytes of a file that holds tensors, into memory that somebody gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from perdure.api.errors import ModelLoadError

Room = Callable[[int], bytearray | memoryview]
"""Gives memory of so many bytes to be written over."""


def read_bytes(path: Path, name: str, begin: int, num_bytes: int, room: Room) -> bytearray | memoryview:
    """Bytes begin .. of the file, which are of tensor `name`. ModelLoadError: it has become shorter since its header
    was checked."""
    data = room(num_bytes)
    with path.open("rb") as file:
        file.seek(begin)
        complete = file.readinto(data) == num_bytes
    if not complete:
        raise ModelLoadError(f"{path}: the file ended inside tensor {name!r} while it was being read")
    return data
