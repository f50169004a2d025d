"""Aborts from every status a request can have, with any number of steps in flight: the partial result, at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.api import command as cmd
from perdure.core.lifecycle import Status
from tests.scenarios.scripted import Call, Stage, check_equals_solo, counting
from tests.scenarios.test_checkpoint import DEPTHS, WHERE, running
from tests.witness import witness

Where = Callable[[int], tuple[Stage, Call]]


def engine_suspended(kv: cmd.KVMode) -> Where:
    def where(depth: int) -> tuple[Stage, Call]:
        stage, call = running(depth)
        ticket = stage.ticket()
        stage.inbox.put(cmd.Suspend(ticket, kv))
        stage.until(lambda: ticket in stage.answers)
        assert stage.stats().state == "suspended"
        return stage, call

    where.__name__ = f"suspended_by_{kv}"
    return where


def gone_on(depth: int) -> tuple[Stage, Call]:
    """It waits here, after a checkpoint of another engine."""
    there, first = running(depth)
    found = there.checkpoint(first, end=True)
    stage = Stage(depth, max_num_seqs=1)
    stage.submit([1], counting(100), max_tokens=20)
    call = stage.go_on(found, first.script)
    stage.turn(3)
    assert call.state.status is Status.WAITING and call.num_output == 6
    return stage, call


EVERYWHERE: tuple[Where, ...] = (
    *WHERE,
    *(engine_suspended(kv) for kv in ("persist", "offload", "recompute")),
    gone_on,
)


@DEPTHS
@pytest.mark.parametrize("by", ["id", "ticket", "all"])
@pytest.mark.parametrize("where", EVERYWHERE, ids=lambda where: where.__name__)
def test_an_abort_gives_what_there_is_and_the_id_back_at_once(where: Where, by: str, depth: int) -> None:
    """One end, in the turn of the abort, with everything recorded; the same id is live again in that turn."""
    stage, call = where(depth)
    state = call.state
    status, known, in_flight = state.status.value, call.num_output, state.in_flight
    name = call.request.request_id
    if by == "all":
        stage.abort_all()
    else:
        stage.inbox.put(cmd.Abort(request_ids=[name]) if by == "id" else cmd.Abort(tickets=[call.request.ticket]))
    is_open = stage.stats().state != "suspended"
    again = stage.submit([8, 9], counting(40), request_id=name, max_tokens=4) if is_open else None
    stage.turn()
    record = call.ended
    assert (record.finish_reason, len(record.token_ids)) == ("abort", known) and call.num_ends == 1
    assert not state.pages and not state.is_resident
    assert record.scores is None or record.scores.num_scored == known
    check_equals_solo(call, known)
    if not is_open or stage.stats().state == "paused":
        stage.resume()
    if again is None:
        stage.turn(2)
        again = stage.submit([8, 9], counting(40), request_id=name, max_tokens=4)
    stage.check_clean_end()
    assert again.ended.token_ids == [40, 41, 42, 43]
    for other in stage.calls.values():
        if other is not call and other.ended.finish_reason != "abort":
            check_equals_solo(other)
    witness(f"abort-{where.__name__}", status=status, depth=depth, in_flight=in_flight or "none", kept=known or "none")
