"""Which device runs, and what it decides where nothing was said. What a GPU does is in tests/cuda."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from perdure import EngineConfig
from perdure.api.errors import InvalidValue, ModelNotFound
from perdure.engine import on_cuda
from perdure.engine.resolve import resolve
from perdure.models.tiny import make_tiny
from perdure.runner.shapes import ShapeRules, shapes
from tests.engine.conftest import MakeLLM


def test_a_gpu_that_is_not_there_is_refused_before_a_model_is_looked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(InvalidValue, match=r"device='cuda': torch .* finds no CUDA device here"):
        resolve(EngineConfig(device="cuda", model="no/such/model"))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"linear_backend": "plain"}, "is not batch invariant on device='cpu': it needs batch_invariant=False"),
        ({"linear_backend": "triton"}, "is not for device='cpu', which takes auto, native, packed, "),
        ({"attention_backend": "hopper"}, "is not for device='cpu', which takes auto, native, tiled, plain, reference"),
        ({"attention_backend": "flashinfer", "batch_invariant": False}, "is not for device='cpu', which takes auto, "),
        ({"kv_memory": "managed"}, "is not for device='cpu', which takes device"),
    ],
    ids=str,
)
def test_what_a_cpu_has_not_is_refused_before_a_model_is_looked_for(
    setting: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    name, value = next(iter(setting.items()))
    with pytest.raises(InvalidValue, match=f"^{name}='{value}' {told}"):
        resolve(EngineConfig(device="auto", model="no/such/model", **setting))


def test_what_a_gpu_has_not_is_refused_before_a_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InvalidValue, match=r"^attention_backend='native' is not for device='cuda', which takes auto, "):
        resolve(EngineConfig(device="auto", model="no/such/model", attention_backend="native"))
    with pytest.raises(ModelNotFound):  # cuBLAS's products are the default there
        resolve(EngineConfig(device="auto", model="no/such/model", linear_backend="plain"))


def test_attention_without_what_the_model_needs_is_refused_in_words(tmp_path: Path) -> None:
    model = make_tiny("gemma3", tmp_path / "soft", attn_logit_softcapping=8.0)
    with pytest.raises(InvalidValue, match=r"attention_backend='plain' has no soft cap \(softcap=8.0\)"):
        resolve(EngineConfig(device="cpu", model=str(model), attention_backend="plain", batch_invariant=False))


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


def test_what_became_of_graphs_is_described(make_llm: MakeLLM) -> None:
    config: dict[str, Any] = {"max_num_batched_tokens": 128, "cuda_graph_max_tokens": 64, "cuda_graph_mixed_prefill": 4}
    llm = make_llm(device="cpu", num_cuda_graphs=3, max_model_len=100, **config)
    about = llm.describe()
    num_shapes = len(shapes(ShapeRules.of(llm._engine.resolved.config, max_len=100)))
    assert about["cuda_graphs"] == f"{num_shapes}, of up to 64 tokens: padded to, not captured" and num_shapes > 3
    assert about["cuda_graph_sizing"] == "hybrid" and about["cuda_graph_max_tokens"] == 64
    assert about["cuda_graph_mixed_prefill"] == 4 and not about["cuda_graph_all_prefills"]
    assert "cuda_graphs" not in make_llm(device="cpu", **config).describe()
