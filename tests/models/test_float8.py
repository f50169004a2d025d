"""Weights in 8 bits: rounded when they are loaded, or stored so, by whoever's form; other weights in their place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from perdure.api.errors import InvalidValue, ModelLoadError
from perdure.models.tiny import make_tiny, make_tiny_llama
from perdure.models.weights import LoadedModel, load_model
from perdure.ops.float8 import Float8Weight, quantised_rows
from perdure.ops.native import library
from tests.models.helpers import logits_in_chunks

IDS = torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(0)).tolist()
FORMS = ["invariant", "reference", *(["auto", "native"] if library() is not None else [])]
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNEL, "input_activations": TOKEN}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def logits(loaded: LoadedModel) -> Tensor:
    return logits_in_chunks(loaded.model, IDS, [len(IDS)])


def narrow(loaded: LoadedModel) -> list[str]:
    return [name for name, weight in loaded.weights._weights.items() if isinstance(weight, Float8Weight)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("plain") / "1", seed=1, bias=True)


def stored(plain: Path, target: Path, said: Mapping[str, Any] | None, *, skipped: tuple[str, ...] = ()) -> Path:
    """The model as a checkpoint in 8 bits. skipped: modules that stay as they are."""
    target.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if ".layers." in name and name.endswith("_proj.weight") and not any(module in name for module in skipped):
            codes, factors = quantised_rows(tensor)
            if said == FP8:  # one factor for all
                factors = tensor.abs().max() / 448.0
                codes = (tensor / factors).to(torch.float8_e4m3fn)
            tensors[name], tensors[name + "_scale"] = codes, factors if said == FP8 else factors[:, None]
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | ({} if said is None else {"quantization_config": said})))
    return target


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
@pytest.mark.parametrize("form", FORMS)
def test_layers_products_are_rounded_and_nothing_else(form: str, family: str, tmp_path: Path) -> None:
    """A quarter of their memory; logits near the unrounded model's, and a tied head untouched."""
    path = make_tiny(family, tmp_path / family)
    whole, loaded = load_model(path, linear="invariant"), load_model(path, linear=form, quantization="fp8")
    assert (whole.quantization, loaded.quantization) == (None, "fp8") and not narrow(whole)
    held = whole.weights._weights
    layers = {name: w for name, w in held.items() if name.startswith("layers.") and len(w.shape) == 2}
    assert set(narrow(loaded)) == set(layers) and loaded.num_parameters == whole.num_parameters
    saved = sum(4 * math.prod(w.shape) for w in layers.values()) * 3 // 4
    assert whole.num_bytes - loaded.num_bytes > 0.9 * saved
    found, right = logits(loaded), logits(whole)
    assert 1e-3 < (found - right).norm() / right.norm() < 0.5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("said", [COMPRESSED, FBGEMM, FP8], ids=["compressed-tensors", "fbgemm_fp8", "fp8"])
def test_checkpoints_in_8_bits(form: str, said: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    """Factors by row give the bits of rounding the plain checkpoint; one for a tensor is near it. What is stored as it
    is stays so, other weights go in their place, plain and in 8 bits, and nothing is left of these."""
    path = stored(plain, tmp_path / "stored", said, skipped=("o_proj",))
    loaded, rounded = load_model(path, linear=form), load_model(plain, linear=form, quantization="fp8")
    assert loaded.quantization == "fp8"
    assert set(narrow(rounded)) - set(narrow(loaded)) == {"layers.0.o.weight", "layers.1.o.weight"}
    first = logits(loaded)
    other = make_tiny_llama(tmp_path / "other", seed=2, bias=True)
    loaded.weights.load(loaded.weights.open(other))
    assert not torch.equal(logits(loaded), first)
    loaded.weights.load(loaded.weights.open(load_file(path / "model.safetensors")))
    assert torch.equal(logits(loaded), first)
    loaded.weights.load(loaded.weights.open(plain))
    assert (logits(loaded) - first).norm() <= (0.3 if said == FP8 else 0.0) * first.norm()


def test_a_bound_of_inputs_is_kept(plain: Path, tmp_path: Path) -> None:
    """fbgemm_fp8's upper bound: a small one changes what comes out."""
    low = stored(plain, tmp_path / "low", FBGEMM | {"activation_scale_ub": 0.5})
    high = stored(plain, tmp_path / "high", FBGEMM)
    loaded = load_model(low)
    assert not torch.equal(logits(loaded), logits(load_model(high)))
    with pytest.raises(ModelLoadError, match=r"most=1200\.0.*most=0\.5"):
        loaded.weights.open(high)


def test_rounded_in_place_as_by_a_fresh_load_and_away_and_back(plain: Path, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", seed=2, bias=True)
    loaded, fresh = (load_model(path, quantization="fp8") for path in (plain, other))
    before, right = logits(loaded), logits(fresh)
    loaded.weights.load(loaded.weights.open(other))
    assert torch.equal(logits(loaded), right) and not torch.equal(before, right)
    loaded.weights.load(loaded.weights.open(load_file(plain / "model.safetensors")))
    assert torch.equal(logits(loaded), before)
    loaded.weights.save()
    loaded.weights.give_back()
    loaded.weights.take_back()
    assert torch.equal(logits(loaded), before) and loaded.weights.is_whole


def test_drawn_weights_are_rounded_too(plain: Path) -> None:
    loaded = load_model(plain, load_format="dummy", quantization="fp8")
    assert len(narrow(loaded)) == 8 and logits(loaded).isfinite().all()


def test_what_does_not_fit_is_refused(plain: Path, tmp_path: Path) -> None:
    whole = load_model(plain)
    some = stored(plain, tmp_path / "some", COMPRESSED, skipped=("k_proj",))
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight' is stored in 8 bits and .*k_proj\.weight' is not"):
        load_model(some)
    path = stored(plain, tmp_path / "stored", COMPRESSED)
    with pytest.raises(ModelLoadError, match=r"is stored in 8 bits, the engine holds it in torch\.float32"):
        whole.weights.open(path)
    with pytest.raises(InvalidValue, match="quantization='gguf' keeps the blocks of a GGUF file"):
        load_model(path, quantization="gguf")


def group(part: str, **changes: Any) -> dict[str, Any]:
    values = COMPRESSED["config_groups"]["group_0"]  # type: ignore[index]
    return COMPRESSED | {"config_groups": {"g": values | {part: values[part] | changes}}}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (FP8 | {"activation_scheme": "static"}, "activation_scheme='static' is not supported; supported: 'dynamic'"),
        (FP8 | {"weight_block_size": [128, 128]}, r"weight_block_size=\[128, 128\] is not supported; supported: none"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme={'num_bits': 8} is not supported"),
        (COMPRESSED | {"config_groups": {}}, "config_groups is missing"),
        (group("weights", num_bits=4), r"config_groups\.g\.weights\.num_bits=4 is not supported; supported: 8"),
        (group("weights", strategy="block"), r"strategy='block' is not supported; supported: 'channel' or 'tensor'"),
        (group("input_activations", dynamic=False), r"g\.input_activations\.dynamic=False is not supported"),
        (group("input_activations", strategy="tensor"), r"strategy='tensor' is not supported; supported: 'token'"),
        (FBGEMM | {"activation_scale_ub": -1}, "activation_scale_ub=-1 is not a positive number"),
    ],
)
def test_other_forms_are_refused_by_the_field(plain: Path, tmp_path: Path, said: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(stored(plain, tmp_path / "stored", said))
