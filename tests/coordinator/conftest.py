"""Fleets of the tiny model, and one engine of it, driven directly, to compare them with.

A fleet takes seconds to start, so replicas of one kind serve one test after another. Each test ends with the check that
nothing is left of it anywhere, and a fleet in which one failed is not used again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure import LLM
from perdure.coordinator.router import Routing
from tests.coordinator.fleet import QUIET, Fleet

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


Kept = dict[str, Fleet]
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fixtures are to know whether their test failed."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session")
def kept_fleets() -> Iterator[Kept]:
    """By what their replicas are."""
    kept: Kept = {}
    try:
        yield kept
        for name in list(kept):
            kept.pop(name).stop()
    finally:
        for fleet in kept.values():
            fleet.abandon()


@pytest.fixture
def make_fleet(tiny: Path, kept_fleets: Kept, request: pytest.FixtureRequest) -> Iterator[MakeFleet]:
    """Fleets that must come to rest: nothing left anywhere. Where only the routing differs, replicas meet another
    coordinator."""
    used: Kept = {}

    def make(num_replicas: int = 2, routing: Routing = QUIET, model: Path = tiny, **settings: Any) -> Fleet:
        name = f"{num_replicas} {model} {sorted(settings.items())}"
        fleet = kept_fleets.pop(name, None)
        if fleet is None:
            fleet = Fleet(model, num_replicas, routing, **settings)
        used[name] = fleet
        if fleet.routing != routing:
            fleet.end_coordinator()
            fleet.begin(routing)
            fleet.wait_until_all_serve()
        return fleet

    try:
        yield make
        if not request.node.stash.get(FAILED, False):
            for fleet in used.values():
                fleet.check_retired()
            kept_fleets.update(used)
            used.clear()
    finally:
        for fleet in used.values():
            fleet.abandon()
