"""Interruption storms on the real engine (`storm`), and faults that they must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure.api.checkpoint import Checkpoint
from perdure.core import checkpoint
from perdure.core.requests import Requests
from perdure.core.state import RequestState
from perdure.models.tiny import make_tiny_llama
from perdure.runner.kv_store import KVStore
from tests.engine.conftest import DEVICES
from tests.engine.storm import STORMS_A_SEED, run_storms
from tests.engine.storm_parts import PLACES, Truth
from tests.witness import witness

NUM_SEEDS = 4

VISITED = (
    *(f"depth {depth}" for depth in (1, 2, 3, 4)),
    *("num_evictions", "num_pauses", "num_cached_tokens", "stop", "length", "abort", "refused requests", "reset"),
    *(f"pause {mode}" for mode in ("keep", "wait", "abort")),
    *(f"suspended by {kv}" for kv in ("persist", "offload", "recompute")),
    *("updates", "updates and back", "results of several weights", "went on here", "went on there"),
    *("later samples", "copies", "structured to their end", "pinned pages", "refused pins", "bursts"),
    *("padded steps", "cut prompts"),
    *(f"checkpoint while running, engine {state}" for state in ("running", "paused", "suspended")),
)


@pytest.fixture(scope="module")
def truths(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Truth]]:
    """By device; each is made once."""
    models = tiny, make_tiny_llama(tmp_path_factory.mktemp("other-weights"), seed=1)
    made: dict[str, Truth] = {}

    def of(device: str) -> Truth:
        if device not in made:
            made[device] = Truth(models, PLACES[device])
        return made[device]

    yield of
    for truth in made.values():
        truth.close()


@pytest.fixture
def truth(truths: Callable[[str], Truth], settings_there: dict[str, Any], device: str) -> Truth:
    return truths(device)


@DEVICES
def test_storms_do_not_show_in_any_result(truth: Truth, device: str, one_thread: None, soak_factor: int) -> None:
    """Each finished request equals its solo run (ids, scores, text), whatever came in between, and bit for bit where
    that is promised; at the end nothing is kept of anything. 40 storms; in a soak 500."""
    marks: Counter[str] = Counter()
    num_seeds = NUM_SEEDS if soak_factor == 1 else 5 * soak_factor
    for seed in range(num_seeds):
        run_storms(seed, truth, marks)
    depth = truth.place.home.get("steps_in_flight")
    elsewhere = {f"depth {other}" for other in (1, 2, 3, 4) if depth is not None and other != depth}
    missed = [name for name in VISITED if not marks[name] and name not in elsewhere]
    assert not missed, f"{marks['storms']} storms never visited {missed}"
    assert marks["storms"] >= num_seeds * STORMS_A_SEED
    witness("storm", device=device, marks={name.replace(" ", "-"): number for name, number in sorted(marks.items())})


# Faults that a storm must find


def _restored_a_page_further(patch: pytest.MonkeyPatch) -> None:
    right = KVStore.restore

    def wrong(store: KVStore, pages: Any) -> None:
        if store._away is not None:
            away, copy = store._away
            store._away = away, copy.roll(1, dims=3)
        right(store, pages)

    patch.setattr(KVStore, "restore", wrong)


def _scores_left_out_of_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    right = checkpoint.take

    def wrong(*arguments: Any) -> Checkpoint:
        taken = right(*arguments)
        samples = []
        for one in taken.samples:
            if one.scores is not None:
                one = replace(one, scores=replace(one.scores, chosen=bytes(len(one.scores.chosen))))
            samples.append(one)
        return replace(taken, samples=tuple(samples))

    patch.setattr(checkpoint, "take", wrong)


def _mark_of_later_weights_lost(patch: pytest.MonkeyPatch) -> None:
    right = RequestState.stamp

    def wrong(state: RequestState, epoch: int) -> None:
        if not state.epochs:
            right(state, epoch)

    patch.setattr(RequestState, "stamp", wrong)


def _kv_of_other_weights_goes_on(patch: pytest.MonkeyPatch) -> None:
    right = Requests.take_weights

    def wrong(requests: Requests, epoch: int, digest: str, cache: Any, in_flight: Any) -> None:
        right(requests, epoch, digest, cache, "keep")
        for state in requests.residents:
            state.exact = True

    patch.setattr(Requests, "take_weights", wrong)


FAULTS = [
    _restored_a_page_further,
    _scores_left_out_of_a_checkpoint,
    _mark_of_later_weights_lost,
    _kv_of_other_weights_goes_on,
]


@pytest.mark.parametrize("plant", FAULTS, ids=[fault.__name__.strip("_") for fault in FAULTS])
def test_a_planted_fault_does_not_get_through_a_storm(
    plant: Any, truth: Truth, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError) as found:
        for seed in range(NUM_SEEDS):
            run_storms(seed, truth, Counter())
    assert any("replay: python -m tests.engine.storm --seed" in note for note in found.value.__notes__)
