"""Orders in two phases: all or none, whoever dies on the way; and who joins is brought into line first."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.api import command as cmd
from perdure.api.event import Failure
from perdure.api.fingerprint import Fingerprint
from perdure.coordinator import messages as m
from perdure.coordinator.agreement import Agreement
from tests.coordinator.bench import Bench

A = 100
NO = Failure("ModelNotFound", "no such file")


def update(epoch: int) -> cmd.UpdateWeights:
    return cmd.UpdateWeights(0, epoch)


def word(bench: Bench, replica: int, failure: Failure | None = None) -> None:
    """Its answer to the latest `Prepare`."""
    (prepare,) = bench.sent(replica, m.Prepare)
    bench.take(replica, m.Prepared(prepare.ask, failure))


def done(bench: Bench, replica: int, failure: Failure | None = None, **about: Any) -> None:
    """Its answer to the latest `Apply`."""
    (apply,) = bench.sent(replica, m.Apply)
    bench.take(replica, m.Answer(apply.ask, failure, None, Fingerprint(), **about))


def test_all_prepare_before_any_applies() -> None:
    bench = Bench()
    bench.take(A, m.Ask(5, update(7), "weights-7"))
    word(bench, 1)
    assert not bench.sent(1, m.Apply)
    word(bench, 2)
    done(bench, 1, weight_epoch=7)
    assert not bench.sent(A, m.Answer)
    done(bench, 2, weight_epoch=7)
    assert bench.sent(A, m.Answer) == [m.Answer(5)]
    assert bench.router.orders.agreed[:3] == ("running", 7, "weights-7")
    assert bench.router.orders.num_calls == {"blocking": 0, "by messages": 2}, "two phases are two calls"
    bench.router.check_idle()


def test_one_that_cannot_forbids_it_to_all() -> None:
    bench = Bench()
    bench.take(A, m.Ask(5, update(7), "weights-7"))
    word(bench, 1)
    word(bench, 2, NO)
    assert [len(bench.sent(replica, m.Cancel)) for replica in (1, 2)] == [1, 1]
    assert not bench.sent(1, m.Apply) and not bench.sent(2, m.Apply)
    (answer,) = bench.sent(A, m.Answer)
    assert answer.failure == Failure("ModelNotFound", "replica 1: no such file")
    assert bench.router.orders.agreed.weight_epoch == 0


@pytest.mark.parametrize("phase", ["prepare", "apply"])
def test_one_that_is_lost_has_no_say(phase: str) -> None:
    bench = Bench()
    bench.take(A, m.Ask(5, update(7), "weights-7"))
    word(bench, 1)
    if phase == "apply":
        word(bench, 2)
    bench.lose(2)
    done(bench, 1, weight_epoch=7)
    assert bench.sent(A, m.Answer) == [m.Answer(5)]


def test_one_that_could_and_did_not_is_sent_away_and_brought_into_line_later() -> None:
    bench = Bench()
    bench.take(A, m.Ask(5, update(7), "weights-7"))
    word(bench, 1)
    word(bench, 2)
    done(bench, 1, weight_epoch=7)
    done(bench, 2, Failure("DeviceError", "half written"))
    assert bench.sent(A, m.Answer) == [m.Answer(5)] and bench.router.closed == [2]
    bench.join(3, 1)
    (prepare,) = bench.sent(3, m.Prepare)
    assert prepare.order == update(7) and prepare.source == "weights-7"
    assert [replica.session for replica in bench.router.members.serving] == [1], "it serves only once it is in line"
    bench.take(3, m.Prepared(prepare.ask))
    done(bench, 3, weight_epoch=7)
    assert [replica.session for replica in bench.router.members.serving] == [1, 3]


def test_where_nobody_did_it_nothing_has_changed() -> None:
    bench = Bench()
    bench.take(A, m.Ask(5, update(7), "weights-7"))
    for replica in (1, 2):
        word(bench, replica)
    for replica in (1, 2):
        done(bench, replica, Failure("DeviceError", "no"))
    (answer,) = bench.sent(A, m.Answer)
    assert answer.failure is not None and bench.router.closed == [] and bench.router.orders.agreed.weight_epoch == 0


def test_weights_that_nobody_could_look_at_are_not_agreed_on() -> None:
    """Met in the simulation: with no replica there, nobody said that the weights were missing, and none could join."""
    bench = Bench(num_replicas=0)
    bench.take(A, m.Ask(5, update(7), "missing"))
    (answer,) = bench.sent(A, m.Answer)
    assert answer.failure is not None and answer.failure.kind == "StateError"
    bench.join(1, 0)
    assert len(bench.router.members.serving) == 1


def test_who_joins_a_paused_fleet_is_paused_first() -> None:
    bench = Bench(num_replicas=1)
    bench.take(A, m.Ask(5, cmd.Pause(0, "wait")))
    word(bench, 1)
    done(bench, 1, state="paused")
    bench.join(2, 1)
    (prepare,) = bench.sent(2, m.Prepare)
    assert prepare.order == cmd.Pause(0)
    bench.take(2, m.Prepared(prepare.ask))
    done(bench, 2, state="paused")
    assert len(bench.router.members.serving) == 2


def test_a_coordinator_that_begins_takes_over_the_newest_state() -> None:
    """It is new, the replicas are not: the one before it had moved some of them to other weights."""
    bench = Bench(num_replicas=0)
    bench.join(1, 0, weight_epoch=0, source="model")
    assert [replica.session for replica in bench.router.members.serving] == [1]
    bench.join(2, 1, weight_epoch=7, source="weights-7")
    (prepare,) = bench.sent(1, m.Prepare)
    assert prepare.order == update(7) and prepare.source == "weights-7"
    bench.take(1, m.Prepared(prepare.ask))
    done(bench, 1, weight_epoch=7)
    assert [replica.session for replica in bench.router.members.serving] == [1, 2]


@pytest.mark.parametrize("order", [cmd.Resume(0), update(9), cmd.UpdateWeights(0, 9, False)])
def test_what_was_asked_while_no_replica_was_there_says_nothing_of_weights(order: m.Asked) -> None:
    """Met in the simulation: after it, every replica kept the weights it came with, under the epoch of all."""
    bench = Bench(num_replicas=0)
    bench.take(A, m.Ask(5, order, "weights-9" if order == update(9) else None))
    (answer,) = bench.sent(A, m.Answer)
    assert (answer.failure is None) == isinstance(order, cmd.Resume)
    bench.join(1, 0, weight_epoch=0, source="model")
    assert [replica.session for replica in bench.router.members.serving] == [1]
    bench.join(2, 1, weight_epoch=7, source="weights-7")
    (prepare,) = bench.sent(1, m.Prepare)
    assert prepare.order == update(7) and prepare.source == "weights-7"


def test_who_joins_with_newer_weights_waits_for_the_order_under_way() -> None:
    bench = Bench(num_replicas=2)
    bench.take(A, m.Ask(5, cmd.Suspend(0)))
    bench.join(3, 2, weight_epoch=7, source="weights-7")
    for replica in (1, 2):
        word(bench, replica)
    for replica in (1, 2):
        done(bench, replica, state="suspended", weight_epoch=0)
    assert bench.router.orders.agreed[:3] == ("suspended", 7, "weights-7")
    (prepare,) = bench.sent(3, m.Prepare)
    assert prepare.order == cmd.Suspend(0)
    bench.take(3, m.Prepared(prepare.ask))
    done(bench, 3, state="suspended", weight_epoch=7)
    assert [one.order for one in bench.sent(1, m.Prepare)] == [cmd.Resume(0, ["weights"]), update(7)]


def test_a_resume_does_not_wait_for_the_pause_before_it() -> None:
    """A pause that waits for requests is carried out while the next order comes."""
    bench = Bench(num_replicas=1)
    bench.take(A, m.Ask(5, cmd.Pause(0, "wait")))
    word(bench, 1)
    (pause,) = bench.sent(1, m.Apply)
    bench.take(A, m.Ask(6, cmd.Resume(0)))
    word(bench, 1)
    (resume,) = bench.sent(1, m.Apply)
    for apply in (pause, resume):
        bench.take(1, m.Answer(apply.ask, None, None, Fingerprint()))
    assert bench.sent(A, m.Answer) == [m.Answer(5), m.Answer(6)]
    assert bench.router.orders.agreed.state == "running"


def test_a_reset_with_requests_outstanding_is_refused_before_anybody_hears_of_it() -> None:
    bench = Bench()
    bench.submit(A, 0)
    bench.take(A, m.Ask(5, cmd.Reset(0)))
    (answer,) = bench.sent(A, m.Answer)
    assert answer.failure is not None and "1 are outstanding" in answer.failure.message
    assert not bench.sent(1, m.Prepare)


def test_with_blocking_collectives_replicas_compute_nothing_between_the_phases() -> None:
    bench = Bench(blocking_collectives=True)
    bench.take(A, m.Ask(5, cmd.Pause(0)))
    (prepare,) = bench.sent(1, m.Prepare)
    assert prepare.blocking
    bench.take(A, m.Ask(6, cmd.GetStats(0)))
    assert bench.router.orders.num_calls == {"blocking": 1, "by messages": 0}


def test_a_question_that_is_answered_before_an_order_says_nothing_of_what_holds_after_it() -> None:
    """Stats, asked while an update is carried out, tell one replica's old weights, and are whole after the update."""
    bench = Bench()
    bench.take(A, m.Ask(5, update(7), "weights-7"))
    for replica in (1, 2):
        word(bench, replica)
    applied = {replica: bench.sent(replica, m.Apply)[0].ask for replica in (1, 2)}
    bench.take(A, m.Ask(6, cmd.GetStats(0)))
    asked = {replica: bench.sent(replica, m.Apply)[0].ask for replica in (1, 2)}
    bench.take(1, m.Answer(asked[1], None, None, Fingerprint(), weight_epoch=0))
    for replica in (1, 2):
        bench.take(replica, m.Answer(applied[replica], None, None, Fingerprint(), weight_epoch=7))
    bench.take(2, m.Answer(asked[2], None, None, Fingerprint(), weight_epoch=7))
    assert bench.router.orders.agreed.weight_epoch == 7


@pytest.mark.parametrize("failure", [None, NO])
def test_who_was_asked_whether_it_could_hears_what_is_decided(failure: Failure | None) -> None:
    """Met in the simulation: one without weights got them from one update while it was asked about the next, of which
    it never heard again. It did nothing that came after that."""
    bench = Bench()
    bench.take(A, m.Ask(5, update(1), f"{m.OF_TENSORS}a"))
    for replica in (1, 2):
        word(bench, replica)
    for replica in (1, 2):
        done(bench, replica, weight_epoch=1)
    bench.join(3, 2)
    word(bench, 3)
    done(bench, 3, Failure("StateError", "they are not here any more"))
    assert bench.router.members.all[2].lacks_weights

    bench.take(A, m.Ask(6, update(7), "weights-7"))
    for replica in (1, 2, 3):
        word(bench, replica)
    bench.take(A, m.Ask(7, update(8), "weights-8"))
    for replica in (1, 2, 3):
        done(bench, replica, weight_epoch=7)
    for replica in (1, 2, 3):
        word(bench, replica, failure)
    told = m.Apply if failure is None else m.Cancel
    assert [len(bench.sent(replica, told)) for replica in (1, 2, 3)] == [1, 1, 1]


def test_a_request_that_moves_when_a_decision_falls_comes_after_it() -> None:
    """Met in the simulation: the last one that had not spoken was lost; what it had was sent before the decision."""
    bench = Bench()
    bench.submit(A, 0)
    bench.take(A, m.Ask(5, update(7), "weights-7"))
    (owner,) = (replica for replica in (1, 2) if bench.router.entries.load(replica))
    other = 3 - owner
    word(bench, other)
    bench.lose(owner)
    bench.outgoing += bench.router.take_outgoing()
    assert [type(message) for to, message, _ in bench.outgoing if to == other] == [m.Apply, m.Submit]


def test_weights_say_nothing_of_the_state_of_who_lacked_them() -> None:
    """Met in the simulation: replicas that lacked weights had not heard of the resume, and their state was taken for
    that of all; the others then served in another one."""
    agreement = Agreement()
    agreement.took_place(cmd.Pause(0), None, [])
    agreement.took_place(cmd.Resume(0), None, [])
    paused = m.Answer(1, None, None, Fingerprint(), "paused", 7)
    agreement.took_place(update(7), "weights-7", [paused])
    assert agreement.now[:3] == ("running", 7, "weights-7")
    about = m.About(0, "k", Fingerprint(), "paused", 7, "weights-7", b"")
    assert agreement.missing(about) == [(cmd.Resume(0), None)]
