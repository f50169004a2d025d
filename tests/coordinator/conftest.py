"""Fleets of the tiny model, and one engine of it, driven directly, to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure import LLM
from perdure.coordinator.router import Routing
from tests.coordinator.fleet import Fleet

MakeFleet = Callable[..., Fleet]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M: random weights, seed 0, 2 layers, hidden 64, 4 heads (2 KV), vocabulary 512, 256 tokens, fp32."""
    from perdure.models.tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("tiny-model"), seed=0)


@pytest.fixture(scope="module")
def direct(tiny: Path) -> Iterator[LLM]:
    """The same engine driven directly, one step at a time, nothing cached."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with LLM(str(tiny), page_size=16, num_pages=128, steps_in_flight=1, enable_prefix_caching=False) as llm:
        yield llm
    torch.set_num_threads(before)


@pytest.fixture
def make_fleet(tiny: Path, tmp_path: Path) -> Iterator[MakeFleet]:
    """Fleets that must come to a clean end: nothing left anywhere, every process gone."""
    made: list[Fleet] = []

    def make(num_replicas: int = 2, routing: Routing | None = None, model: Path = tiny, **settings: Any) -> Fleet:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        fleet = Fleet(folder, model, num_replicas, routing or Routing("load_balanced"), **settings)
        made.append(fleet)
        return fleet

    yield make
    try:
        for fleet in made:
            fleet.check_retired()
            fleet.stop()
    except BaseException:
        for fleet in made:
            fleet.abandon()
        raise
