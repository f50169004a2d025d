"""Weights written by several threads, as a GPU's are: the bits and checksums of one thread's, and what goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from perdure.api.errors import ModelLoadError
from perdure.models import filling
from perdure.models.base import Parts, joined_shape
from perdure.models.config import config_from_directory
from perdure.models.filling import Filling
from perdure.models.gguf_file import GGUFFile
from perdure.models.registry import find_family
from perdure.models.store import Store, directory_store, gguf_store, store_of_tensors
from perdure.models.tiny import make_tiny
from perdure.models.weights import load_model
from perdure.ops.float8 import Float8Weight
from perdure.ops.kernels import Weight
from tests.engine.helpers import until
from tests.models.helpers import logits_in_chunks, write_gguf

CPU = torch.device("cpu")
IDS = list(range(3, 27))
SMALL = 100
"""Elements of a piece: a row and a bit, so that every tensor takes many turns of the buffers."""


def parameters(directory: Path) -> dict[str, Parts]:
    config = config_from_directory(directory)
    return find_family(config.architecture, str(directory)).parameters(config)


def in_type(dtype: torch.dtype) -> Callable[[str, Parts], Weight]:
    return lambda name, parts: torch.full(joined_shape(parts), torch.nan, dtype=dtype)


def in_8_bits(name: str, parts: Parts) -> Weight:
    shape = joined_shape(parts)
    return Float8Weight((shape[0], shape[1]), CPU) if len(shape) == 2 else torch.empty(shape)


def memories(weight: Weight) -> list[Tensor]:
    return [weight.flatten().view(torch.uint8)] if isinstance(weight, Tensor) else weight.memories()


def of_directory(directory: Path) -> Store:
    return directory_store(directory)


def of_tensors(directory: Path) -> Store:
    tensors = directory_store(directory)
    return store_of_tensors(
        (name, file.rows(name, 0, file.tensors[name].shape[0])) for name, file in tensors.files.items()
    )


def of_gguf(directory: Path) -> Store:
    """Heads interleaved, blocks, and floats of two types."""
    types = {"q_proj": "Q8_0", "down_proj": "F16"}
    path = write_gguf(
        directory, directory / "model.gguf", lambda part: next((t for n, t in types.items() if n in part.hf), "BF16")
    )
    return gguf_store(GGUFFile(path), interleaved=True)


@pytest.mark.parametrize("make", [in_type(torch.float32), in_type(torch.bfloat16), in_8_bits], ids=["f32", "bf16", "8"])
@pytest.mark.parametrize("open_store", [of_directory, of_tensors, of_gguf])
def test_many_threads_write_what_one_does(
    make: Callable[[str, Parts], Weight], open_store: Callable[[Path], Store], tmp_path: Path
) -> None:
    directory = make_tiny("llama", tmp_path / "1", dtype="bfloat16")
    table = parameters(directory)
    store, other = open_store(directory), open_store(directory)
    found, right = ({name: make(name, parts) for name, parts in table.items()} for _ in range(2))
    Filling(store, [(found[name], parts) for name, parts in table.items()], CPU, SMALL).finish()
    for name, parts in table.items():
        other.fill(right[name], parts)
        assert all(map(torch.equal, memories(found[name]), memories(right[name]))), name
    assert store.checksums == other.checksums and len(store.checksums) > len(table)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_set_that_was_begun_is_a_fresh_load_once_it_is_finished(family: str, tmp_path: Path) -> None:
    """With what is derived from weights (norms of heads, weights plus one), and its digest."""
    paths = [make_tiny(family, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    loaded, fresh = (load_model(path, linear="plain") for path in paths)
    weights = loaded.weights
    weights.begin(weights.open(paths[1]))
    weights.finish()
    assert weights.is_whole and weights.digest == fresh.weights.digest
    found, right = (logits_in_chunks(one.model, IDS, [len(IDS)]) for one in (loaded, fresh))
    assert torch.equal(found, right)


def test_what_ends_on_the_way_is_told_once_no_thread_writes(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "1", seed=1)
    loaded = load_model(path, linear="plain")
    weights = loaded.weights
    file = make_tiny("llama", tmp_path / "2", seed=2) / "model.safetensors"
    store = weights.open(tmp_path / "2")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    weights.begin(store)
    with pytest.raises(ModelLoadError, match="ended inside tensor"):
        weights.finish()
    assert not weights.is_whole
    weights.finish()  # there is nothing left to wait for
    weights.begin(weights.open(path))
    weights.finish()
    assert weights.is_whole and weights.digest == load_model(path).weights.digest


def test_a_set_that_is_let_be_begins_no_other_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lets it be waits for the one under way."""
    monkeypatch.setattr(filling, "MOST_THREADS", 1)
    began, goes_on, count = threading.Event(), threading.Event(), []

    def fill_part(*of_one: object) -> None:
        count.append(of_one)
        began.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(Store, "fill_part", fill_part)
    weights = load_model(make_tiny("llama", tmp_path / "1"), load_format="dummy", linear="plain").weights
    weights.begin(weights.open(tmp_path / "1"))
    assert began.wait(60)
    _, coming = weights._coming or (None, None)
    assert coming is not None
    stopping = threading.Thread(target=weights.stop)
    stopping.start()
    until(lambda: all(future.cancelled() for future in coming._futures[1:]))
    assert stopping.is_alive()
    goes_on.set()
    stopping.join(60)
    weights.finish()  # there is nothing left to wait for
    assert len(count) == 1 and not weights.is_whole and not stopping.is_alive()
