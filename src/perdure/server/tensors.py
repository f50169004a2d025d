"""Weights as tensors that lie in shared memory: a trainer on this machine writes them there, and nothing is copied.

The file is a safetensors file, or plain bytes of which the request says what lies where. A name of POSIX shared memory
is a file in /dev/shm. What the tensors are for is checked by the engine, before the first of its own is touched.
"""

from __future__ import annotations

import math
import mmap
import stat
from pathlib import Path
from typing import get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from perdure import InvalidValue
from perdure.server.protocol.control import DtypeName, SharedTensors, TensorShape

SHARED_MEMORY = Path("/dev/shm")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(DtypeName)}


def of_shared(given: SharedTensors) -> dict[str, Tensor]:
    """By name. They are the file's own memory. Raises `InvalidValue`."""
    path = _path(given)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidValue(f"shared.file={str(path)!r} is no file")
        if given.tensors is None:
            return load_file(path)
        with path.open("rb") as file:  # private: an engine that wrote here would write to nobody else
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise InvalidValue(f"shared: {str(path)[:200]!r} cannot be read: {error}") from None
    except SafetensorError as error:
        raise InvalidValue(f"shared: {str(path)!r} is no safetensors file, and no tensors are given: {error}") from None
    found: dict[str, Tensor] = {}
    for one in given.tensors:
        if one.name in found:
            raise InvalidValue(f"shared.tensors has {one.name[:80]!r} twice")
        found[one.name] = _tensor(memory, one, one.offset)
    return found


def _path(given: SharedTensors) -> Path:
    if (given.file is None) == (given.shm is None):
        raise InvalidValue("shared needs one of file and shm")
    if given.file == "":
        raise InvalidValue("shared.file='' is no file")
    if given.file is not None:
        return Path(given.file)
    name = (given.shm or "").removeprefix("/")
    if not name or "/" in name or name in (".", ".."):
        raise InvalidValue(f"shared.shm={given.shm!r} is no name of shared memory")
    return SHARED_MEMORY / name


def _tensor(memory: mmap.mmap, one: TensorShape, offset: int) -> Tensor:
    dtype, count = DTYPES[one.dtype], math.prod(one.shape)
    size = count * dtype.itemsize
    if offset % dtype.itemsize or offset + size > len(memory):
        raise InvalidValue(
            f"shared.tensors: {one.name[:80]!r} takes {size} bytes from {offset}, which is "
            + (f"not in the {len(memory)} there are" if offset + size > len(memory) else f"no place for a {one.dtype}")
        )
    if not count:
        return torch.empty(one.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(one.shape)
