"""Whether a request is taken in while another waits for a page: the option at both values."""

from __future__ import annotations

import pytest

from perdure.core.lifecycle import Status
from tests.scenarios.scripted import Stage, check_equals_solo, counting
from tests.witness import witness


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("beside", [True, False])
def test_admission_beside_a_paused_request(beside: bool, depth: int) -> None:
    """One plan: C pauses for want of a page, E is evicted for X and leaves pages that N, which goes first, can have."""
    stage = Stage(
        depth, num_pages=7, page_size=4, paused_pages=2, enable_prefix_caching=False, admit_beside_paused=beside
    )
    calls = {name: stage.submit([1] * length, counting(60), max_tokens=12) for name, length in zip("CXE", (7, 7, 9))}
    stage.until(lambda: all(call.state.num_planned for call in calls.values()))
    calls["N"] = late = stage.submit([2, 3], counting(90), max_tokens=5, priority=-1)
    admitted_beside = 0
    plan = stage.scheduler.plan

    def planned(most_steps: int) -> object:
        nonlocal admitted_beside
        made = plan(most_steps)
        paused = sum(state.status is Status.PAUSED for state in stage.scheduler.requests.residents)
        admitted_beside += bool(made is not None and made.row_inits and paused)
        return made

    stage.scheduler.plan = planned  # type: ignore[assignment, method-assign]
    stage.run()
    assert admitted_beside == beside
    stats = stage.stats()
    assert stats.num_pauses and stats.num_evictions
    for call in calls.values():
        check_equals_solo(call)
    assert len(late.residencies) == 1
    witness("admit-beside-paused", num_pauses=stats.num_pauses, option=str(beside), admitted=str(admitted_beside))
    stage.check_clean_end()
