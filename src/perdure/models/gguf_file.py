"""One GGUF file: its metadata as Python values, its tensors as rows in fp32.

- The header is read here, not by the gguf package's reader, which makes array objects of every token: seconds and
  160 MB for a vocabulary of 49,152, against a tenth of each. Types, block sizes and their decoding are the package's.
- Every length is checked against what is left of the file before it is used: a damaged or truncated file is refused
  with one line, and never allocates what it only claims to hold.
- Shapes are in numpy's order: rows first, the reverse of the order in the file.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from torch import Tensor

from perdure.api.errors import ModelLoadError
from perdure.models.reading import Room, read_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_TYPES = {
    "Q8_0": quants.Q8_0,
    "Q4_0": quants.Q4_0,
    "Q4_1": quants.Q4_1,
    "Q5_0": quants.Q5_0,
    "Q5_1": quants.Q5_1,
    "Q2_K": quants.Q2_K,
    "Q3_K": quants.Q3_K,
    "Q4_K": quants.Q4_K,
    "Q5_K": quants.Q5_K,
    "Q6_K": quants.Q6_K,
    "IQ4_NL": quants.IQ4_NL,
    "IQ4_XS": quants.IQ4_XS,
}
SUPPORTED_TYPES = (*PLAIN_TYPES, *BLOCK_TYPES)

_TYPE_NAMES = {int(kind): kind.name for kind in GGMLQuantizationType}
_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies in its file."""

    shape: tuple[int, ...]
    type: str
    begin: int  # bytes from the start of the file
    row_bytes: int


class GGUFFile:
    """The metadata and tensors of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelLoadError(f"{path}: not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Header(path, data)
        self.metadata = header.metadata
        self.tensors = header.tensors

    def dtype(self, name: str) -> torch.dtype:
        """What rows of a tensor come out in."""
        return PLAIN_TYPES.get(self.tensors[name].type, torch.float32)

    def rows(self, name: str, start: int, stop: int, room: Room = bytearray) -> Tensor:
        """Rows start .. stop - 1 of a tensor, read into `room`, decoded if it is quantised (of a vector: elements)."""
        tensor = self.tensors[name]
        data = self._bytes(name, start, stop, room)
        shape = (stop - start, *tensor.shape[1:])
        if tensor.type in PLAIN_TYPES:
            return torch.frombuffer(data, dtype=PLAIN_TYPES[tensor.type]).view(shape)
        _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type]]
        blocks = np.frombuffer(data, dtype=np.uint8).reshape(-1, block_bytes)
        return torch.from_numpy(BLOCK_TYPES[tensor.type].dequantize_blocks(blocks)).view(shape)

    def stored_rows(self, name: str, start: int, stop: int) -> Tensor:
        """The same as they are stored: of a type of blocks, the blocks' bytes, [stop - start, row bytes]."""
        if self.tensors[name].type in PLAIN_TYPES:
            return self.rows(name, start, stop)
        return torch.frombuffer(self._bytes(name, start, stop), dtype=torch.uint8).view(stop - start, -1)

    def _bytes(self, name: str, start: int, stop: int, room: Room = bytearray) -> bytearray | memoryview:
        tensor = self.tensors[name]
        begin = tensor.begin + start * tensor.row_bytes
        return read_bytes(self.path, name, begin, (stop - start) * tensor.row_bytes, room)


class _Header:
    """A cursor over the head of the file: counts, key-value pairs, table of tensors."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = len(MAGIC)
        version = self._scalar("I")
        if version not in VERSIONS:
            raise ModelLoadError(f"{path}: GGUF version {version} is not supported; supported: {VERSIONS}")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        if alignment <= 0:
            raise ModelLoadError(f"{path}: general.alignment={alignment} is not positive")
        data_begin = -(-self._at // alignment) * alignment
        self.tensors = {
            name: self._located(name, shape, type_id, data_begin + offset) for name, shape, type_id, offset in entries
        }

    def _located(self, name: str, shape: tuple[int, ...], type_id: int, begin: int) -> GGUFTensor:
        type_name = _TYPE_NAMES.get(type_id, f"type {type_id}")
        if type_name not in SUPPORTED_TYPES:
            raise ModelLoadError(
                f"{self._path}: tensor {name!r} is stored as {type_name}, not supported; "
                f"supported: {', '.join(SUPPORTED_TYPES)}"
            )
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        row_size = math.prod(shape[1:])
        if row_size % block_size:
            raise ModelLoadError(
                f"{self._path}: tensor {name!r} has rows of {row_size}, not whole {type_name} blocks of {block_size}"
            )
        row_bytes = row_size // block_size * block_bytes
        end = begin + shape[0] * row_bytes
        if end > len(self._data):
            raise ModelLoadError(
                f"{self._path}: truncated: tensor {name!r} ends at byte {end}, the file has {len(self._data)}"
            )
        return GGUFTensor(shape, type_name, begin, row_bytes)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        if not 1 <= num_dims <= 4:
            raise ModelLoadError(f"{self._path}: tensor {name!r} has {num_dims} dimensions; 1 to 4 are possible")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind == GGUFValueType.ARRAY:
            return self._array()
        return self._scalar(self._format(kind))

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == GGUFValueType.STRING:
            return [self._string() for _ in range(count)]
        code = self._format(kind)
        data = self._take(count * struct.calcsize(code))
        return list(struct.unpack(f"<{count}{code}", data))

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self._path}: damaged GGUF header: value of unknown type {kind} at byte {self._at}")
        return _SCALARS[kind]

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        # Some vocabularies hold pieces that are no valid UTF-8; they must not make the whole file unreadable.
        return self._take(self._scalar("Q")).decode("utf-8", errors="replace")

    def _take(self, num_bytes: int) -> bytes:
        begin, self._at = self._at, self._at + num_bytes
        if self._at > len(self._data):
            raise ModelLoadError(
                f"{self._path}: truncated or damaged GGUF header: {num_bytes} bytes wanted at byte {begin}, "
                f"the file has {len(self._data)}"
            )
        return self._data[begin : self._at]
