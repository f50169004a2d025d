"""Stops on the scripted model, over every boundary the schedule can put between the tokens of one."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.api.command import KVMode
from tests.scenarios.scripted import END, Call, Stage, check_equals_solo
from tests.scenarios.streamed import shown
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])
SCRIPT = [65, 66, 20, 21, 67, 20, 21, 22, 68]
"""A, B, then a sequence begun and broken off, then complete, then one more."""
PIECES = {20: "<E", 21: "N", 22: "D>", 67: "C", 68: "!"}

STOPS: dict[str, dict[str, Any]] = {
    "id": {"stop_token_ids": [22]},
    "sequence": {"stop_token_sequences": [[20, 21, 22]]},
    "string": {"stop": ["END"]},
}
EXPECTED: dict[str, tuple[object, int]] = {"id": (22, 1), "sequence": ((20, 21, 22), 3), "string": ("END", 2)}
"""Its reason, and how many tokens belong to the match ("END" begins inside the token "<E", which stays)."""


def check_stopped(call: Call, kind: str) -> None:
    record = call.ended
    assert (record.token_ids, record.finish_reason) == (SCRIPT[:8], "stop")
    assert record.stop is not None and (record.stop.reason, record.stop.num_matched) == EXPECTED[kind]
    assert record.scores is not None and record.scores.num_scored == 8
    assert shown(call).text == ("AB<ENC<" if kind == "string" else "AB<ENC" if kind == "sequence" else "AB<ENC<EN")
    check_equals_solo(call)


@DEPTHS
@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("budget", [512, 5, 1])
def test_T28_nothing_after_the_stop(budget: int, kind: str, depth: int) -> None:
    """With steps in flight beyond it, beside a neighbour that shares the budget, and whatever the chunks of the prompt.

    A stop begun by the last tokens of the prompt does not count: stops are of the output.
    """
    stage = Stage(depth, pieces=PIECES, max_num_batched_tokens=budget)
    stage.submit(range(30), [100], max_tokens=12)
    call = stage.submit([1, 2, 3, 4, 5, 6, 20, 21], SCRIPT, max_tokens=20, **STOPS[kind])
    begun = stage.submit([20, 21], [22, 40], max_tokens=5, **STOPS[kind])
    stage.run()
    check_stopped(call, kind)
    check_equals_solo(begun)
    assert (begun.ended.stop is None) == (kind != "id")
    stage.check_clean_end()


@DEPTHS
@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("evicted_after", [6, 7])
def test_T32_a_stop_over_an_eviction(evicted_after: int, kind: str, depth: int) -> None:
    """The first tokens of the stop come before the eviction and are computed again, the rest come after it."""
    prompt = [9] * (9 - evicted_after)  # two pages of 4 are full when it has that many tokens
    stage = Stage(depth, num_pages=5, page_size=4, pieces=PIECES, enable_prefix_caching=False)
    first = stage.submit([1] * 5, [100], max_tokens=8)
    call = stage.submit(prompt, SCRIPT, max_tokens=11, **STOPS[kind])
    stage.until(lambda: call.state.num_evictions > 0 and not call.state.in_flight)
    witness("T32", num_evictions=call.state.num_evictions, num_tokens=call.num_output)
    assert call.num_output == evicted_after
    stage.run()
    check_stopped(call, kind)
    check_equals_solo(first)
    stage.check_clean_end()


@DEPTHS
@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("paused_after", [6, 7, 8])
def test_T32_a_stop_over_a_pause(paused_after: int, kind: str, depth: int) -> None:
    """The engine is paused inside the stop, just before its last token, or with the stop in flight."""
    stage = Stage(depth, pieces=PIECES)
    call = stage.submit([9] * 3, SCRIPT, max_tokens=20, **STOPS[kind])
    stage.turn(paused_after)
    ticket = stage.pause()
    stage.until(lambda: ticket in stage.answers)
    assert stage.stats().state == "paused" and call.num_output <= 8
    stage.resume()
    stage.run()
    check_stopped(call, kind)
    stage.check_clean_end()


@DEPTHS
@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("kv", ["persist", "offload", "recompute"])
def test_T32_a_stop_over_suspensions(kv: KVMode, kind: str, depth: int) -> None:
    """The engine is suspended in each turn before, inside and after the stop: three parts and more, one stop."""
    stage = Stage(depth, pieces=PIECES)
    call = stage.submit([9] * 3, SCRIPT, max_tokens=20, **STOPS[kind])
    known: list[int] = []
    while call.is_live or not stage.calls or not stage.answers:
        ticket = stage.suspend(kv)
        stage.until(lambda ticket=ticket: ticket in stage.answers)
        known += [call.num_output] if call.is_live else []
        stage.resume()
        stage.turn(2)  # it wakes, then a step is launched
    witness("T32", num_suspensions=len(known), num_residencies=len(call.residencies))
    assert len(call.residencies) == (len([*filter(None, known)]) + 1 if kv == "recompute" else 1)
    check_stopped(call, kind)
    stage.check_clean_end()


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("kind", STOPS)
def test_T32_a_stop_in_flight_when_its_request_is_put_aside(kind: str, depth: int) -> None:
    """Its last token is on the way when it loses its pages, or waits for one: it ends from there."""
    for paused_pages in (0, 5):
        stage = Stage(depth, num_pages=5, page_size=4, pieces=PIECES, paused_pages=paused_pages)
        stage.submit([1] * 5, [100], max_tokens=8)
        call = stage.submit([9], SCRIPT, max_tokens=11, **STOPS[kind])
        stage.run()
        record = call.ended
        witness("T32", times_put_aside=record.num_pauses if paused_pages else record.num_evictions)
        assert len(call.residencies) == 1, "it came back before its stop was known"
        check_stopped(call, kind)
        stage.check_clean_end()


BLOCKS: dict[str, tuple[list[int], int, dict[str, Any], int, object]] = {
    "a stop inside": ([10, 11, 30, 31, 32, 33], 5, {"stop_token_sequences": [[30, 31]]}, 4, (30, 31)),
    "a longer stop at the same end": ([10, 30, 31, 32], 9, {"stop_token_sequences": [[31], [30, 31]]}, 3, (30, 31)),
    "an end id inside": ([10, 11, END, 20, 21], 9, {}, 3, None),
    "a string inside": ([10, 20, 21, 22, 68, 68], 9, {"stop": ["END"]}, 4, "END"),
    "the budget inside": ([10, 11, 12, 13, 14, 30, 31], 5, {"stop_token_sequences": [[30, 31]]}, 5, None),
    "a stop at its last token": ([10, 11, 12, 40], 9, {"stop_token_ids": [40]}, 4, 40),
}
"""A script, its budget and stops; how many ids remain, and why it stopped."""


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("strip", [False, True], ids=["kept", "stripped"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("begins_at", [0, 1])
def test_s19_T30_a_step_that_gives_tokens_past_the_first_stop_is_cut_there(
    begins_at: int, block: str, strip: bool, depth: int
) -> None:
    """Scripted drafts: what comes after the stop, and every score and part of it, is as if never drawn."""
    script, budget, stops, count, reason = BLOCKS[block]
    stage = Stage(depth, pieces=PIECES)
    stage.device.accepted = {begins_at: len(script) - begins_at}
    call = stage.submit([1, 2, 3], script, max_tokens=budget, logprobs=2, strip_stop_tokens=strip, **stops)
    stage.run()
    record = call.ended
    assert record.token_ids == script[:count] and record.scores is not None
    assert record.scores.num_scored == len(record.scores.num_top) == count
    assert len(record.scores.top_ids) == 2 * count
    ends_by_length = count == budget
    assert record.finish_reason == ("length" if ends_by_length else "stop")
    assert (record.stop is None) == ends_by_length and (record.stop is None or record.stop.reason == reason)
    assert len(call.token_ids) <= begins_at  # all of the block came with the end
    assert stage.stats().num_generated_tokens == count
    stage.device.accepted = {}
    check_equals_solo(call)
    witness(
        "s19-speculation-stop",
        tokens_of_the_step=len(script) - begins_at,
        cut=len(script) - count or "nothing",
        kept=count,
    )
    stage.check_clean_end()


@DEPTHS
def test_T31_min_tokens_holds_every_stop_back(depth: int) -> None:
    """Ids are not sampled before it, strings and sequences completed before it do not count."""
    stage = Stage(depth, pieces=PIECES)
    by_end = stage.submit([1], [40, 41, END], min_tokens=6, max_tokens=20)
    by_id = stage.submit([1], [40, 41, 22], min_tokens=6, max_tokens=20, stop_token_ids=[22])
    others = [stage.submit([1], SCRIPT, min_tokens=9, max_tokens=12, **STOPS[kind]) for kind in ("sequence", "string")]
    stage.run()
    assert by_end.ended.token_ids == [40, 41, *[END + 1] * 4, END]
    assert by_id.ended.token_ids == [40, 41, *[23] * 4, 22]
    for call in others:
        assert (len(call.ended.token_ids), call.ended.finish_reason) == (12, "length")
    stage.check_clean_end()


def test_T29_the_earliest_stop_wins_whatever_the_order_of_the_list() -> None:
    pieces = {1: "A", 2: "B", 3: "CD", 4: "E", 5: "CDzz"}
    stage = Stage(2, pieces=pieces)
    stops = ["CD", "ABCDE", "B"]
    calls = [stage.submit([9], [1, 2, 3, 4], max_tokens=9, stop=list(order)) for order in (stops, stops[::-1])]
    other = stage.submit([9], [5], max_tokens=9, stop=["zz", "CD"])
    mixed = stage.submit([9], [1, 2, 3, 4], max_tokens=9, stop=["CDE"], stop_token_ids=[3])
    stage.run()
    for call in calls:
        assert call.ended.token_ids == [1, 2]
        assert call.ended.stop is not None and (call.ended.stop.reason, call.ended.stop.text_end) == ("B", 1)
    assert other.ended.stop is not None and (other.ended.stop.reason, other.ended.stop.text_end) == ("CD", 0)
    assert mixed.ended.stop is not None and mixed.ended.stop.reason == 3
    stage.check_clean_end()
