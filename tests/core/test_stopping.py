"""Stops: the first in token order wins, over the whole output, and none before min_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.api.event import StopMatch
from perdure.core.stopping import Begins, StopRule
from tests.core.helpers import request


class Pieces:
    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces
        self._num_chars = 0
        self.begins = Begins()

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = [self._pieces[token] for token in token_ids]
        for piece in pieces:
            self.begins.add(self._num_chars, bool(piece))
            self._num_chars += len(piece)
        return "".join(pieces)


def stop_of(output: list[int], pieces: Sequence[str] = (), end_ids: tuple[int, ...] = (), **params: Any) -> Any:
    """The stop found when tokens come one at a time; the same must be found when they come at once."""
    prompt = [0, 0]
    one = request("a", prompt, **params)
    found: StopMatch | None = None
    by_one = StopRule(one, end_ids, 100, lambda _: Pieces(pieces))
    for count in range(1, len(output) + 1):
        found = found or by_one.first_stop(prompt + output[:count], len(prompt) + count - 1)
        if found:
            break
    assert StopRule(one, end_ids, 100, lambda _: Pieces(pieces)).first_stop(prompt + output, len(prompt)) == found
    return found


def test_end_ids_have_no_reason_and_stop_ids_are_their_own() -> None:
    assert stop_of([5, 3, 9], end_ids=(3, 4)) == StopMatch(None, 2, 1)
    assert stop_of([5, 3, 9], stop_token_ids=[3]) == StopMatch(3, 2, 1)
    assert stop_of([5, 3, 9], end_ids=(3,), ignore_eos=True) is None
    assert stop_of([5, 3, 9], end_ids=(3,), ignore_eos=True, stop_token_ids=[9]) == StopMatch(9, 3, 1)


def test_the_prompt_is_never_part_of_a_match() -> None:
    assert stop_of([0, 1], stop_token_sequences=[[0, 0, 1], [0, 0, 0]]) is None
    assert stop_of([0, 1], stop_token_sequences=[[0, 1]]) == StopMatch((0, 1), 2, 2)


def test_sequences_match_over_the_whole_output_and_the_longest_of_equal_ends_wins() -> None:
    assert stop_of([7, 20, 21, 5], stop_token_sequences=[[21], [20, 21]]) == StopMatch((20, 21), 3, 2)
    assert stop_of([21, 7, 20], stop_token_sequences=[[20, 21]]) is None


def test_T25_a_string_over_several_tokens() -> None:
    pieces = (" A", "BC", "DEF", "G", "HI", "J", "K")
    assert stop_of([0, 1, 2, 3, 4, 5, 6], pieces, stop=["DEFGHIJ"]) == StopMatch("DEFGHIJ", 6, 4, 4, 7)


def test_T25_a_string_inside_one_token_keeps_that_token_when_stripped() -> None:
    found = stop_of([0, 1], ("ab", "xSTOPy"), stop=["STOP"])
    assert (found.text_end, found.num_tokens, found.num_matched) == (3, 2, 0)


def test_T29_the_earliest_stop_wins_whatever_the_order_of_the_list() -> None:
    for stops in (["CD", "ABCDE", "B"], ["B", "ABCDE", "CD"]):
        assert stop_of([0, 1, 2, 3], ("A", "B", "CD", "E"), stop=stops) == StopMatch("B", 2, 1, 1, 1)
    for stops in (["zz", "CD"], ["CD", "zz"]):
        assert stop_of([0], ("CDzz",), stop=stops) == StopMatch("CD", 1, 1, 0, 2)
    mixed = stop_of([0, 1, 2], ("A", "B", "C"), stop=["C"], stop_token_ids=[1])
    assert mixed == StopMatch(1, 2, 1)


def test_T31_nothing_before_min_tokens_and_no_late_count_of_an_early_match() -> None:
    pieces = ("a", "b", "c", "d")
    assert stop_of([1, 0, 0, 1], pieces, stop=["b"], min_tokens=3) == StopMatch("b", 4, 1, 3, 1)
    assert stop_of([1, 0, 0, 2], pieces, stop=["b"], min_tokens=3) is None
    assert stop_of([1, 2, 0, 1, 2], stop_token_sequences=[[1, 2]], min_tokens=3) == StopMatch((1, 2), 5, 2)
    assert stop_of([3, 0, 3], end_ids=(3,), min_tokens=1) == StopMatch(None, 3, 1)


def test_masked_ids_are_all_that_would_end_it() -> None:
    one = request("a", [0], stop_token_ids=[4], min_tokens=2)
    assert sorted(StopRule(one, (2, 3), 10, lambda _: Pieces(())).masked_ids) == [2, 3, 4]
    free = request("a", [0], stop_token_ids=[4])
    assert StopRule(free, (2, 3), 10, lambda _: Pieces(())).masked_ids == ()
