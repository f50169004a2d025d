"""T01 to T09 on the scripted model: who ends, when, with what, to the turn."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from perdure.api.command import PauseMode
from perdure.api.request import RequestId
from perdure.core.lifecycle import Status
from tests.scenarios.scripted import Call, Stage, check_equals_solo, counting, flat
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])
ENDLESS = counting(60)


def under_pressure(depth: int, request_id: RequestId = "B", paused_pages: int = 0) -> tuple[Stage, Call, Call]:
    """A runs until it ends with 12 positions; B, behind it, lacks a page when it has 6 tokens."""
    stage = Stage(depth, num_pages=5, page_size=4, paused_pages=paused_pages, enable_prefix_caching=False)
    first = stage.submit([1, 2, 3, 4, 5], counting(100), request_id="A", max_tokens=8)
    second = stage.submit([6, 7, 8], ENDLESS, request_id=request_id, max_tokens=12)
    return stage, first, second


# T01: where A is when B comes with its id


def running(depth: int, request_id: RequestId) -> tuple[Stage, Call]:
    stage = Stage(depth)
    call = stage.submit([5, 6, 7, 8], ENDLESS, request_id=request_id, max_tokens=32)
    stage.until(lambda: len(call.token_ids) >= 3)
    return stage, call


def queued(depth: int, request_id: RequestId) -> tuple[Stage, Call]:
    stage = Stage(depth, max_num_seqs=1)
    stage.submit([1], counting(100), max_tokens=20)
    call = stage.submit([5, 6, 7, 8], ENDLESS, request_id=request_id, max_tokens=32)
    stage.turn(3)
    assert call.state.status is Status.WAITING and not call.state.num_evictions
    return stage, call


def engine_paused(depth: int, request_id: RequestId) -> tuple[Stage, Call]:
    stage, call = running(depth, request_id)
    ticket = stage.pause()
    stage.until(lambda: ticket in stage.answers)
    assert stage.stats().state == "paused"
    return stage, call


def without_a_page(depth: int, request_id: RequestId) -> tuple[Stage, Call]:
    stage, _, call = under_pressure(depth, request_id, paused_pages=5)
    stage.until(lambda: call.state.status is Status.PAUSED)
    witness("T01", num_pauses=call.state.num_pauses)
    return stage, call


def preempted(depth: int, request_id: RequestId) -> tuple[Stage, Call]:
    stage, _, call = under_pressure(depth, request_id)
    stage.until(lambda: call.state.num_evictions > 0)
    assert call.state.status is Status.WAITING
    witness("T01", num_evictions=call.state.num_evictions)
    return stage, call


@DEPTHS
@pytest.mark.parametrize("request_id", [7, "7"])
@pytest.mark.parametrize("where", [running, queued, engine_paused, without_a_page, preempted])
def test_T01_a_live_id_is_refused_wherever_its_request_is(
    where: Callable[[int, RequestId], tuple[Stage, Call]], request_id: RequestId, depth: int
) -> None:
    """B is refused in the turn it comes and nothing is made for it; A does not notice; then the id is free again."""
    stage, call = where(depth, request_id)
    before = stage.stats()
    twin = stage.submit([9, 9], ENDLESS, request_id=request_id)
    stage.turn()
    assert twin.refusal is not None and twin.refusal.kind == "InvalidValue"
    assert f"request_id={request_id!r}" in twin.refusal.message
    assert stage.stats().num_requests == before.num_requests and stage.stats().num_waiting <= before.num_waiting
    if before.state == "paused":
        stage.resume()
    stage.until(lambda: call.num_ends == 1)
    check_equals_solo(call)

    again = stage.submit([9, 9], counting(30), request_id=request_id, max_tokens=4)
    stage.check_clean_end()
    assert again.ended.token_ids == [30, 31, 32, 33]
    served = {arrival for plan in stage.device.plans for arrival in plan.request}
    assert len(served) == len(stage.calls) - 1, "the refused twin was computed"


def test_T01_an_int_and_a_str_are_two_ids() -> None:
    stage = Stage(2)
    calls = [stage.submit([5, 6], ENDLESS, request_id=name, max_tokens=8) for name in (7, "7")]
    stage.check_clean_end()
    for call in calls:
        check_equals_solo(call)


@DEPTHS
def test_T02_an_id_is_free_in_the_turn_of_its_abort(depth: int) -> None:
    """200 times: abort and submit again with nothing in between, after any number of steps, beside others."""
    rng = random.Random(2)
    stage = Stage(depth)
    beside = stage.submit([2, 4, 6], counting(300), max_tokens=60, temperature=1.0, seed=5)
    num_in_flight = 0
    for _ in range(200):
        first = stage.submit([5, 6, 7], ENDLESS, request_id="x")
        stage.turn(rng.randint(1, 9))
        num_in_flight += first.state.in_flight
        stage.abort("x")
        second = stage.submit([8, 9], counting(40), request_id="x", max_tokens=4)
        stage.turn()
        assert first.num_ends == 1 and first.ended.finish_reason == "abort"
        check_equals_solo(first, len(first.ended.token_ids))
        stage.until(lambda: second.num_ends == 1)  # noqa: B023
        assert (second.ended.token_ids, second.ended.finish_reason) == ([40, 41, 42, 43], "length")
    check_equals_solo(beside)
    if depth > 1:
        witness("T02", steps_in_flight_at_abort=num_in_flight)
    stage.check_clean_end()


@DEPTHS
@pytest.mark.parametrize("stream", [True, False])
def test_T03_an_aborted_request_gives_what_it_has(stream: bool, depth: int) -> None:
    """One end, reason abort, at least the 5 tokens that were delivered, their scores those of the undisturbed run."""
    stage = Stage(depth)
    call = stage.submit([5, 6, 7, 8], ENDLESS, stream=stream, logprobs=3, prompt_logprobs=0)
    others = [stage.submit([n, n], counting(n), max_tokens=20) for n in (100, 200)]
    stage.until(lambda: call.num_output >= 5)
    stage.abort(call.request.request_id)
    stage.turn()
    record = call.ended
    assert record.finish_reason == "abort" and record.stop is None and len(record.token_ids) >= 5
    check_equals_solo(call, len(record.token_ids))
    assert record.scores is not None and record.prompt_scores is not None
    assert record.scores.num_scored == len(record.token_ids) and len(record.prompt_scores) == 4
    assert bool(call.token_ids) == stream
    stage.check_clean_end()
    for other in others:
        check_equals_solo(other)


@DEPTHS
def test_T04_an_aborted_queued_request_was_never_computed(depth: int) -> None:
    stage = Stage(depth, max_num_seqs=1)
    first = stage.submit([1, 2], ENDLESS, max_tokens=12)
    waiting = stage.submit([3, 4], ENDLESS, request_id="B", prompt_logprobs=0)
    stage.turn(4)
    arrival = waiting.state.arrival
    stage.abort("B")
    stage.turn()
    record = waiting.ended
    assert (record.finish_reason, record.token_ids) == ("abort", [])
    assert record.scores is not None and len(record.scores) == 0
    assert record.prompt_scores is not None and record.prompt_scores.num_scored == 0
    stage.check_clean_end()
    check_equals_solo(first)
    assert all(arrival not in plan.request for plan in stage.device.plans)


@DEPTHS
def test_T05_an_aborted_preempted_request_keeps_its_six_tokens(depth: int) -> None:
    stage, first, second = under_pressure(depth)
    stage.until(lambda: second.state.num_evictions > 0 and not second.state.in_flight)
    assert second.state.status is Status.WAITING and second.num_output == 6
    stage.abort("B")
    stage.turn()
    record = second.ended
    witness("T05", num_evictions=record.num_evictions, num_tokens=len(record.token_ids))
    assert (record.finish_reason, len(record.token_ids)) == ("abort", 6)
    check_equals_solo(second, 6)
    stage.check_clean_end()
    check_equals_solo(first)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_T06_an_abort_before_the_last_output_is_known(depth: int) -> None:
    """The step that would end B by length is in flight: B ends once, by the abort, and gives its pages back at once."""
    stage = Stage(depth)
    call = stage.submit([5, 6, 7, 8], ENDLESS, request_id="B", max_tokens=6)
    stage.until(lambda: call.state.num_planned == call.state.last_position)
    assert call.num_output < 6 and call.state.in_flight
    witness("T06", in_flight=call.state.in_flight)
    stage.abort("B")
    stage.turn()
    assert call.num_ends == 1 and call.ended.finish_reason == "abort"
    assert stage.stats().num_free_pages == stage.config.num_pages
    check_equals_solo(call, len(call.ended.token_ids))
    stage.check_clean_end()


@DEPTHS
def test_T06_an_abort_while_the_last_step_runs(depth: int) -> None:
    """It arrives when the loop already waits for that step: applied first, before the step's output is."""
    stage = Stage(depth)
    call = stage.submit([5, 6, 7, 8], ENDLESS, request_id="B", max_tokens=6)
    last_step = 5  # each step before gave one of the six tokens
    stage.device.during_step = lambda plan: stage.abort("B") if plan.step == last_step else None
    stage.until(lambda: call.num_ends > 0)
    assert call.ended.finish_reason == "abort" and call.ended.token_ids == [60, 61, 62, 63, 64]
    assert stage.stats().num_free_pages == stage.config.num_pages
    stage.check_clean_end()


@DEPTHS
def test_T07_aborts_of_what_is_not_there_do_nothing(depth: int) -> None:
    stage = Stage(depth)
    done = stage.submit([1, 2], ENDLESS, request_id="done", max_tokens=2)
    call = stage.submit([1, 2, 3], ENDLESS, request_id="abc", max_tokens=30)
    gone = stage.submit([4], ENDLESS, request_id="gone")
    stage.until(lambda: done.num_ends == 1)
    stage.abort("", "unknown", "done", "ab", "ABC", 0)
    stage.abort("gone", "gone")
    stage.abort("gone")
    stage.abort()
    stage.check_clean_end()
    check_equals_solo(call)
    check_equals_solo(done)
    assert gone.ended.finish_reason == "abort"


@DEPTHS
def test_T08_abort_all(depth: int) -> None:
    """8 running and 8 waiting: 16 ends, the queued ones without tokens; a new one runs without being asked to."""
    stage = Stage(depth, max_num_seqs=8)
    calls = [stage.submit([n], counting(10 * n)) for n in range(1, 17)]
    stage.until(lambda: all(call.num_output >= 3 for call in calls[:8]))
    assert (stage.stats().num_running, stage.stats().num_waiting) == (8, 8)
    stage.abort_all()
    stage.turn()
    assert [call.ended.finish_reason for call in calls] == ["abort"] * 16
    for call in calls[:8]:
        check_equals_solo(call, len(call.ended.token_ids))
        assert len(call.ended.token_ids) >= 3
    assert all(call.ended.token_ids == [] for call in calls[8:])
    stage.check_clean_end()


# T09: pause and resume


def four_and_pause(stage: Stage, mode: PauseMode) -> tuple[list[Call], Call, int]:
    """2 greedy and 2 seeded requests, a pause at step 5, a fifth request during it. Returns the pause's ticket."""
    greedy = [stage.submit([n] * n, counting(10 * n), max_tokens=16, prompt_logprobs=0) for n in (3, 9)]
    seeded = [stage.submit([n] * n, flat, max_tokens=16, temperature=1.0, seed=n) for n in (5, 20)]
    stage.turn(5)
    ticket = stage.pause(mode)
    fifth = stage.submit([7, 7, 7], counting(200), max_tokens=8)
    return [*greedy, *seeded], fifth, ticket


def stand_still(stage: Stage, ticket: int) -> None:
    """Turn until the pause is answered, then on: nothing is launched and nothing told until the resume."""
    stage.until(lambda: ticket in stage.answers)
    assert stage.num_in_flight == 0 and stage.stats().state == "paused"
    num_events, num_plans = len(stage.events), len(stage.device.plans)
    stage.turn(10)
    assert (len(stage.events), len(stage.device.plans)) == (num_events, num_plans)
    stage.resume()


@DEPTHS
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_T09_pause_and_resume(mode: PauseMode, depth: int) -> None:
    """keep: the four go on as if nothing had been. wait: they end first. abort: they end at once. The fifth waits."""
    stage = Stage(depth)
    calls, fifth, ticket = four_and_pause(stage, mode)
    stage.until(lambda: ticket in stage.answers)
    assert fifth.state.status is Status.WAITING and not fifth.num_output
    assert [call.num_ends for call in calls] == ([0] * 4 if mode == "keep" else [1] * 4)
    if mode == "keep":
        witness("T09", num_running=stage.stats().num_running)
    stand_still(stage, ticket)
    stage.check_clean_end()
    for call in calls:
        check_equals_solo(call, len(call.ended.token_ids) if mode == "abort" else None)
        assert call.ended.finish_reason == ("abort" if mode == "abort" else "length")
    check_equals_solo(fifth)


@DEPTHS
@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_T09_pause_inside_a_chunked_prefill(mode: PauseMode, depth: int) -> None:
    """100 prompt tokens in chunks of 16: the pause falls between two of them, prompt scores stay whole."""
    stage = Stage(depth, max_num_batched_tokens=16)
    beside = stage.submit([1, 2], counting(30), max_tokens=24)
    stage.turn(2)
    call = stage.submit(list(range(100)), counting(60), max_tokens=4, prompt_logprobs=2)
    stage.turn(3)
    covered = call.state.num_planned
    assert 0 < covered < 100
    witness("T09", positions_planned=covered, of=100)
    ticket = stage.pause(mode)
    stand_still(stage, ticket)
    stage.check_clean_end()
    assert call.ended.prompt_scores is not None and len(call.ended.prompt_scores) == 100
    check_equals_solo(call)
    check_equals_solo(beside)


@DEPTHS
def test_T09_pause_of_an_evicted_request(depth: int) -> None:
    """A request that lost its pages before the pause is computed again after it: keep with nothing kept."""
    stage, first, second = under_pressure(depth)
    stage.until(lambda: second.state.num_evictions > 0)
    witness("T09", num_evictions=second.state.num_evictions)
    ticket = stage.pause()
    stand_still(stage, ticket)
    stage.check_clean_end()
    check_equals_solo(first)
    check_equals_solo(second)


@DEPTHS
def test_T09_a_resume_before_the_answer_cancels_the_pause(depth: int) -> None:
    """Both are answered and the requests go on."""
    stage = Stage(depth)
    call = stage.submit([5, 6], ENDLESS, max_tokens=16)
    stage.turn(4)
    ticket = stage.pause("wait")
    stage.resume()
    stage.turn()
    assert ticket in stage.answers and stage.stats().state == "running"
    stage.check_clean_end()
    check_equals_solo(call)
