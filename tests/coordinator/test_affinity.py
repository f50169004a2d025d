"""Which replica a request goes to, as plain values: policies, ties, load against a prefix, what expires."""

from __future__ import annotations

import random

import pytest

from perdure.api.config import RoutingPolicy
from perdure.coordinator.affinity import Chooser, PrefixTable, page_keys

PAGE = 16
WARM = page_keys(range(33), PAGE)
"""Of a prompt of 33 tokens: two full pages, and one position that is always computed."""


def chooser(policy: RoutingPolicy, alpha: float = 0.5, ttl_s: float = 300.0) -> Chooser:
    return Chooser(policy, alpha, ttl_s)


def test_a_key_names_its_page_and_all_before_it() -> None:
    assert len(WARM) == 2 and WARM[0] != WARM[1]
    assert page_keys(range(32), PAGE) == WARM[:1], "a prompt of whole pages leaves its last position to compute"
    assert page_keys(range(17), PAGE) == WARM[:1] and page_keys(range(16), PAGE) == []
    other = page_keys([99, *range(1, 33)], PAGE)
    assert other[0] != WARM[0] and other[1] != WARM[1]


def test_round_robin_goes_by_turns_whatever_the_load() -> None:
    one = chooser("round_robin")
    assert [one.choose(WARM, [(7, 9), (8, 0), (9, 3)], 0.0) for _ in range(4)] == [7, 8, 9, 7]


def test_load_balanced_takes_the_least_loaded_then_the_lowest() -> None:
    one = chooser("load_balanced")
    assert one.choose(WARM, [(7, 2), (8, 1), (9, 1)], 0.0) == 8
    assert not len(one.table), "and remembers no prefix"


@pytest.mark.parametrize("policy", ["longest_prefix", "first_prefix_block"])
def test_who_was_sent_the_prefix_gets_it_again(policy: RoutingPolicy) -> None:
    one = chooser(policy)
    assert one.choose(WARM, [(7, 0), (8, 0)], 0.0) == 7
    assert one.choose(page_keys(range(100, 133), PAGE), [(7, 1), (8, 0)], 1.0) == 8, "nobody has it: the least loaded"
    assert one.choose(WARM, [(7, 1), (8, 1)], 2.0) == 7


def test_longest_prefix_counts_pages_and_first_prefix_block_only_the_first() -> None:
    long, fork = page_keys(range(65), PAGE), page_keys([*range(16), *range(100, 149)], PAGE)
    for policy, expected in (("longest_prefix", 8), ("first_prefix_block", 7)):
        one = chooser(policy, alpha=0.1)  # type: ignore[arg-type]
        one.table.touch(long[:1], 7, 0.0)
        one.table.touch(long, 8, 0.0)
        assert one.choose(long, [(7, 0), (8, 1)], 1.0) == expected
        assert fork[0] == long[0] and fork[1] != long[1]


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 7), (100.0, 8)])
def test_alpha_weighs_load_against_the_prefix(alpha: float, expected: int) -> None:
    one = chooser("longest_prefix", alpha)
    one.table.touch(WARM, 7, 0.0)
    assert one.choose(WARM, [(7, 1), (8, 0)], 1.0) == expected


def test_equal_scores_go_to_the_least_loaded_then_to_the_lowest() -> None:
    one = chooser("longest_prefix", alpha=0.0)
    for session in (7, 8, 9):
        one.table.touch(WARM, session, 0.0)
    assert one.choose(WARM, [(7, 3), (8, 1), (9, 1)], 0.0) == 8


def test_an_entry_counts_as_long_as_its_ttl() -> None:
    table = PrefixTable(ttl_s=10.0)
    table.touch(WARM, 7, 0.0)
    assert table.depth(WARM, 7, 10.0) == 2 and table.depth(WARM, 7, 10.1) == 0
    table.touch(WARM[:1], 8, 5.0)
    table.expire(12.0)
    assert len(table) == 1, "one page was sent again meanwhile"
    table.expire(16.0)
    assert not len(table)


def test_a_ttl_of_zero_counts_at_the_same_moment_only() -> None:
    one = chooser("longest_prefix", alpha=0.0, ttl_s=0.0)
    assert one.choose(WARM, [(7, 0), (8, 0)], 0.0) == 7
    assert one.choose(page_keys(range(50, 70), PAGE), [(7, 1), (8, 0)], 1.0) == 8, "an unrelated one sweeps"
    assert one.choose(WARM, [(7, 1), (8, 0)], 1.0) == 8


def test_the_table_forgets_replicas_and_the_oldest() -> None:
    table = PrefixTable(ttl_s=100.0, most_keys=3)
    table.touch(WARM, 7, 0.0)
    table.touch(WARM[:1], 8, 1.0)
    table.forget(7)
    assert len(table) == 1 and table.depth(WARM, 8, 1.0) == 1
    table.touch(page_keys(range(200, 265), PAGE), 8, 2.0)
    assert len(table) == 3 and table.depth(WARM, 8, 2.0) == 0
    table.clear()
    assert not len(table)


def test_the_choice_is_that_of_looking_at_everybody() -> None:
    """Against the formula as written, for all at once, on random tables and loads."""
    rng = random.Random(7)
    num_moved = 0
    for _ in range(2000):
        alpha = rng.choice((0.0, 0.3, 1.0, 100.0))
        one = chooser("longest_prefix", alpha, ttl_s=5.0)
        sessions = list(range(7, 7 + rng.randint(1, 5)))
        keys = page_keys(range(16 * rng.randint(1, 5) + 1), PAGE)
        for session in sessions:
            if rng.random() < 0.6:
                one.table.touch(keys[: rng.randint(1, len(keys))], session, rng.choice((0.0, 8.0)))
        loads = [(session, rng.randint(0, 4)) for session in sessions]
        mean = sum(load for _, load in loads) / len(loads)
        scores = [
            one.table.depth(keys, session, 10.0) / len(keys) - alpha * (load - mean) / max(1.0, mean)
            for session, load in loads
        ]
        best = max(range(len(loads)), key=lambda at: (scores[at], -loads[at][1], -at))
        num_moved += loads[best][1] > min(load for _, load in loads)
        if not any(one.table.depth(keys, session, 10.0) for session in sessions):
            best = min(range(len(loads)), key=lambda at: (loads[at][1], at))
        assert one.choose(keys, loads, 10.0) == loads[best][0]
    assert num_moved, "a prefix never weighed more than a load"
