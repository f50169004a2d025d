"""Which device runs, and what it decides where nothing was said. What a GPU does is in tests/cuda."""

from __future__ import annotations

import pytest
import torch

from perdure import EngineConfig
from perdure.api.errors import InvalidValue
from perdure.engine.resolve import resolve
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
