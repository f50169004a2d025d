"""What replicas hold, told in bounded messages, and what the router's table makes of it."""

from __future__ import annotations

from collections import deque

from perdure.coordinator import messages as m
from perdure.coordinator.affinity import page_keys
from perdure.core.prefix_report import ANEW
from perdure.engine.holdings import MOST_NAMES, TELL_S, Holdings
from tests.coordinator.bench import Bench

PAGE = 16
WARM = page_keys(range(65), PAGE)
A = 100


def test_changes_travel_together_and_only_what_they_come_to() -> None:
    changes = deque([(b"a", True), (b"b", True), (b"a", False)])
    holdings = Holdings(changes)
    assert holdings.messages(0.0) == [m.Held(True, [b"b"], [b"a"])], "the first says that nothing was known"
    changes.append((b"c", True))
    assert holdings.messages(TELL_S / 2) == [] and not changes, "not so soon after"
    changes.append((b"b", False))
    assert holdings.messages(TELL_S) == [m.Held(False, [b"c"], [b"b"])]
    assert holdings.messages(9.0) == []
    changes.extend([(ANEW, False), (b"d", True)])
    assert holdings.messages(10.0) == [m.Held(True, [b"d"], [])]


def test_a_new_session_is_told_all_in_messages_of_bounded_size() -> None:
    names = [number.to_bytes(8, "big") for number in range(MOST_NAMES + 3)]
    holdings = Holdings(deque((name, True) for name in names))
    holdings.messages(0.0)
    holdings.begin()
    first, second = holdings.messages(1.0)
    assert (first.is_anew, second.is_anew) == (True, False)
    assert len(first.held) == MOST_NAMES and first.held + second.held == names


def warm(bench: Bench, number: int) -> int:
    """Which replica gets a request with this prefix; it ends at once."""
    bench.submit(A, number, WARM)
    for replica in (1, 2):
        for submit in bench.sent(replica, m.Submit):
            bench.end(replica, submit.number)
            return replica
    raise AssertionError("nobody got it")


def test_requests_follow_what_replicas_say_that_they_hold() -> None:
    bench = Bench(policy="longest_prefix")
    assert warm(bench, 0) == 1, "nobody has it: ties go to the lowest"
    bench.take(2, m.Held(False, WARM, []))
    bench.take(1, m.Held(False, [], WARM[2:]))
    assert warm(bench, 1) == 2, "the first has only half of it left"
    bench.take(2, m.Held(True, WARM[:1], []))
    assert warm(bench, 2) == 1
    bench.take(1, m.Held(True, [], []))
    bench.take(2, m.Held(False, WARM[:1], []))
    assert warm(bench, 3) == 2


def test_what_is_said_counts_no_longer_than_the_ttl() -> None:
    bench = Bench(policy="longest_prefix", affinity_ttl=10.0)
    bench.take(2, m.Held(False, WARM, []))
    bench.tick(11.0)
    assert warm(bench, 0) == 1


def test_a_policy_that_looks_up_no_prefix_keeps_none() -> None:
    bench = Bench(policy="load_balanced")
    bench.take(2, m.Held(False, WARM, []))
    assert not len(bench.router._chooser.table)
