"""The tables are the law: what they lack raises and changes nothing; the page in docs is generated from them."""

from itertools import product
from pathlib import Path

import pytest
from docs.lifecycle import page

from perdure.core.group import Group
from perdure.core.lifecycle import ENGINE_MOVES, FINAL, REQUEST_MOVES, EngineState, IllegalMove, Status, moved
from perdure.core.state import RequestState
from perdure.core.stopping import StopRule
from tests.core.helpers import no_text, request

ROOT = Path(__file__).parents[2]


def make() -> RequestState:
    one = request("a", [1, 2])
    return RequestState(Group(one, 7, "raw"), 0, StopRule(one, (), 4, no_text))


@pytest.mark.parametrize(("current", "to"), list(product(Status, Status)))
def test_an_illegal_move_raises_and_changes_nothing(current: Status, to: Status) -> None:
    state = make()
    state.status = current
    if to in REQUEST_MOVES[current]:
        state.move(to)
        assert state.status is to
    else:
        with pytest.raises(IllegalMove, match=f"{current.name} may become"):
            state.move(to)
        assert state.status is current


def test_every_status_can_end_and_a_final_one_never_moves() -> None:
    assert {Status.FINISHED, Status.ABORTED, Status.FAILED} == FINAL
    for status, moves in REQUEST_MOVES.items():
        assert moves == {} if status in FINAL else set(moves) >= FINAL


def test_a_stopped_engine_stays_stopped() -> None:
    assert ENGINE_MOVES[EngineState.STOPPED] == {}
    with pytest.raises(IllegalMove):
        moved(ENGINE_MOVES, EngineState.STOPPED, EngineState.RUNNING)


def test_the_page_in_docs_is_generated_from_the_tables() -> None:
    assert (ROOT / "docs" / "lifecycle.md").read_text() == page(), "run: python docs/lifecycle.py"
