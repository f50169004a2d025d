"""One safetensors file, read row by row.

- The header is checked against the file's size before the first tensor is read, so a truncated file is refused early.
- Rows are read, not mapped: a mapped file would count towards the process's memory as fast as it is converted.
- Only the types models are stored in are known; others are refused by name.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from perdure.api.errors import ModelLoadError
from perdure.models.reading import Room, read_bytes

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    shape: tuple[int, ...]
    type: str
    begin: int  # bytes from the start of the file
    num_bytes: int


class SafetensorsFile:
    """The tensors of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.tensors = _read_header(path, file)

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.tensors[name].type]

    def rows(self, name: str, start: int, stop: int, room: Room = bytearray) -> Tensor:
        """Rows start .. stop - 1 of a tensor in the type it is stored in (of a vector: its elements), in `room`."""
        tensor = self.tensors[name]
        dtype = DTYPES[tensor.type]
        row_bytes = math.prod(tensor.shape[1:]) * dtype.itemsize
        data = read_bytes(self.path, name, tensor.begin + start * row_bytes, (stop - start) * row_bytes, room)
        return torch.frombuffer(data, dtype=dtype).view(stop - start, *tensor.shape[1:])


def _read_header(path: Path, file: BinaryIO) -> dict[str, StoredTensor]:
    """The file's table of tensors, each checked to lie within the file."""
    file_bytes = path.stat().st_size
    header_bytes = int.from_bytes(file.read(8), "little")
    data_begin = 8 + header_bytes
    if file_bytes < 8 or header_bytes > MAX_HEADER_BYTES:
        raise ModelLoadError(f"{path}: not a safetensors file")
    if data_begin > file_bytes:
        raise ModelLoadError(f"{path}: truncated: its header alone takes {data_begin} bytes, the file has {file_bytes}")
    try:
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        tensors = {name: _stored(entry, data_begin) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path}: damaged safetensors header ({error})") from error
    for name, tensor in tensors.items():
        _check(path, name, tensor, file_bytes)
    return tensors


def _stored(entry: dict[str, Any], data_begin: int) -> StoredTensor:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    return StoredTensor(shape, str(entry["dtype"]), data_begin + begin, end - begin)


def _check(path: Path, name: str, tensor: StoredTensor, file_bytes: int) -> None:
    if tensor.type not in DTYPES:
        raise ModelLoadError(
            f"{path}: tensor {name!r} is stored as {tensor.type}, not supported; supported: {', '.join(DTYPES)}"
        )
    needed = math.prod(tensor.shape) * DTYPES[tensor.type].itemsize
    if tensor.num_bytes != needed:
        raise ModelLoadError(
            f"{path}: tensor {name!r} of shape {list(tensor.shape)} in {tensor.type} takes {needed} bytes, "
            f"its header says {tensor.num_bytes}"
        )
    end = tensor.begin + tensor.num_bytes
    if end > file_bytes:
        raise ModelLoadError(f"{path}: truncated: tensor {name!r} ends at byte {end}, the file has {file_bytes}")
