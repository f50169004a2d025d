"""Weights written anew in place: bit for bit a fresh load, in every family and form; away and back; refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from perdure.api.errors import InvalidValue, ModelLoadError
from perdure.models.tiny import FAMILIES, make_tiny
from perdure.models.weights import LoadedModel, load_model
from perdure.ops.native import library
from tests.models.helpers import logits_in_chunks, write_gguf

IDS = torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(0)).tolist()
FORMS = ["packed", "invariant", "plain", "reference", *(["native"] if library() is not None else [])]


def logits(loaded: LoadedModel) -> Tensor:
    return logits_in_chunks(loaded.model, IDS, [len(IDS)])


@pytest.fixture(scope="module", params=[*FAMILIES, "llama, tied", "qwen3, biases"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape with other weights."""
    family, _, more = request.param.partition(", ")
    config = {"tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True}}.get(more, {})
    folder = tmp_path_factory.mktemp("pair")
    return make_tiny(family, folder / "1", seed=1, **config), make_tiny(family, folder / "2", seed=2, **config)


@pytest.mark.parametrize("form", FORMS)
def test_other_weights_in_place_are_a_fresh_load(form: str, pair: tuple[Path, Path]) -> None:
    """From a directory, from a table of tensors, and back from pairs."""
    first, second = pair
    loaded, fresh = load_model(first, linear=form), load_model(second, linear=form)
    before, other = logits(loaded), logits(fresh)
    assert not torch.equal(before, other)
    weights = loaded.weights
    weights.load(weights.open(second))
    assert torch.equal(logits(loaded), other)
    weights.load(weights.open(load_file(first / "model.safetensors")))
    assert torch.equal(logits(loaded), before)
    weights.load(weights.open(iter(load_file(second / "model.safetensors").items())))
    assert torch.equal(logits(loaded), other) and weights.is_whole


@pytest.mark.parametrize("form", FORMS)
def test_away_and_back_to_the_bit(form: str, pair: tuple[Path, Path]) -> None:
    first, second = pair
    loaded = load_model(first, linear=form)
    before, weights = logits(loaded), loaded.weights
    weights.save()
    weights.give_back()
    assert not weights.is_whole
    weights.take_back()
    assert torch.equal(logits(loaded), before) and weights.is_whole
    weights.give_back()  # dropped
    weights.take_back()
    assert not weights.is_whole
    weights.load(weights.open(second))
    assert torch.equal(logits(loaded), logits(load_model(second, linear=form)))


@pytest.mark.skipif(library() is None, reason="no compiled kernels")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q6_K"])
def test_blocks_of_a_gguf_are_replaced_by_blocks(kind: str, tmp_path: Path) -> None:
    size = {"hidden_size": 256, "intermediate_size": 256}
    for seed in (1, 2):
        write_gguf(make_tiny("llama", tmp_path / str(seed), seed=seed, **size), tmp_path / f"{seed}.gguf", kind)
    write_gguf(tmp_path / "2", tmp_path / "other.gguf", "F16")
    loaded, fresh = (load_model(tmp_path / f"{seed}.gguf", quantization="gguf") for seed in (1, 2))
    loaded.weights.load(loaded.weights.open(tmp_path / "2.gguf"))
    assert torch.equal(logits(loaded), logits(fresh))
    loaded.weights.save()
    loaded.weights.give_back()
    loaded.weights.take_back()
    assert torch.equal(logits(loaded), logits(fresh))
    with pytest.raises(ModelLoadError, match=f"is f16, not {kind} as before"):
        loaded.weights.open(tmp_path / "other.gguf")
    for source in (tmp_path / "2", {"model.norm.weight": torch.ones(1)}):
        with pytest.raises(InvalidValue, match="keeps a GGUF's blocks"):
            loaded.weights.open(source)


def without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def with_tensor(name: str, tensor: Any) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: {**tensors, name: tensor}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without(NORM), f"tensor '{NORM}' is missing"),
        (lambda tensors: {}, r"\(and \d+ more\) is missing"),
        (with_tensor(NORM, torch.ones(65)), rf"tensor '{NORM}' has shape \[65\], expected \[64\]"),
        (with_tensor(NORM, torch.ones(64, dtype=torch.float64)), "torch.float64, not one of torch.float32"),
        (with_tensor(NORM, [1.0]), "is a list, no tensor"),
        (with_tensor(NORM, torch.ones(64, device="meta")), "lies on meta"),
        (with_tensor("model.more.weight", torch.ones(2)), "'model.more.weight' is not part of this architecture"),
        (lambda tensors: [*tensors.items(), (NORM, torch.ones(64))], f"tensor '{NORM}' comes twice"),
        (lambda tensors: 7, "weights=7 is no path and no collection"),
        (lambda tensors: "nowhere", "nowhere: no such file"),
    ],
)
def test_a_source_is_checked_whole_before_the_first_byte(
    change: Callable[[dict[str, Tensor]], Any], named: str, tmp_path: Path
) -> None:
    loaded = load_model(make_tiny("llama", tmp_path / "1", seed=1))
    tensors = load_file(make_tiny("llama", tmp_path / "2", seed=2) / "model.safetensors")
    before = logits(loaded)
    with pytest.raises((ModelLoadError, InvalidValue), match=named):
        loaded.weights.open(change(tensors))
    assert torch.equal(logits(loaded), before) and loaded.weights.is_whole


def test_weights_of_another_model_are_refused_though_they_fit(tmp_path: Path) -> None:
    loaded = load_model(make_tiny("llama", tmp_path / "1", seed=1))
    with pytest.raises(ModelLoadError, match=r"rope_theta is 5000.0, the engine's model has 10000.0"):
        loaded.weights.open(make_tiny("llama", tmp_path / "2", seed=2, rope_theta=5000.0))
    with pytest.raises(ModelLoadError, match="a MistralForCausalLM, the engine's model is a LlamaForCausalLM"):
        loaded.weights.open(make_tiny("mistral", tmp_path / "3", seed=2))


def test_what_cannot_be_read_at_all_has_changed_nothing(tmp_path: Path) -> None:
    loaded = load_model(make_tiny("llama", tmp_path / "1", seed=1))
    store = loaded.weights.open(make_tiny("llama", tmp_path / "2", seed=2))
    (tmp_path / "2" / "model.safetensors").unlink()
    before = logits(loaded)
    with pytest.raises(OSError, match="No such file"):
        loaded.weights.load(store)
    assert torch.equal(logits(loaded), before) and loaded.weights.is_whole


def test_what_ends_on_the_way_leaves_no_whole_weights(tmp_path: Path) -> None:
    loaded = load_model(make_tiny("llama", tmp_path / "1", seed=1))
    store = loaded.weights.open(make_tiny("llama", tmp_path / "2", seed=2))
    file = tmp_path / "2" / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ModelLoadError, match="ended inside tensor"):
        loaded.weights.load(store)
    assert not loaded.weights.is_whole
    loaded.weights.load(loaded.weights.open(tmp_path / "1"))
    assert torch.equal(logits(loaded), logits(load_model(tmp_path / "1"))) and loaded.weights.is_whole
