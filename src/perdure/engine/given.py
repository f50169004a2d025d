"""Weights that are given as tensors to replicas: as the bytes of a safetensors file, piece by piece.

- `GivenTensors` is the client's side: tensors as they lie in its memory, read when a piece is asked for.
- `TakenTensors` is a replica's: a directory for each set of weights, in which others find what they lack. A set is
  there whole or not at all, until other weights take its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from bisect import bisect_right
from pathlib import Path

import torch
from torch import Tensor

from perdure.coordinator.messages import OF_TENSORS
from perdure.engine.scratch import Scratch
from perdure.models.safetensors_file import DTYPES
from perdure.models.store import SINGLE_FILE, Store

PIECE_BYTES = 4 * 2**20
"""What travels at once."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class GivenTensors:
    """A checked set of tensors as one file would hold it."""

    def __init__(self, store: Store) -> None:
        self._parts: list[bytes | Tensor] = []
        header: dict[str, object] = {}
        end = 0
        for name, file in store.files.items():
            tensor = file.tensors[name]
            assert isinstance(tensor, Tensor)
            size = tensor.numel() * tensor.itemsize
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + size],
            }
            end += size
            self._parts.append(tensor)
        encoded = json.dumps(header).encode()
        self._parts.insert(0, len(encoded).to_bytes(8, "little") + encoded)
        self._begins: list[int] = []
        self.num_bytes = 0
        for part in self._parts:
            self._begins.append(self.num_bytes)
            self.num_bytes += len(part) if isinstance(part, bytes) else part.numel() * part.itemsize
        self._open: tuple[int, memoryview] = (-1, memoryview(b""))
        """The part that was read last, as bytes in order."""

    def piece(self, first: int) -> bytes:
        """From this byte on. Empty beyond the end."""
        out = bytearray()
        while len(out) < PIECE_BYTES and first + len(out) < self.num_bytes:
            at = first + len(out)
            number = bisect_right(self._begins, at) - 1
            begin = at - self._begins[number]
            out += self._bytes(number)[begin : begin + PIECE_BYTES - len(out)]
        return bytes(out)

    def _bytes(self, number: int) -> memoryview:
        if self._open[0] != number:
            part = self._parts[number]
            if isinstance(part, Tensor):
                self._open = number, part.contiguous().flatten().view(torch.uint8).numpy().data
            else:
                self._open = number, memoryview(part)
        return self._open[1]


class Taking:
    """One set of weights on its way into a file."""

    def __init__(self, source: str, folder: Path) -> None:
        self.source = source
        self._folder = folder
        self._file = tempfile.NamedTemporaryFile(dir=folder, delete=False)  # noqa: SIM115 - kept until it is whole
        self.num_bytes = 0

    def take(self, piece: bytes) -> None:
        self._file.write(piece)
        self.num_bytes += len(piece)

    def finish(self) -> Path:
        """It is whole: the directory."""
        self._file.close()
        directory = _directory(self._folder, self.source)
        directory.mkdir(exist_ok=True)
        os.replace(self._file.name, directory / SINGLE_FILE)
        return directory

    def drop(self) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file.name)


class TakenTensors:
    """folder: shared by replicas of one machine that are started together; None = one of its own, once it is needed."""

    def __init__(self, folder: str | None) -> None:
        self._own: Scratch | None = None
        self._folder = None if folder is None else Path(folder)

    def find(self, source: str) -> Path | None:
        """The directory of a set that is here."""
        if self._folder is None:
            return None
        directory = _directory(self._folder, source)
        return directory if (directory / SINGLE_FILE).is_file() else None

    def begin(self, source: str) -> Taking:
        if self._folder is None:
            self._own = Scratch()
            self._folder = self._own.path
        return Taking(source, self._folder)

    def given(self, source: str, first: int) -> tuple[bytes, int] | None:
        """A piece for another replica, and how many bytes there are of all."""
        directory = self.find(source)
        if directory is None:
            return None
        with open(directory / SINGLE_FILE, "rb") as file:
            file.seek(first)
            return file.read(PIECE_BYTES), os.fstat(file.fileno()).st_size

    def drop(self, source: str) -> None:
        """It is not needed any more. Nothing happens if it is none of these."""
        if source.startswith(OF_TENSORS) and self._folder is not None:
            shutil.rmtree(_directory(self._folder, source), ignore_errors=True)

    def close(self) -> None:
        if self._own is not None:
            self._own.remove()


def _directory(folder: Path, source: str) -> Path:
    return folder / f"set-{source.removeprefix(OF_TENSORS)}"
