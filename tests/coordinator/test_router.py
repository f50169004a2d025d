"""The router's core by hand: owners, numbers, ends, losses, waiting, and nothing kept after any of it."""

from __future__ import annotations

import pytest

from perdure.api import command as cmd
from perdure.api.ending import Ending, Failure
from perdure.api.fingerprint import Fingerprint
from perdure.coordinator import messages as m
from perdure.coordinator.affinity import page_keys
from tests.coordinator.bench import Bench

A, B = 100, 101


def submitted(bench: Bench, replica: int) -> list[int]:
    return [one.number for one in bench.sent(replica, m.Submit)]


def test_t64_number_zero_of_two_clients_is_two_requests() -> None:
    bench = Bench()
    bench.submit(A, 0)
    bench.submit(B, 0)
    (a,), (b,) = submitted(bench, 1), submitted(bench, 2)
    assert a != b and bench.router.entries.load(1) == bench.router.entries.load(2) == 1
    bench.take(A, m.Abort([0]))
    assert bench.sent(1, m.Abort) == [m.Abort([a])] and not bench.sent(2, m.Abort), "to its owner alone"
    bench.admit(2, b)
    bench.part(2, b, 0, [5, 6])
    assert bench.sent(B, m.Parts) == [m.Parts([0], [0], [0], [0], [[5, 6]])] and not bench.sent(A, m.Parts)
    bench.end(1, a)
    bench.end(2, b)
    assert bench.sent(A, m.Ended) == bench.sent(B, m.Ended) == [m.Ended(0)]
    bench.router.check_idle()


def test_s12_a_refusal_is_one_reply_and_leaves_no_entry() -> None:
    bench = Bench(num_replicas=1)
    bench.submit(A, 42)
    (serial,) = submitted(bench, 1)
    failure = Failure("InvalidValue", "the prompt is empty")
    bench.take(1, m.Refused(serial, failure))
    assert bench.sent(A, m.Refused) == [m.Refused(42, failure)]
    bench.router.check_idle()
    bench.take(1, m.Refused(serial, failure))
    bench.end(1, serial)
    assert not bench.sent(A, m.Refused) and not bench.sent(A, m.Ended), "no second reply, whatever comes later"


def test_partials_release_nothing_and_the_terminal_reply_everything() -> None:
    bench = Bench(num_replicas=1)
    bench.submit(A, 3)
    (serial,) = submitted(bench, 1)
    bench.admit(1, serial)
    for first in range(3):
        bench.part(1, serial, first, [first])
    assert len(bench.router.entries) == bench.router.entries.load(1) == 1
    bench.router.entries.check()
    bench.end(1, serial)
    bench.router.check_idle()


def test_a_request_goes_on_elsewhere_from_what_is_known() -> None:
    bench = Bench()
    bench.submit(A, 0)
    (serial,) = submitted(bench, 1)
    bench.admit(1, serial)
    bench.part(1, serial, 0, [7, 8], epoch=3)
    bench.part(1, serial, 2, [9], epoch=4)
    bench.lose(1)
    (again,) = bench.sent(2, m.Submit)
    sample = m.KnownSample([7, 8, 9], [(0, 3), (2, 4)])
    assert again.known == m.Known(9, 50, "raw", [sample], Fingerprint(), 1)
    bench.part(1, serial, 3, [99])
    bench.end(1, serial)
    (parts,) = bench.sent(A, m.Parts)
    assert parts.token_ids == [[7, 8], [9]] and not bench.sent(A, m.Ended), "what the lost one still says is nobody's"
    bench.admit(2, again.number)
    bench.part(2, again.number, 3, [10])
    bench.end(2, again.number)
    assert bench.sent(A, m.Parts) == [m.Parts([0], [0], [3], [0], [[10]])] and len(bench.sent(A, m.Ended)) == 1
    bench.router.check_idle()


def test_a_sample_that_ended_does_not_begin_again_elsewhere() -> None:
    bench = Bench()
    bench.submit(A, 0)
    (serial,) = submitted(bench, 1)
    bench.admit(1, serial)
    bench.take(1, m.Parts([serial, serial], [0, 2], [0, 0], [0, 0], [[5], [6]]), [b"", b""])
    bench.take(1, m.Ended(serial, 2, num_left=2, ending=Ending("length")), [b"rest"])
    assert len(bench.sent(A, m.Ended)) == 1 and len(bench.router.entries) == 1
    bench.lose(1)
    (again,) = bench.sent(2, m.Submit)
    assert again.known is not None
    assert [sample.ending for sample in again.known.samples] == [None, None, Ending("length")]
    assert [sample.token_ids for sample in again.known.samples] == [[5], [], [6]]


def test_what_was_not_begun_begins_anew_elsewhere() -> None:
    bench = Bench()
    bench.submit(A, 0)
    bench.lose(1)
    (again,) = bench.sent(2, m.Submit)
    assert again.known is None


def test_fail_gives_one_failure_each_and_the_coordinator_lives() -> None:
    bench = Bench(on_replica_loss="fail")
    for number in range(4):
        bench.submit(A, number)
    one, two = submitted(bench, 1), submitted(bench, 2)
    bench.lose(1)
    failed = bench.endings(A)
    assert [(number, reason) for number, reason, _ in failed] == [(0, "error"), (2, "error")]
    assert all(failure is not None and failure.kind == "ReplicaLost" for _, _, failure in failed)
    bench.end(1, one[0])
    assert len(bench.endings(A)) == 2, "a late reply is ignored"
    bench.lose(2)
    assert len(bench.endings(A)) == 4 and two
    bench.join(3, 0, name="another")
    bench.submit(A, 9)
    (serial,) = submitted(bench, 3)
    bench.end(3, serial)
    bench.router.check_idle()


def test_with_none_left_requests_wait_and_then_fail() -> None:
    bench = Bench(num_replicas=1, replica_wait_s=5.0)
    bench.submit(A, 0)
    bench.lose(1)
    bench.submit(A, 1)
    bench.tick(4.0)
    assert not bench.endings(A)
    bench.submit(B, 2)
    bench.tick(1.5)
    assert [(number, reason) for number, reason, _ in bench.endings(A)] == [(0, "error"), (1, "error")]
    bench.join(2, 0)
    assert submitted(bench, 2) == [3], "whoever came later still waited, and is served"


def test_a_waiting_request_is_aborted_here() -> None:
    bench = Bench(num_replicas=0)
    bench.submit(A, 0)
    bench.take(A, m.Abort([], everything=True))
    assert bench.endings(A) == [(0, "abort", None)]
    bench.router.check_idle()


def test_an_abort_outlives_its_replica() -> None:
    bench = Bench()
    bench.submit(A, 0)
    bench.take(A, m.Abort([0]))
    bench.lose(1)
    assert bench.endings(A) == [(0, "abort", None)] and not submitted(bench, 2)
    bench.router.check_idle()


def test_what_kills_its_replicas_is_not_given_to_all_of_them() -> None:
    bench = Bench(num_replicas=9)
    bench.submit(A, 0)
    for replica in range(1, 6):
        assert not bench.endings(A)
        (serial,) = submitted(bench, replica)
        bench.admit(replica, serial)
        bench.lose(replica)
    ((_, reason, failure),) = bench.endings(A)
    assert reason == "error" and failure is not None and "5 replicas were lost one after another" in failure.message
    assert len(bench.router.members.serving) == 4


def test_replicas_lost_before_they_began_say_nothing_against_a_request() -> None:
    bench = Bench(num_replicas=9)
    bench.submit(A, 0)
    for replica in range(1, 9):
        bench.lose(replica)
    assert not bench.endings(A) and len(submitted(bench, 9)) == 1


def test_a_request_that_moves_forward_may_be_moved_for_ever() -> None:
    bench = Bench(num_replicas=6)
    bench.submit(A, 0)
    for replica in range(1, 6):
        (serial,) = submitted(bench, replica)
        bench.admit(replica, serial)
        bench.part(replica, serial, replica - 1, [replica])
        bench.lose(replica)
    assert not bench.endings(A) and len(submitted(bench, 6)) == 1


def test_a_client_that_is_gone_disturbs_nobody() -> None:
    bench = Bench(num_replicas=1)
    bench.submit(A, 0)
    bench.submit(B, 0)
    a, b = submitted(bench, 1)
    bench.lose(A)
    assert bench.sent(1, m.Abort) == [m.Abort([a])]
    bench.admit(1, b)
    bench.take(1, m.Parts([a, b], [0, 0], [0, 0], [0, 0], [[1], [2]]), [b"", b"x"])
    assert bench.sent(B, m.Parts) == [m.Parts([0], [0], [0], [0], [[2]])] and not bench.sent(A, m.Parts)
    bench.end(1, a)
    bench.end(1, b)
    assert not bench.sent(A, m.Ended) and len(bench.sent(B, m.Ended)) == 1
    bench.router.check_idle()


def test_submitted_frames_are_bounded() -> None:
    bench = Bench(num_replicas=0, most_bytes=100)
    bench.submit(A, 0, body=bytes(60))
    bench.submit(A, 1, body=bytes(60))
    (refused,) = bench.sent(A, m.Refused)
    assert refused.number == 1 and refused.failure.kind == "QueueFull" and "at most 100" in refused.failure.message
    bench.take(A, m.Abort([0]))
    assert bench.router.entries.num_bytes == 0


def test_a_replica_that_completes_no_step_is_lost_though_it_beats() -> None:
    bench = Bench(stall_s=5.0)
    bench.submit(A, 0)
    for _ in range(4):
        bench.take(1, m.Beat(num_steps=3, has_work=True))
        bench.take(2, m.Beat(num_steps=0, has_work=False))
        bench.tick(2.0)
    assert bench.router.closed == [1] and len(bench.sent(2, m.Submit)) == 1
    assert [replica.session for replica in bench.router.members.serving] == [2]


def test_a_replica_that_calls_again_takes_the_place_of_its_former_self() -> None:
    bench = Bench()
    bench.submit(A, 0)
    bench.join(9, 0, name="replica-0")
    assert bench.router.closed == [1]
    assert [replica.session for replica in bench.router.members.serving] == [9, 2]
    assert len(bench.sent(2, m.Submit)) == 1, "what it had goes on elsewhere, for it knows it no more"


def test_a_replica_of_another_kind_is_not_wanted() -> None:
    bench = Bench()
    about = m.About(7, "another", Fingerprint(), "running", 0, "model", b"")
    assert "instead of 'k'" in (bench.router.refusal(m.Hello(m.VERSION, "x", about)) or "")
    assert bench.router.refusal(m.Hello(m.VERSION, "x")) is None


def test_a_checkpoint_goes_to_who_asked_or_says_why_not() -> None:
    bench = Bench(num_replicas=1)
    bench.submit(A, 0)
    (serial,) = submitted(bench, 1)
    bench.take(A, m.Take(5, 0, False))
    (asked,) = bench.sent(1, m.Take)
    assert asked.number == serial
    bench.take(1, m.Taken(asked.ask), [b"checkpoint"])
    assert bench.sent(A, m.Taken) == [m.Taken(5)]
    bench.take(A, m.Take(6, 1, False))
    assert bench.sent(A, m.Taken)[0].failure is not None
    bench.take(A, m.Take(7, 0, False))
    bench.lose(1)
    (lost,) = bench.sent(A, m.Taken)
    assert lost.ask == 7 and lost.failure is not None and lost.failure.kind == "ReplicaLost"


def test_a_checkpoint_of_one_that_waits_comes_when_a_replica_has_it_or_it_has_ended() -> None:
    bench = Bench(num_replicas=0)
    for number in range(3):
        bench.submit(A, number)
        bench.take(A, m.Take(10 + number, number, number == 0))
    bench.submit(B, 0)
    bench.take(B, m.Take(5, 0, False))
    assert not bench.sent(A, m.Taken)
    bench.take(A, m.Abort([2]))
    (ended,) = bench.sent(A, m.Taken)
    assert ended.ask == 12 and ended.failure is not None
    bench.lose(B)
    bench.join(1, 0)
    serials = submitted(bench, 1)
    asked = bench.sent(1, m.Take)
    assert [(one.number, one.end) for one in asked] == list(zip(serials, (True, False), strict=True))
    for one in asked:
        bench.take(1, m.Taken(one.ask), [b"checkpoint"])
    assert bench.sent(A, m.Taken) == [m.Taken(10), m.Taken(11)]
    for serial in serials:
        bench.end(1, serial)
    bench.router.check_idle()


def test_the_prefix_table_goes_with_the_weights_and_with_its_replica() -> None:
    keys = page_keys(range(33), 16)
    bench = Bench(policy="longest_prefix", alpha=0.0)
    bench.submit(A, 0, keys)
    (serial,) = submitted(bench, 1)
    bench.end(1, serial)
    table = bench.router._chooser.table
    assert len(table) == 2
    bench.take(A, m.Ask(0, cmd.ResetPrefixCache(0)))
    assert not len(table)
    bench.submit(A, 1, keys)
    bench.lose(1)
    assert table.depth(keys, 1, 0.0) == 0 and table.depth(keys, 2, 0.0) == 2


def test_requests_after_an_order_stay_behind_it() -> None:
    """Nothing is sent between prepare and apply; then everything, in order."""
    bench = Bench(num_replicas=1)
    bench.take(A, m.Ask(0, cmd.Pause(0)))
    (prepare,) = bench.sent(1, m.Prepare)
    bench.submit(A, 0)
    assert not bench.sent(1, m.Submit)
    bench.take(1, m.Prepared(prepare.ask))
    kinds = [type(message) for to, message, _ in bench.router.take_outgoing() if to == 1]
    assert kinds == [m.Apply, m.Submit]


@pytest.mark.parametrize("num_replicas", [0, 1, 2])
def test_a_pause_that_aborts_ends_what_no_replica_can_end(num_replicas: int) -> None:
    """Of those that wait, and of one that is lost before it paused. What comes after the order stays."""
    bench = Bench(num_replicas=num_replicas)
    bench.submit(A, 0)
    bench.take(B, m.Ask(0, cmd.Pause(0, "abort")))
    bench.submit(A, 1)
    if num_replicas == 2:
        (prepare,) = bench.sent(2, m.Prepare)
        bench.take(2, m.Prepared(prepare.ask))
    if num_replicas:
        bench.lose(1)
    if num_replicas == 2:
        moved, after = bench.sent(2, m.Submit)
        assert moved.again and not after.again
        assert bench.sent(2, m.Abort) == [m.Abort([moved.number])]
        bench.end(2, moved.number)
        assert bench.sent(A, m.Ended) == [m.Ended(0)]
    else:
        assert bench.endings(A) == [(0, "abort", None)]
    assert len(bench.router.entries) == 1


def test_parts_of_several_replicas_reach_a_client_as_one_message_and_never_change_places_with_others() -> None:
    bench = Bench()
    for number in (0, 1, 2):
        bench.submit(A, number)
    (one,), (two,) = bench.sent(1, m.Submit)[:1], bench.sent(2, m.Submit)
    for replica, serial in ((1, one.number), (2, two.number)):
        bench.admit(replica, serial)
        bench.part(replica, serial, 0, [replica])
    bench.part(1, one.number, 1, [7])
    bench.end(1, one.number)
    bench.part(2, two.number, 1, [8])
    kinds = [message for to, message, _ in bench.router.take_outgoing() if to == A]
    assert [type(message).__name__ for message in kinds] == ["Admitted", "Parts", "Admitted", "Parts", "Ended", "Parts"]
    assert isinstance(kinds[3], m.Parts)
    assert (kinds[3].numbers, kinds[3].firsts, kinds[3].token_ids) == ([1, 0], [0, 1], [[2], [7]])
    bench.part(2, two.number, 2, [9])
    (later,) = bench.sent(A, m.Parts)
    assert later.token_ids == [[9]], "what was taken is not added to"


def test_who_looks_sees_loads_owners_and_the_lost() -> None:
    bench = Bench()
    for number in range(3):
        bench.submit(A, number)
    bench.submit(B, 7)
    bench.now = 5.0

    def look() -> tuple[list[tuple[int, str, int, float]], list[tuple[int, int]]]:
        bench.take(A, m.Look(1))
        (seen,) = bench.sent(A, m.Seen)
        return [(one.index, one.state, one.num_requests, one.for_s) for one in seen.replicas], seen.owners

    assert look() == ([(0, "serving", 2, 5.0), (1, "serving", 2, 5.0)], [(0, 0), (1, 1), (2, 0)])
    bench.lose(2)
    bench.now = 8.0
    assert look() == ([(0, "serving", 4, 8.0), (1, "lost", 0, 3.0)], [(0, 0), (1, 0), (2, 0)])
    bench.join(3, 1, name="another")
    assert look()[0] == [(0, "serving", 4, 8.0), (1, "serving", 0, 0.0)]
    bench.take(3, m.Leave())
    assert look()[0] == [(0, "serving", 4, 8.0)], "one that says farewell is not lost"
    bench.lose(1)
    assert look() == ([(0, "lost", 0, 0.0)], []), "with nobody there it is answered too"


def test_what_happened_without_a_token_is_passed_on_and_says_nothing_of_weights() -> None:
    """Whatever weights there are when the first token comes, it is they that it comes from."""
    bench = Bench()
    bench.submit(A, 0)
    (submitted,) = bench.sent(1, m.Submit)
    serial = submitted.number
    bench.admit(1, serial)
    bench.take(1, m.Parts([serial], [0], [0], [0], [[]]), [b"scheduled"])
    assert bench.sent(A, m.Parts) == [m.Parts([0], [0], [0], [0], [[]])]
    bench.part(1, serial, 0, [5], epoch=7)
    (entry,) = bench.router.entries.all
    assert entry.sample(0).epochs == [(0, 7)]
