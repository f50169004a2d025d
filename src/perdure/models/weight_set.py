"""A built model's weights as one set: written anew in place, or given back for a while.

- Other weights are checked whole - every name, shape and type - before the first byte of the old ones is touched.
- They are written where the old ones lie, so whoever computes with them goes on; one weight at a time is held twice.
- On a CPU the host's memory is the device's own, so weights that are put away go to a temporary file, not to a copy.
  Those of a GPU go to pinned memory of the host, and come back to whatever addresses there are.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from perdure.api.errors import InvalidValue, ModelLoadError, ModelNotFound
from perdure.models.base import Family, ModelConfig, Part, Parts, Weights, joined_shape
from perdure.models.config import config_from_directory, config_from_gguf
from perdure.models.filling import Filling
from perdure.models.float8 import StoredFloat8
from perdure.models.registry import find_family
from perdure.models.store import Store, digest_of, directory_store, gguf_store, open_gguf, store_of_tensors
from perdure.ops.float8 import Float8Weight
from perdure.ops.native.weights import JoinedWeight

Source = str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""A directory, a GGUF file, or tensors by the names that Hugging Face's files give them."""

MAY_DIFFER = frozenset({"dtype", "float8", "bos_token_id", "eos_token_ids", "max_position_embeddings"})
"""What another checkpoint of the same model may say otherwise: nothing its weights are computed with."""

NO_WEIGHTS = ("rotary_emb.inv_freq", "rope_freqs.weight")
"""Stored tensors that hold no weight, by their ends: frequencies are computed from the configuration."""


class WeightSet:
    """is_whole: whether the memory holds one whole set. keeps_blocks: a GGUF's blocks are kept as they are. digest: of
    the set that was loaded last (`store.digest_of`)."""

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        weights: Weights,
        *,
        keeps_blocks: bool,
        dtype: torch.dtype,
        digest: str,
    ) -> None:
        self._config = config
        self._family = family
        self._parameters: dict[str, Parts] = family.parameters(config)
        self._weights = weights
        self._keeps_blocks = keeps_blocks
        self._dtype = dtype
        self.digest = digest
        self.is_whole = True
        self._coming: tuple[Store, Filling] | None = None
        self._file: BinaryIO | None = None
        self._copies: list[Tensor] = []
        self._is_freed = False

    # Other weights

    def open(self, source: Source) -> Store:
        """The source, checked whole. Raises `InvalidValue`, `ModelLoadError`, `ModelNotFound`."""
        if isinstance(source, (str, Path)):
            store = self._open_path(Path(source))
        elif self._keeps_blocks:
            raise InvalidValue("weights: an engine that keeps a GGUF's blocks takes other weights from a GGUF only")
        elif isinstance(source, Iterable):
            store = store_of_tensors(source.items() if isinstance(source, Mapping) else source)
        else:
            raise InvalidValue(f"weights={source!r} is no path and no collection of named tensors")
        store.check([part for parts in self._parameters.values() for part in parts], unread(self._config))
        if self._keeps_blocks:
            self._check_types(store)
        for name in weights_in_float8(store, self._parameters):
            if not isinstance(self._weights.get(name), Float8Weight):
                stored = self._parameters[name][0].hf
                raise ModelLoadError(
                    f"{store.path}: {stored!r} is stored in 8 bits, the engine holds it in {self._dtype}"
                )
        return store

    def _open_path(self, path: Path) -> Store:
        if not os.path.exists(path):  # which, unlike Path's own, is False of a name that no file can have
            raise ModelNotFound(f"{path}: no such file or directory")
        gguf = None if path.is_dir() else open_gguf(path)
        if gguf is None and self._keeps_blocks:
            raise InvalidValue(f"weights={str(path)!r}: an engine that keeps a GGUF's blocks needs a GGUF")
        if gguf is not None or (path / "config.json").is_file():
            self._check_config(path, config_from_directory(path) if gguf is None else config_from_gguf(gguf))
        return directory_store(path) if gguf is None else gguf_store(gguf, interleaved=self._family.gguf_interleaves)

    def _check_config(self, path: Path, other: ModelConfig) -> None:
        """Weights of another model may well fit by their names and shapes. GGUF and Hugging Face say the same of a
        model in other words; then names and shapes must do."""
        if find_family(other.architecture, str(path)) is not self._family:
            raise ModelLoadError(f"{path}: a {other.architecture}, the engine's model is a {self._config.architecture}")
        if other.architecture != self._config.architecture:
            return
        for field in fields(self._config):
            ours, theirs = getattr(self._config, field.name), getattr(other, field.name, None)
            if field.name not in MAY_DIFFER and ours != theirs:
                raise ModelLoadError(f"{path}: {field.name} is {theirs!r}, the engine's model has {ours!r}")
        if other.float8 is not None and other.float8 != (self._config.float8 or StoredFloat8()):
            raise ModelLoadError(f"{path}: {other.float8}, the engine's model has {self._config.float8}")

    def _check_types(self, store: Store) -> None:
        """Blocks are laid out by their type, so each must be of the type it was."""
        for name, parts in self._parameters.items():
            weight = self._weights[name]
            for part, held in zip(parts, weight.parts if isinstance(weight, JoinedWeight) else ()):
                if (stored := packed_type(store, part)) != held.stored:
                    raise ModelLoadError(f"{store.path}: tensor {part.gguf!r} is {stored}, not {held.stored} as before")

    def load(self, store: Store) -> None:
        """Write the store's weights over those in use, which are not whole from the first byte to the last."""
        assert not self._is_freed, "weights are loaded while their memory is given back"
        first, *_ = self._parameters.values()
        next(iter(store.pieces(first[0])))  # what cannot be read at all has changed nothing
        if self._is_on_gpu:
            self.begin(store)
            self.finish()
            return
        for name, parts in self._parameters.items():
            if (product := self._weights.products.get(name)) is not None:
                dense = torch.empty(joined_shape(parts), dtype=self._dtype)
                store.fill(dense, parts)
                self.is_whole = False
                product.load(dense)
            if name in self._weights:
                self.is_whole = False
                store.fill(self._weights[name], parts, keep_blocks=self._keeps_blocks)
        self._loaded(store)

    def begin(self, store: Store) -> None:
        """The same of a GPU's, without waiting for it: until `finish`, what the weights hold means nothing.

        What is stored otherwise than it is held takes memory of the GPU on its way, which is to be measured meanwhile:
        such weights are waited for here.
        """
        here = [(weight, self._parameters[name]) for name, weight in self._weights.items()]
        device = next(weight.device for weight in self._weights.values() if isinstance(weight, Tensor))
        self.is_whole = False
        filling = Filling(store, here, device)
        self._coming = store, filling
        if filling.converts:
            self.finish()

    def finish(self) -> None:
        """Wait for what was begun, if anything was. Raises what its reading raised."""
        if self._coming is not None:
            store, filling = self._coming
            self._coming = None
            filling.finish()
            self._loaded(store)

    def stop(self) -> None:
        """Let what was begun be, without the rest of it."""
        if self._coming is not None:
            self._coming[1].stop()
            self._coming = None

    def _loaded(self, store: Store) -> None:
        for tensor, make in self._weights.derived:
            tensor.copy_(make())
        self.digest = digest_of(self._config, store.checksums)
        self.is_whole = True

    # Away and back

    def save(self) -> None:
        """Copy all to a temporary file, or to the host. Raises where there is no room; nothing has changed then."""
        if self._is_on_gpu:
            self._copies = [torch.empty_like(one, device="cpu", pin_memory=True) for one in self._memories()]
            for copy, one in zip(self._copies, self._memories(), strict=True):
                copy.copy_(one, non_blocking=True)
            torch.cuda.synchronize()
            return
        file = tempfile.TemporaryFile()  # noqa: SIM115 - kept until the weights are back
        try:
            for memory in self._memories():
                file.write(memory.clone().numpy().data)  # a tensor that numpy has seen cannot give its memory back
            for product in self._weights.products.values():
                file.write(product.dense().numpy().data)
            file.flush()  # what does not fit must show now
        except BaseException:
            file.close()
            raise
        self._file = file

    @property
    def _is_on_gpu(self) -> bool:
        return any(isinstance(weight, Tensor) and weight.is_cuda for weight in self._weights.values())

    def forget_saved(self) -> None:
        self._copies = []
        if self._file is not None:
            self._file.close()
            self._file = None

    def give_back(self) -> None:
        """Give the memory back; what was not saved is lost."""
        for weight in self._weights.values():
            if isinstance(weight, Tensor):
                weight.untyped_storage().resize_(0)
            else:
                weight.release()
        for product in self._weights.products.values():
            product.release()
        self._is_freed, self.is_whole = True, False
        if self._is_on_gpu:
            torch.cuda.empty_cache()
        _trim()

    def take_back(self) -> None:
        """Take the memory again, with what was saved. Nothing happens where none was given back."""
        if not self._is_freed:
            return
        for weight in self._weights.values():
            if isinstance(weight, Tensor):
                weight.untyped_storage().resize_(weight.nbytes)
            else:
                weight.reserve()
        if self._copies:
            for copy, one in zip(self._copies, self._memories(), strict=True):
                one.copy_(copy, non_blocking=True)
            torch.cuda.synchronize()
            self.is_whole = True
        if self._file is not None:
            self._file.seek(0)
            for memory in self._memories():
                self._read(memory)
            for product in self._weights.products.values():
                dense = torch.empty(product.shape)
                self._read(dense)
                product.load(dense)
            self.is_whole = True
        self._is_freed = False
        self.forget_saved()

    def _read(self, into: Tensor) -> None:
        assert self._file is not None
        data = bytearray(into.nbytes)
        if self._file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise ModelLoadError("the temporary file of the weights ended early")
        into.copy_(torch.frombuffer(data, dtype=into.dtype).view(into.shape))

    def _memories(self) -> Iterator[Tensor]:
        """All that is held but products, as bytes, in one order."""
        for weight in self._weights.values():
            if isinstance(weight, Tensor):
                yield weight.flatten().view(torch.uint8)
            else:
                yield from weight.memories()


def weights_in_float8(store: Store, parameters: Mapping[str, Parts]) -> list[str]:
    """Names of the weights that are stored in 8 bits. ModelLoadError: one of which only a part is."""
    found = []
    for name, parts in parameters.items():
        narrow = [part.hf for part in parts if store.is_float8(part)]
        if narrow:
            found.append(name)
            if others := [part.hf for part in parts if part.hf not in narrow]:
                raise ModelLoadError(
                    f"{store.path}: {narrow[0]!r} is stored in 8 bits and {others[0]!r} is not; both are of one product"
                )
    return found


_FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def packed_type(store: Store, part: Part) -> str:
    """How a part of a GGUF is laid out when its blocks are kept (`PackedWeight.stored`)."""
    stored = store.stored_type(part)
    return _FLOATS.get(stored, stored)


def unread(config: ModelConfig) -> tuple[str, ...]:
    """Ends of the names of stored tensors that are not read."""
    return (*NO_WEIGHTS, "lm_head.weight") if config.tie_word_embeddings else NO_WEIGHTS


def _trim() -> None:
    """Have the C library return what it has freed to the system, where it can."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
