"""Weights of a GPU, written from pinned memory by several threads, beside graphs that are captured meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from perdure import LLM, ModelLoadError
from perdure.models.base import Part
from perdure.models.filling import Filling
from perdure.models.store import SINGLE_FILE, Store, directory_store, store_of_tensors
from perdure.models.tiny import make_tiny
from perdure.models.weight_set import WeightSet
from perdure.models.weights import load_model
from perdure.ops.float8 import Float8Weight
from perdure.ops.kernels import Weight
from perdure.runner.cuda.runner import CudaRunner
from tests.cuda.helpers import Random
from tests.engine.helpers import prompt, settings

SIZES = [(1500, 700), (512, 512), (512, 512), (100, 24), (4096, 128), (2000,), (64, 4096), (7, 1001)]
KINDS: dict[str, Callable[[tuple[int, ...], torch.device], Weight]] = {
    "f32": lambda shape, device: torch.empty(shape, dtype=torch.float32, device=device),
    "f16": lambda shape, device: torch.empty(shape, dtype=torch.float16, device=device),
    "bf16": lambda shape, device: torch.empty(shape, dtype=torch.bfloat16, device=device),
    "8": lambda shape, device: (
        Float8Weight((shape[0], shape[-1]), device) if len(shape) == 2 else torch.empty(shape, device=device)
    ),
}


def memories(weight: Weight) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else [weight.codes.float(), weight.factors]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stored", "in_memory"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_what_arrives_is_what_a_cpu_writes(gpu, tmp_path, kind, stored, in_memory):
    """Bits and checksums, through buffers that take hundreds of turns. What computes meanwhile is not disturbed."""
    random = Random(torch.device("cpu"))
    tensors = {str(number): random(*shape).to(stored) for number, shape in enumerate(SIZES)}
    tensors["0"][0, 0], tensors["1"][2, 3], tensors["6"][5] = torch.nan, torch.inf, 0.0
    save_file(tensors, tmp_path / SINGLE_FILE)

    def store() -> Store:
        return store_of_tensors(tensors.items()) if in_memory else directory_store(tmp_path)

    table = [(Part(name, name, tuple(tensor.shape)),) for name, tensor in tensors.items()]
    makes = KINDS[kind]
    right = [(makes(parts[0].shape, torch.device("cpu")), parts) for parts in table]
    alone, together = store(), store()
    for weight, parts in right:
        alone.fill(weight, parts)
    found = [(makes(parts[0].shape, gpu), parts) for parts in table]
    x = torch.ones(2048, 2048, device=gpu)
    y = x @ x
    filling = Filling(together, found, gpu, 1 << 12)
    z = x @ x
    filling.finish()
    assert torch.equal(y, z) and together.checksums == alone.checksums
    for (there, _), (here, parts) in zip(found, right, strict=True):
        for one, other in zip(memories(there), memories(here), strict=True):
            cut = one.cpu()[tuple(slice(size) for size in other.shape)]
            assert torch.equal(cut.view(torch.uint8), other.view(torch.uint8)) or torch.equal(
                cut.float().nan_to_num(7e7), other.float().nan_to_num(7e7)
            ), parts


def generated(llm: LLM, temperature: float) -> list[list[int]]:
    prompts, params = (
        [prompt(length) for length in (5, 33, 20)],
        settings(temperature=temperature, seed=3, max_tokens=24),
    )
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    ("family", "invariant"), [("llama", True), ("qwen3", True), ("gemma3", True), ("llama", False)]
)
def test_nothing_depends_on_what_weights_hold_while_steps_are_captured(gpu, tmp_path, monkeypatch, family, invariant):
    """They are measured and captured on NaN; then the weights come."""
    path, temperature = make_tiny(family, tmp_path / "1"), 0.8 if invariant else 0.0
    config = {"device": "cuda", "max_num_seqs": 8, "check_integrity": True, "batch_invariant": invariant}
    with LLM(str(path), **config) as llm:
        right, digest = generated(llm, temperature), llm._engine.describe()["weights_digest"]
    begin, finish, late = WeightSet.begin, WeightSet.finish, []

    def begin_later(self, store):
        for tensor in (*self._weights.values(), *(tensor for tensor, _ in self._weights.derived)):
            tensor.fill_(torch.nan)
        late.append(store)

    def begin_now(self):
        assert self._weights["embedding.weight"].isnan().all()
        begin(self, late.pop())
        finish(self)

    monkeypatch.setattr(WeightSet, "begin", begin_later)
    monkeypatch.setattr(WeightSet, "finish", begin_now)
    with LLM(str(path), **config) as llm:
        assert not late and llm._engine.resolved.runner.graphs._captured
        assert generated(llm, temperature) == right and llm._engine.describe()["weights_digest"] == digest


def test_a_file_that_ends_while_it_is_read_leaves_nothing_behind(gpu, tmp_path, monkeypatch):
    """It is told by the start, and the pool's memory is given back."""
    path = make_tiny("llama", tmp_path / "1")
    config = {"device": "cuda", "max_num_seqs": 8, "num_pages": 64, "max_model_len": 256}
    fill_part, release, left = Store.fill_part, CudaRunner.release, []

    def cut(self, weight, first, part, *how):
        if part.hf == "model.norm.weight":
            raise ModelLoadError("the file ended inside tensor 'model.norm.weight'")
        fill_part(self, weight, first, part, *how)

    def released(self):
        release(self)
        left.append(self._kv._arena.is_committed)

    monkeypatch.setattr(Store, "fill_part", cut)
    monkeypatch.setattr(CudaRunner, "release", released)
    with pytest.raises(ModelLoadError, match="ended inside tensor"):
        LLM(str(path), **config)
    assert left == [False]
    monkeypatch.undo()
    with LLM(str(path), **config) as llm:
        assert all(generated(llm, 0.0))


def test_an_engine_in_another_type_holds_what_a_cpu_would_round(gpu, tmp_path):
    path = make_tiny("qwen3", tmp_path / "1", dtype="bfloat16")
    for dtype in ("float16", "float32"):
        there, here = (
            load_model(path, dtype=dtype, linear=linear, device=device)
            for linear, device in (("auto", "cuda"), ("plain", "cpu"))
        )
        assert there.weights.digest == here.weights.digest
        for name, weight in here.weights._weights.items():
            assert torch.equal(there.weights._weights[name].cpu(), weight), name
