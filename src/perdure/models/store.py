"""Where a model's stored tensors lie: the files of a directory or one GGUF, seen as one table of names.

- Opening reads headers only: what is missing, truncated, pickled or misshapen is refused before a weight is read.
- Tensors come out piece by piece, in rows, as Hugging Face orders them (GGUF's interleaved heads are taken apart), with
  Hugging Face's values (what GGUF adds to some is taken off).
- A stored tensor nobody reads is refused too: leaving out a bias would be a silently wrong model.
- A tensor in 8 bits comes with factors for its rows, which are stored beside it under its name and "_scale".
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from perdure.api.errors import InvalidValue, ModelLoadError
from perdure.models.base import ModelConfig, Part, Parts
from perdure.models.config import read_json
from perdure.models.gguf_file import GGUFFile
from perdure.models.reading import Room
from perdure.models.safetensors_file import SafetensorsFile
from perdure.ops.float8 import E4M3, Float8Weight
from perdure.ops.kernels import Weight
from perdure.ops.native.weights import JoinedWeight

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

PIECE_SIZE = 1 << 15
"""Elements converted at once: as many as torch still copies on the calling thread. Waking others for so little work
makes a load several times longer on a busy machine, and gains nothing on an idle one."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How stored tensors are read: in pieces of some `size` elements, the bytes of each into what `room` gives. A piece
    is used before room is asked for again."""

    size: int = PIECE_SIZE
    room: Room = bytearray


READING = Reading()


class StoredTensor(Protocol):
    """An entry of a file's table."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorFile(Protocol):
    """What both kinds of file offer."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def rows(self, name: str, start: int, stop: int, room: Room = bytearray) -> Tensor: ...


TENSORS = Path("<tensors>")
"""Where tensors in memory are said to lie."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SCALE = "_scale"


class TensorsInMemory:
    """Tensors that come from no file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.path = TENSORS
        self.tensors: Mapping[str, StoredTensor] = tensors
        self._given = tensors

    def dtype(self, name: str) -> torch.dtype:
        return self._given[name].dtype

    def rows(self, name: str, start: int, stop: int, room: Room = bytearray) -> Tensor:
        tensor = self._given[name]
        return tensor[start:stop] if tensor.dim() else tensor[None]


@dataclass(frozen=True, slots=True)
class Store:
    """A model's tensors by stored name, each with the file that holds it.

    interleaved: rotary heads are stored with their halves interleaved. checksums: of every byte of each part that was
    read to its end, by the name Hugging Face gives it.
    """

    path: Path
    names: Literal["hf", "gguf"]
    files: Mapping[str, TensorFile]
    interleaved: bool = False
    checksums: dict[str, int] = field(default_factory=dict, compare=False)

    def check(self, parts: list[Part], ignored_suffixes: tuple[str, ...]) -> None:
        """Refuse the store unless it holds exactly these parts, in these shapes."""
        expected: dict[str, tuple[tuple[int, ...], ...]] = {self._name(part): (part.shape,) for part in parts}
        for part in [part for part in parts if self.is_float8(part)]:
            name = self._name(part)
            expected[name + SCALE] = ((part.shape[0], 1), part.shape[:1], (1,), ())
            if name + SCALE not in self.files:
                raise ModelLoadError(f"{self.path}: tensor {name!r} is stored in 8 bits, {name + SCALE!r} is missing")
        missing = [name for name in expected if name not in self.files]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise ModelLoadError(f"{self.path}: tensor {missing[0]!r}{more} is missing")
        for name, file in self.files.items():
            shape = file.tensors[name].shape
            if name not in expected:
                if not name.endswith(ignored_suffixes):
                    raise ModelLoadError(f"{file.path}: tensor {name!r} is not part of this architecture")
            elif tuple(shape) not in expected[name]:
                right = " or ".join(str(list(one)) for one in expected[name])
                raise ModelLoadError(f"{file.path}: tensor {name!r} has shape {list(shape)}, expected {right}")
            elif name.endswith(SCALE) and file.dtype(name) == E4M3:
                raise ModelLoadError(f"{file.path}: tensor {name!r} holds factors, and in 8 bits")

    def is_float8(self, part: Part) -> bool:
        """Whether a part that may be missing is stored in 8 bits."""
        file = self.files.get(self._name(part))
        return file is not None and len(part.shape) == 2 and file.dtype(self._name(part)) == E4M3

    def holds(self, parts: Parts, dtype: torch.dtype) -> bool:
        """Whether the files hold these in this type. Vectors do not count: they are small."""
        names = [self._name(part) for part in parts if len(part.shape) > 1]
        return all(self.files[name].dtype(name) == dtype for name in names)

    def row_factors(self, part: Part) -> Tensor:
        """What each row of a part in 8 bits is to be multiplied by, fp32."""
        name = self._name(part) + SCALE
        file = self.files[name]
        shape = tuple(file.tensors[name].shape)
        stored = file.rows(name, 0, shape[0] if shape else 1)
        self.checksums[part.hf + SCALE] = zlib.crc32(stored.contiguous().view(torch.uint8).numpy().data)
        return stored.float().flatten().expand(part.shape[0])

    def pieces(self, part: Part, reading: Reading = READING) -> Iterator[tuple[int, Tensor]]:
        """The part in order: the first row of each piece, and its rows in the type they are stored in."""
        return self._summed(part, self._pieces(part, reading))

    def _summed(self, part: Part, pieces: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        checksum = 0
        for start, rows in pieces:
            checksum = zlib.crc32(rows.contiguous().view(torch.uint8).numpy().data, checksum)
            yield start, rows
        self.checksums[part.hf] = checksum

    def _pieces(self, part: Part, reading: Reading) -> Iterator[tuple[int, Tensor]]:
        name, num_rows = self._name(part), part.shape[0]
        file = self.files[name]
        if part.rotary_heads and self.interleaved:
            head_dim = num_rows // part.rotary_heads
            for start in range(0, num_rows, head_dim):
                # rows i and i + head_dim / 2 lie side by side
                pairs = file.rows(name, start, start + head_dim, reading.room)
                yield start, pairs[0::2]
                yield start + head_dim // 2, pairs[1::2]
            return
        step = max(reading.size // math.prod(part.shape[1:]), 1)
        added = part.gguf_added if self.names == "gguf" else 0.0
        for start in range(0, num_rows, step):
            rows = file.rows(name, start, min(start + step, num_rows), reading.room)
            yield start, rows - added if added else rows

    def stored_pieces(self, part: Part) -> Iterator[tuple[int, Tensor]]:
        """The part in order as it is stored: floats, or the bytes of blocks (`GGUFFile.stored_rows`)."""
        return self._summed(part, self._stored_pieces(part))

    def _stored_pieces(self, part: Part) -> Iterator[tuple[int, Tensor]]:
        name, num_rows = self._name(part), part.shape[0]
        file = self.files[name]
        assert isinstance(file, GGUFFile) and not part.gguf_added, "only a GGUF's blocks are kept as they are"
        heads = part.rotary_heads if self.interleaved else 0
        step = num_rows // heads if heads else max(PIECE_SIZE // math.prod(part.shape[1:]), 1)
        for start in range(0, num_rows, step):
            rows = file.stored_rows(name, start, min(start + step, num_rows))
            yield start, torch.cat((rows[0::2], rows[1::2])) if heads else rows

    def stored_type(self, part: Part) -> str:
        """Of a part of a GGUF: F32, F16, BF16 or a type of blocks."""
        file = self.files[self._name(part)]
        assert isinstance(file, GGUFFile)
        return file.tensors[self._name(part)].type

    def fill(self, weight: Weight, parts: Parts, *, keep_blocks: bool = False) -> None:
        """Write the parts into the weight, joined along their rows: converted, or (keep_blocks) as they are stored."""
        for number, (first, part) in enumerate(placed(parts)):
            if isinstance(weight, JoinedWeight) and keep_blocks:
                for start, rows in self.stored_pieces(part):
                    weight.parts[number].fill(start, rows)
            else:
                self.fill_part(weight, first, part)

    def fill_part(self, weight: Weight, first: int, part: Part, reading: Reading = READING) -> None:
        """Write one part into rows first .. of the weight, converted. Copies to another device are not waited for."""
        factors = self.row_factors(part) if self.is_float8(part) else None
        for start, rows in self.pieces(part, reading):
            if isinstance(weight, JoinedWeight):
                weight.parts[0].fill(first + start, rows)
            elif isinstance(weight, Float8Weight) and factors is not None:
                weight.fill_codes(first + start, rows, factors[start : start + rows.shape[0]])
            elif isinstance(weight, Float8Weight):
                weight.fill(first + start, rows)
            else:
                weight[first + start : first + start + rows.shape[0]].copy_(rows, non_blocking=True)

    def _name(self, part: Part) -> str:
        return part.hf if self.names == "hf" else part.gguf


def placed(parts: Parts) -> list[tuple[int, Part]]:
    """Each part with the row of the weight that it begins at."""
    ends = accumulate(part.shape[0] for part in parts)
    return [(end - part.shape[0], part) for end, part in zip(ends, parts, strict=True)]


def digest_of(config: ModelConfig, numbers: Mapping[str, int]) -> str:
    """Tells models apart: a configuration, and numbers that stand for its weights. No defence against forgery.

    A checksum of every byte as it is read costs a tenth of a load.
    """
    told = f"{config} {sorted(numbers.items())}"
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def open_gguf(path: Path) -> GGUFFile:
    """The GGUF at `path`; anything else a file can be is refused by name."""
    if path.suffix in PICKLED_SUFFIXES:
        raise ModelLoadError(f"{path}: pickled weights are refused; give a directory with safetensors or a GGUF file")
    return GGUFFile(path)


def gguf_store(file: GGUFFile, *, interleaved: bool) -> Store:
    """All tensors of one GGUF."""
    return Store(file.path, "gguf", dict.fromkeys(file.tensors, file), interleaved)


def directory_store(directory: Path) -> Store:
    """All tensors of a directory's safetensors, one file or shards with an index."""
    index_path = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file():
        single = SafetensorsFile(directory / SINGLE_FILE)
        return Store(directory, "hf", dict.fromkeys(single.tensors, single))
    if not index_path.is_file():
        pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED_SUFFIXES)
        if pickled:
            raise ModelLoadError(f"{directory}: pickled weights are refused ({pickled[0]}); {SINGLE_FILE} is needed")
        raise ModelLoadError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} in this directory")

    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelLoadError(f"{index_path}: 'weight_map' is missing")
    shards: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).is_file():
            raise ModelLoadError(f"{directory / shard}: this shard is missing, {INDEX_FILE} names it")
        shards[shard] = SafetensorsFile(directory / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard].tensors:
            raise ModelLoadError(f"{directory / shard}: tensor {name!r} is missing, {INDEX_FILE} says it is here")
    return Store(directory, "hf", {name: shards[shard] for name, shard in weight_map.items()})


def store_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Store:
    """Tensors in memory, by the names that Hugging Face's files give them. All must be there before one is read."""
    given: dict[str, Tensor] = {}
    for pair in tensors:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InvalidValue(f"{TENSORS}: {repr(pair)[:60]} is no pair of a name and a tensor")
        name, tensor = pair
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise ModelLoadError(f"{TENSORS}: {name!r} is a {type(tensor).__name__}, no tensor")
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_neg() or tensor.is_quantized:
            raise ModelLoadError(f"{TENSORS}: tensor {name!r} is no plain one ({tensor.layout}); give a dense copy")
        if tensor.dtype not in (*FLOATS, E4M3):
            allowed = ", ".join(map(str, (*FLOATS, E4M3)))
            raise ModelLoadError(f"{TENSORS}: tensor {name!r} is of {tensor.dtype}, not one of {allowed}")
        if tensor.device.type != "cpu":
            raise ModelLoadError(f"{TENSORS}: tensor {name!r} lies on {tensor.device}, not in the host's memory")
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if (
            tensor.numel()
            and tensor.untyped_storage().nbytes() < (tensor.storage_offset() + last + 1) * tensor.itemsize
        ):
            raise ModelLoadError(f"{TENSORS}: tensor {name!r} has given its memory away")
        if name in given:
            raise ModelLoadError(f"{TENSORS}: tensor {name!r} comes twice")
        given[name] = tensor.detach()
    held = TensorsInMemory(given)
    return Store(TENSORS, "hf", dict.fromkeys(given, held))
