"""The tiny model M, its reference, and engines that must come to a clean end after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import LLM, AsyncLLM, SamplingParams
from perdure.api.output import RequestOutput
from perdure.engine.prompts import Prompt
from perdure.models.tiny import make_tiny_llama
from tests.engine.helpers import PAGE, check_clean_end, check_close, check_equal
from tests.engine.reference import Reference

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
"""For tests of the engine that hold on both."""

MakeLLM = Callable[..., LLM]
MakeAsync = Callable[..., AsyncLLM]
Check = Callable[[RequestOutput, RequestOutput], None]
Solo = Callable[[Prompt, SamplingParams], RequestOutput]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M: random weights, seed 0, 2 layers, hidden 64, 4 heads (2 KV), vocabulary 512, 256 tokens, fp32."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-model"), seed=0)


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Reference:
    return Reference(tiny)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products of tiny models: waiting for a second core costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device() -> str:
    """Where engines run; `DEVICES` names others."""
    return "cpu"


@pytest.fixture
def settings_there(device: str) -> dict[str, Any]:
    """Of engines on that device."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return {"device": device, "page_size": PAGE, "num_pages": 128, "check_integrity": True}


@pytest.fixture
def check_as_promised(device: str) -> Check:
    """Compares two results of one request that were computed in different company. Equal bits on a CPU; on a GPU, where
    products give other last places to other numbers of rows, the same ids and nearly the same scores."""
    return check_equal if device == "cpu" else check_close


@pytest.fixture
def make_llm(tiny: Path, reference: Reference, one_thread: None, settings_there: dict[str, Any]) -> Iterator[MakeLLM]:
    """Engines of M that check their books in every turn; those still open must be clean when the test ends."""
    made: list[LLM] = []

    def make(model: Path = tiny, **config: Any) -> LLM:
        llm = LLM(str(model), **{**settings_there, **config})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        if llm._engine._dead is None and llm._engine.resolved.model_path == tiny:
            check_clean_end(llm._engine, reference)
        llm.shutdown()


@pytest.fixture
def make_async(
    tiny: Path, reference: Reference, one_thread: None, settings_there: dict[str, Any]
) -> Iterator[MakeAsync]:
    """The same for asyncio; made inside a running event loop or before it."""
    made: list[AsyncLLM] = []

    def make(model: Path = tiny, **config: Any) -> AsyncLLM:
        llm = AsyncLLM(str(model), **{**settings_there, **config})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        check_clean_end(llm._engine, reference)
        llm.shutdown()


@pytest.fixture
def solo(make_llm: MakeLLM) -> Solo:
    """A request's result when nothing happens to it: alone, in one chunk, one step at a time, nothing cached."""
    engines: list[LLM] = []

    def run(ids: Prompt, params: SamplingParams) -> RequestOutput:
        if not engines:
            engines.append(make_llm(steps_in_flight=1, enable_prefix_caching=False))
        (output,) = engines[0].generate([ids], params)
        return output

    return run
