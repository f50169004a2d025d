"""T45 on the scripted model: flat logits, so every token shows the key of its draw, and nothing else may."""

from __future__ import annotations

import random
from typing import Any

import pytest

from perdure.core.admission import derived_seed
from tests.scenarios.scripted import Call, Stage, check_equals_solo, flat
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4])
PROMPT = list(range(40))


def drawn(stage: Stage, prompt: list[int], seed: int | None, **settings: Any) -> Call:
    return stage.submit(prompt, flat, temperature=1.0, seed=seed, **{"max_tokens": 32, **settings})


def alone() -> list[int]:
    stage = Stage(1)
    call = drawn(stage, PROMPT, 42)
    stage.run()
    return call.ended.token_ids


@DEPTHS
@pytest.mark.parametrize("budget", [512, 7, 1])
@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize("seeded", [False, True])
def test_T45_neighbours_and_places(seeded: bool, place: int, budget: int, depth: int) -> None:
    """R beside 7 others, first or last of them, its prompt in one piece or in chunks, at any depth: the same ids."""
    stage = Stage(depth, max_num_batched_tokens=budget)
    calls = []
    for index in range(8):
        if index == place:
            request = drawn(stage, PROMPT, 42)
        else:
            calls.append(drawn(stage, [index, index], 1000 + index if seeded else None, max_tokens=10))
    stage.run()
    assert request.ended.token_ids == alone()
    for call in (request, *calls):
        check_equals_solo(call)
    assert len({*request.ended.token_ids}) > 20, "flat logits wander"
    stage.check_clean_end()


@DEPTHS
def test_T45_neighbours_come_and_go(depth: int) -> None:
    """Others arrive, end and are aborted at random, and R itself is put aside for want of pages."""
    truth, num_evictions, num_pauses = alone(), 0, 0
    for seed in range(6):
        rng = random.Random(f"{seed}/{depth}")
        stage = Stage(depth, num_pages=9, max_num_seqs=5, max_num_batched_tokens=33, paused_pages=4 * (seed % 2))
        calls = [drawn(stage, [9] * 24, None, max_tokens=40)]
        stage.turn(3)
        request = drawn(stage, PROMPT, 42, priority=1)
        while not request.num_ends:
            if rng.random() < 0.3 and len(calls) < 12:
                calls.append(
                    drawn(stage, [rng.randrange(500)] * rng.randint(1, 30), None, max_tokens=rng.randint(1, 30))
                )
            if rng.random() < 0.1:
                stage.abort(rng.choice(calls).request.request_id)
            stage.turn()
        stage.run()
        assert request.ended.token_ids == truth
        num_evictions += request.ended.num_evictions
        num_pauses += request.ended.num_pauses
        stage.check_clean_end()
    witness("T45", num_evictions_of_the_request=num_evictions, num_pauses_of_the_request=num_pauses)


@DEPTHS
def test_T45_a_missing_seed_comes_from_the_arrival_alone(depth: int) -> None:
    """Resolved once, at admission, and kept through evictions; refusals do not count as arrivals."""
    stage = Stage(depth, num_pages=6, seed=11, max_num_seqs=4)
    stage.submit([-1], flat)
    calls = [drawn(stage, [3] * 30, None, max_tokens=20) for _ in range(4)]
    stage.run()
    assert [call.ended.seed for call in calls] == [derived_seed(11, 0, arrival) for arrival in range(4)]
    assert len({tuple(call.ended.token_ids) for call in calls}) == 4
    for call in calls:
        check_equals_solo(call)
    witness("T45", num_evictions=sum(call.ended.num_evictions for call in calls))
    stage.check_clean_end()
