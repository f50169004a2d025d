"""Pinned prefixes, and weights that come as tensors, as the coordinator sees them."""

from __future__ import annotations

import pytest

from perdure.api import command as cmd
from perdure.api.errors import InvalidValue, StateError
from perdure.api.event import Failure
from perdure.coordinator import messages as m
from tests.coordinator.bench import Bench
from tests.coordinator.test_orders import done, update, word

A, B = 100, 101
SOURCE = f"{m.OF_TENSORS}7"
PIN = cmd.PinPrefix(0, [1, 2, 3, 4])


def pin(bench: Bench, client: int, ask: int, *, failing: int | None = None) -> int:
    """Pin at both replicas; returns the coordinator's number for it."""
    bench.take(client, m.Ask(ask, PIN))
    for replica in (1, 2):
        (prepare,) = bench.sent(replica, m.Prepare)
        assert prepare.order == PIN
        done(bench, replica, Failure("InvalidValue", "no room") if replica == failing else None)
    return prepare.ask


def unpinned(bench: Bench, replica: int) -> list[int]:
    """Pins that it was told to give up."""
    found = [
        prepare.order.pin for prepare in bench.sent(replica, m.Prepare) if isinstance(prepare.order, cmd.UnpinPrefix)
    ]
    for _ in found:
        done(bench, replica)
    return found


def test_a_pin_is_at_all_replicas_and_goes_when_its_client_says_so() -> None:
    bench = Bench()
    mine, theirs = pin(bench, A, 5), pin(bench, B, 5)
    assert bench.sent(A, m.Answer) == [m.Answer(5)] and bench.sent(B, m.Answer) == [m.Answer(5)]
    bench.take(A, m.Ask(6, cmd.Reset(0)))
    (refused,) = bench.sent(A, m.Answer)
    assert refused.failure is not None and "2 are not released" in refused.failure.message
    bench.take(A, m.Ask(7, cmd.UnpinPrefix(0, 5)))
    assert unpinned(bench, 1) == unpinned(bench, 2) == [mine], "two clients' fives are two pins"
    assert bench.sent(A, m.Answer) == [m.Answer(7)]
    bench.lose(B)
    assert unpinned(bench, 1) == unpinned(bench, 2) == [theirs], "and with its client"
    bench.router.check_idle()


def test_a_pin_that_one_replica_cannot_hold_is_held_by_none() -> None:
    bench = Bench()
    number = pin(bench, A, 5, failing=2)
    (answer,) = bench.sent(A, m.Answer)
    assert answer.failure == Failure("InvalidValue", "replica 1: no room")
    assert unpinned(bench, 1) == unpinned(bench, 2) == [number]
    assert not bench.router.closed, "nobody is sent away for that"
    bench.router.check_idle()


def test_one_that_joins_holds_what_is_pinned() -> None:
    bench = Bench()
    number = pin(bench, A, 5)
    bench.join(3, 2)
    (prepare,) = bench.sent(3, m.Prepare)
    assert (prepare.ask, prepare.order) == (number, PIN)
    done(bench, 3, Failure("InvalidValue", "a smaller pool"))
    assert len(bench.router.members.serving) == 3, "one that cannot serves all the same"


def fetched(bench: Bench, replica: int, holder: int, ask: int, first: int = 0) -> m.Fetch:
    bench.take(replica, m.Fetch(ask, SOURCE, first))
    (fetch,) = bench.sent(holder, m.Fetch)
    assert (fetch.source, fetch.first) == (SOURCE, first)
    return fetch


def given(bench: Bench) -> None:
    """Weights of client A's, at both replicas."""
    bench.take(A, m.Ask(5, update(7), SOURCE))
    for replica in (1, 2):
        word(bench, replica)
    for replica in (1, 2):
        done(bench, replica, weight_epoch=7)
    assert bench.sent(A, m.Answer) == [m.Answer(5)]


def test_pieces_come_from_the_client_while_it_gives_and_from_a_replica_later() -> None:
    bench = Bench()
    bench.take(A, m.Ask(5, update(7), SOURCE))
    fetches = [fetched(bench, replica, A, 40 + replica) for replica in (1, 2)]
    for replica, fetch in zip((1, 2), fetches):
        bench.take(A, m.Piece(fetch.ask, 0, 9), [b"ninebytes"])
        assert bench.sent(replica, m.Piece) == [m.Piece(40 + replica, 0, 9)], "under the replica's own number"
    for replica in (1, 2):
        word(bench, replica)
    for replica in (1, 2):
        done(bench, replica, weight_epoch=7)
    bench.join(3, 2)
    (prepare,) = bench.sent(3, m.Prepare)
    assert prepare.source == SOURCE
    fetch = fetched(bench, 3, 1, prepare.ask)
    bench.take(B, m.Piece(fetch.ask, 0, 9), [b"not asked"])
    assert not bench.sent(3, m.Piece), "of nobody but whom it was asked of"
    bench.take(1, m.Piece(fetch.ask, 0, 9), [b"ninebytes"])
    assert bench.sent(3, m.Piece) == [m.Piece(prepare.ask, 0, 9)]


@pytest.mark.parametrize("lost", [A, 1])
def test_who_was_asked_for_a_piece_and_is_lost_does_not_keep_anybody_waiting(lost: int) -> None:
    bench = Bench()
    if lost == A:
        bench.take(A, m.Ask(5, update(7), SOURCE))
        asking, ask = 2, 44
    else:
        given(bench)
        bench.join(3, 2)
        (prepare,) = bench.sent(3, m.Prepare)
        asking, ask = 3, prepare.ask
    fetched(bench, asking, lost, ask)
    bench.lose(lost)
    (piece,) = bench.sent(asking, m.Piece)
    assert piece.ask == ask and piece.failure is not None
    assert isinstance(piece.failure.to_exception(), StateError) and "give them again" in piece.failure.message
    assert not len(bench.router._fetches)


def test_weights_that_nobody_has_any_more_are_waited_for_and_can_be_given_again() -> None:
    bench = Bench()
    given(bench)
    bench.lose(1)
    bench.lose(2)
    bench.join(3, 0)
    (prepare,) = bench.sent(3, m.Prepare)
    bench.take(3, m.Fetch(prepare.ask, SOURCE, 0))
    (piece,) = bench.sent(3, m.Piece)
    bench.take(3, m.Prepared(prepare.ask, piece.failure))
    done(bench, 3, piece.failure)
    assert not bench.router.members.serving and not bench.router.closed, (
        "it waits, and computes nothing of other weights"
    )
    bench.submit(A, 0)
    assert not bench.sent(3, m.Submit)
    bench.take(A, m.Ask(6, update(8), f"{m.OF_TENSORS}8"))
    word(bench, 3)
    done(bench, 3, weight_epoch=8)
    assert bench.sent(A, m.Answer) == [m.Answer(6)]
    assert [replica.session for replica in bench.router.members.serving] == [3] and len(bench.sent(3, m.Submit)) == 1


def test_a_drain_takes_no_request_and_ends_when_none_is_left_or_in_time() -> None:
    for is_patient in (True, False):
        bench = Bench(num_replicas=1, stall_s=1e9)
        bench.submit(A, 0)
        (submit,) = bench.sent(1, m.Submit)
        bench.router.drain(bench.now + 30.0)
        bench.submit(A, 1)
        (refused,) = bench.sent(A, m.Refused)
        assert refused.number == 1 and "takes no more requests" in refused.failure.message
        bench.tick(1.0)
        assert not bench.sent(1, m.Prepare), "the one that is here goes on"
        if is_patient:
            bench.end(1, submit.number)
            bench.tick(1.0)
        else:
            bench.tick(30.0)
        (prepare,) = bench.sent(1, m.Prepare)
        assert prepare.order == cmd.Stop(0)
        bench.tick(1.0)
        assert not bench.sent(1, m.Prepare), "once"
        if not is_patient:
            bench.end(1, submit.number)
        done(bench, 1, state="stopped")
        assert bench.router.is_stopped


def test_a_drain_ends_those_that_wait_for_a_replica() -> None:
    bench = Bench(num_replicas=0)
    bench.submit(A, 0)
    bench.router.drain(bench.now)
    bench.tick(0.0)
    assert bench.endings(A) == [(0, "abort", None)] and bench.router.is_stopped


def test_an_update_that_names_no_weights_anybody_has_is_refused_by_name() -> None:
    bench = Bench()
    bench.take(1, m.Fetch(9, f"{m.OF_TENSORS}unknown", 0))
    (piece,) = bench.sent(1, m.Piece)
    assert piece.failure is not None and not isinstance(piece.failure.to_exception(), InvalidValue)
