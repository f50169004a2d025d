"""Which device runs, and what it decides where nothing was said. What a GPU does is in tests/cuda."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from perdure import EngineConfig
from perdure.api.errors import InvalidValue
from perdure.engine import on_cuda
from perdure.engine.resolve import resolve
from perdure.runner.shapes import ShapeRules, ShapeSet
from tests.engine.conftest import MakeLLM


def test_a_gpu_that_is_not_there_is_refused_before_a_model_is_looked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(InvalidValue, match=r"device='cuda': torch .* finds no CUDA device here"):
        resolve(EngineConfig(device="cuda", model="no/such/model"))


def test_managed_memory_is_refused_on_a_cpu() -> None:
    with pytest.raises(InvalidValue, match=r"kv_memory='managed' is for device='cuda'"):
        resolve(EngineConfig(device="cpu", kv_memory="managed", model="no/such/model"))


def test_what_a_cpu_decides(make_llm: MakeLLM) -> None:
    about = make_llm(device="cpu", max_num_batched_tokens=None, batch_invariant=None).describe()
    assert (about["device"], about["max_num_batched_tokens"], about["batch_invariant"]) == ("cpu", 512, True)


class Full:
    """A device without memory, as its libraries say it."""

    def __init__(self, error: RuntimeError) -> None:
        self.error = error

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise self.error


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (
            "engine.resolve.load_model",
            r"model='.*', dtype='auto': the device has no room for its weights; a smaller .*",
        ),
        (
            "engine.resolve._on_cpu",
            r"num_pages=7, gpu_memory_utilization=0.9, .*, cuda_graph_max_tokens=512: .* lower one .*",
        ),
        ("models.weight_set.WeightSet.finish", r"num_pages=7, gpu_memory_utilization=0.9, .* lower one of them"),
    ],
)
def test_no_memory_on_the_device_is_told_with_what_to_lower(
    where: str, told: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it."))
    monkeypatch.setattr(f"perdure.{where}", full)
    with pytest.raises(InvalidValue, match=rf"^{told} \(CUDA out of memory\. Tried to allocate 2\.00 GiB\.\)$"):
        resolve(EngineConfig(device="cpu", model=str(tiny), num_pages=7))


def test_no_memory_for_the_largest_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_num_batched_tokens=9000, max_num_seqs=70)
    monkeypatch.setattr(on_cuda, "_runner", Full(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")))
    with pytest.raises(InvalidValue, match=r"^max_num_batched_tokens=9000, max_num_seqs=70: .* lower them \(CUBLAS"):
        on_cuda.room_for_pages(config, loaded=None, max_model_len=8)  # type: ignore[arg-type]
    monkeypatch.setattr(on_cuda, "_runner", Full(RuntimeError("an illegal address")))
    with pytest.raises(RuntimeError, match=r"^an illegal address$"):
        on_cuda.room_for_pages(config, loaded=None, max_model_len=8)  # type: ignore[arg-type]


def test_what_became_of_graphs_is_described() -> None:
    config = EngineConfig(max_num_batched_tokens=128, cuda_graph_max_tokens=64, cuda_graph_mixed_prefill=4)
    runner: Any = SimpleNamespace(shapes=ShapeSet(ShapeRules.of(config, max_len=100)))
    about = on_cuda.describe(config, runner)
    assert about["cuda_graphs"].endswith("of up to 64 tokens") and about["cuda_graph_max_tokens"] == 64
    assert about["cuda_graph_mixed_prefill"] == 4 and not about["cuda_graph_all_prefills"]
