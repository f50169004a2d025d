"""What replicas counted is told together, and never falls but by a reset, whoever comes and goes."""

from __future__ import annotations

from perdure.api import command as cmd
from perdure.api.fingerprint import Fingerprint
from perdure.api.output import Stats
from perdure.coordinator import messages as m
from perdure.coordinator.counts import SINCE_START, Counts
from perdure.coordinator.membership import MOST_LOST
from tests.coordinator.bench import Bench

A, B = 100, 101


def counted(number: int) -> Stats:
    """Of one that has counted so many of everything, and has 10 pages."""
    of_now = dict(num_pages=10, num_free_pages=10, num_pinned_pages=0, num_running=0, num_waiting=0, num_paused=0)
    return Stats(state="running", weight_epoch=0, paused_ids=[], **of_now, **dict.fromkeys(SINCE_START, number))


def told(bench: Bench, **by_replica: int) -> Stats:
    """What the client is told when its replicas have counted so many."""
    bench.take(A, m.Ask(6, cmd.GetStats(0)))
    for name, number in by_replica.items():
        replica = int(name.removeprefix("r"))
        (apply,) = bench.sent(replica, m.Apply)
        bench.take(replica, m.Answer(apply.ask, None, counted(number)))
    (answer,) = bench.sent(A, m.Answer)
    assert answer.stats is not None
    assert len({getattr(answer.stats, name) for name in SINCE_START}) == 1, "all of them or none"
    return answer.stats


def test_what_a_lost_replica_had_counted_stays() -> None:
    bench = Bench()
    assert told(bench, r1=100, r2=30).num_generated_tokens == 130
    bench.lose(2)
    after = told(bench, r1=101)
    assert (after.num_generated_tokens, after.num_pages) == (131, 10), "pages are of now"
    bench.take(1, m.Leave())
    assert told(bench).num_steps == 131
    bench.join(3, 0, name="another")
    assert told(bench, r3=5).num_steps == 136


def test_one_that_calls_again_is_counted_once() -> None:
    bench = Bench()
    told(bench, r1=100, r2=30)
    bench.lose(2)
    assert told(bench, r1=100).num_steps == 130
    bench.join(3, 1, name="replica-1")
    assert told(bench, r1=100, r3=32).num_steps == 132


def test_one_that_is_lost_while_it_is_asked_is_counted_once() -> None:
    bench = Bench()
    bench.take(A, m.Ask(6, cmd.GetStats(0)))
    (apply,) = bench.sent(2, m.Apply)
    bench.take(2, m.Answer(apply.ask, None, counted(30)))
    bench.lose(2)
    (apply,) = bench.sent(1, m.Apply)
    bench.take(1, m.Answer(apply.ask, None, counted(100)))
    (answer,) = bench.sent(A, m.Answer)
    assert answer.stats is not None and answer.stats.num_steps == 130
    assert told(bench, r1=100).num_steps == 130


def test_a_reset_is_of_those_too_that_are_gone() -> None:
    bench = Bench()
    told(bench, r1=100, r2=30)
    bench.lose(2)
    bench.take(A, m.Ask(5, cmd.Reset(0)))
    (prepare,) = bench.sent(1, m.Prepare)[-1:]
    bench.take(1, m.Prepared(prepare.ask))
    (apply,) = bench.sent(1, m.Apply)
    bench.take(1, m.Answer(apply.ask, None, None, Fingerprint()))
    bench.sent(A, m.Answer)
    assert told(bench, r1=2).num_steps == 2


def test_names_of_the_lost_are_bounded_and_their_counts_are_not() -> None:
    counts, most = Counts(), MOST_LOST
    for at in range(most + 3):
        counts.note(f"replica-{at}", counted(1))
        counts.leave(f"replica-{at}")
    assert counts.together([], "running", 0).num_steps == most + 3


def test_clients_are_told_how_many_serve_whenever_that_changes() -> None:
    bench = Bench()

    def heard() -> list[list[int]]:
        return [[one.num_replicas for one in bench.sent(client, m.Welcome)] for client in (A, B)]

    bench.lose(2)
    assert heard() == [[1], [1]]
    bench.take(1, m.Beat(num_steps=3, has_work=False))
    assert heard() == [[], []]
    bench.take(1, m.Leave())
    assert heard() == [[0], [0]]
    bench.join(3, 0)
    assert heard() == [[1], [1]]
