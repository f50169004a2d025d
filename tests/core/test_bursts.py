"""Several steps of decoding in one plan: when there are some, how many, and what commit makes of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import pytest

from perdure.api.ending import Failure
from perdure.api.plan import MOST_STEPS, StepPlan
from perdure.core import budget
from perdure.engine.pace import Pace
from tests.core.helpers import Bench, request
from tests.witness import witness


@pytest.mark.parametrize(
    ("left", "room", "most", "num_free", "lengths", "pages"),
    [
        ([100, 100], [4, 1], 16, 99, [16, 16], [3, 4]),  # a page of 4 for what the row's own do not hold
        ([100, 100], [4, 1], 7, 99, [7, 7], [1, 2]),  # as many as it may
        ([100, 100], [4, 1], 16, 6, [8, 8], [1, 2]),  # as far as there are pages
        ([5], [1], 16, 99, [5], [1]),  # nobody would be left for more
        ([3] + [100] * 15, [50] * 16, 16, 99, [3] + [16] * 15, [0] * 16),  # one may end inside
        ([1] * 8 + [100] * 8, [50] * 16, 16, 99, [1] * 8 + [16] * 8, [0] * 16),  # and eight whatever the others do
        ([1] * 9 + [100] * 9, [50] * 18, 16, 99, [1] * 9 + [8] * 9, [0] * 18),
        ([1] * 16 + [100] * 16, [50] * 32, 16, 99, [1] * 16 + [2] * 16, [0] * 32),  # and not half of many
        ([1, 1], [1, 1], 16, 99, [1, 1], [0, 0]),
    ],
)
def test_how_long_a_burst_is(
    left: list[int], room: list[int], most: int, num_free: int, lengths: list[int], pages: list[int]
) -> None:
    assert budget.burst(left, room, most, num_free, 4) == (lengths, pages)


@pytest.mark.parametrize(
    ("num_decodes", "most", "most_mixed", "left"),
    [
        (1, 8192, 512, 511),
        (257, 8192, 512, 255),
        (384, 8192, 512, 128),
        (385, 8192, 512, 128),  # more than a graph holds, and not much more
        (4, 8192, 8, 128),  # a small graph starves nobody
        (4, 64, 8, 32),
        (62, 64, 8, 2),  # no more than any step has
        (64, 64, 64, 0),
    ],
)
def test_what_is_left_for_prompts_beside_rows_that_decode(
    num_decodes: int, most: int, most_mixed: int, left: int
) -> None:
    assert budget.beside(num_decodes, most, most_mixed) == left


def test_one_row_more_that_decodes_takes_at_most_a_position_of_prompts() -> None:
    for most, most_mixed in ((8448, 512), (8448, 8), (8448, 1024), (64, 16), (1, 1)):
        left = [budget.beside(num_decodes, most, most_mixed) for num_decodes in range(1, most + 1)]
        assert {one - other for one, other in pairwise(left)} <= {0, 1} and left[-1] == 0


def begun(*prompts: list[int], **params: Any) -> Bench:
    """A bench whose requests decode, each with one token so far."""
    bench = Bench(max_num_seqs=3)
    for number, ids in enumerate(prompts):
        bench.submit(number, ids, **{"max_tokens": 40, "ignore_eos": True, **params})
    bench.step()
    return bench


def next_plan(bench: Bench) -> StepPlan:
    plan = bench.launch(16)
    assert plan is not None
    bench.commit()
    return plan


def test_a_burst_has_its_pages_before_it_is_launched() -> None:
    bench = begun([1, 2, 3], [4, 5])
    plan = next_plan(bench)
    assert plan.length == [16, 16] and plan.num_steps == 16
    states = bench.scheduler.requests.residents
    assert [len(state.pages) for state in states] == [5, 5] and len(plan.fresh_pages) == 8
    assert [(state.num_output, state.num_computed) for state in states] == [(17, 19), (17, 18)]


def test_there_is_none_while_somebody_could_be_taken_in_or_computes_a_prompt() -> None:
    bench = begun([1, 2, 3], [4, 5])
    bench.submit("long", list(range(30)) + [1] * 10, max_tokens=30)
    assert next_plan(bench).num_steps == 1 and next_plan(bench).num_steps == 1
    assert next_plan(bench).length == [16, 16, 16]


def test_who_waits_for_a_slot_finds_it_when_the_first_row_ends() -> None:
    bench = begun([1, 2], [3, 4], [5, 6], max_tokens=11)
    bench.submit("late", [7, 8], max_tokens=3)
    assert next_plan(bench).length == [10, 10, 10]
    assert next_plan(bench).request == [3]


@pytest.mark.parametrize("asked", [{"logits_processors": ["any:function"]}, {"logprobs": -1}])
def test_there_is_none_with_a_row_that_needs_the_host(asked: dict[str, Any]) -> None:
    bench = begun([1, 2, 3])
    bench.submit("needs the host", [4, 5], max_tokens=4, ignore_eos=True, **asked)
    plans = []
    while (plan := bench.launch(16)) is not None:
        bench.commit()
        plans.append(plan)
    assert {len(plan.slot) for plan in plans if plan.num_steps > 1} == {1}


def test_each_row_ends_where_it_would_have_step_by_step() -> None:
    """Ends, scores, cached pages and counts are those of single steps."""
    found = []
    for most_steps in (1, 4, 16):
        bench = Bench(max_num_seqs=8, end_token_ids=(0,))
        for number in range(6):
            asked: dict[str, Any] = {"max_tokens": 5 + 7 * number, "temperature": 1.0, "seed": number, "logprobs": 1}
            asked |= {"ignore_eos": True} if number % 2 else {"stop_token_ids": [5, 6], "min_tokens": number}
            bench.submit(number, [number + 1, 2, 3], **asked)
        bench.run(most_steps)
        records = [bench.ended(number) for number in range(6)]
        index = bench.scheduler.requests.cache.index
        stats = bench.scheduler.stats()
        found.append((records, len(index._nodes), stats.num_generated_tokens))
        ends = {record.finish_reason for record in records}
        assert ends == {"stop", "length"}, "this shows nothing"
        if most_steps > 1:
            witness("burst-ends", most_steps=most_steps, num_steps=stats.num_steps, ends=", ".join(sorted(ends)))
    assert found[0] == found[1] == found[2]


def test_what_fails_behind_a_stop_does_not_show() -> None:
    """A row fails in the second step of a burst; it keeps the token before, or has ended by it."""
    alone = begun([1, 2, 3])
    alone.run()
    token_ids = alone.ended(0).token_ids
    for stop_at, reason in ((1, "stop"), (9, "error")):
        bench = begun([1, 2, 3], stop_token_sequences=[token_ids[stop_at - 1 : stop_at + 1]])
        plan = bench.launch(4)
        assert plan is not None and plan.length == [4]
        bench.device._fail = lambda plan: {0: Failure("StepFailed", "planted")}
        bench.commit()
        record = bench.ended(0)
        assert (record.finish_reason, record.token_ids) == (reason, token_ids[:2])


class Asked(NamedTuple):
    """Requests that go on for so long."""

    is_closed: bool
    steps: int = 100
    num_rows: int = 1

    def likely_steps(self) -> int:
        return self.steps


def test_pace_allows_what_fits_the_time() -> None:
    bench = begun([1, 2, 3])
    plan = next_plan(bench)
    pace = Pace(200)
    assert pace.most_steps(Asked(is_closed=True)) == 1  # nothing was measured
    pace.took(plan, 16 * 0.025)
    assert pace.most_steps(Asked(is_closed=True)) == 8 and pace.most_steps(Asked(is_closed=False)) == 1
    for _ in range(40):
        pace.took(plan, 16 * 0.002)
    assert pace.most_steps(Asked(is_closed=True)) == MOST_STEPS and pace.most_steps(Asked(is_closed=False)) in (4, 5)
    assert pace.most_steps(Asked(is_closed=True, steps=3)) == 3 and pace.most_steps(Asked(is_closed=True, steps=0)) == 1
    off = Pace(0)
    off.took(plan, 0.001)
    assert off.most_steps(Asked(is_closed=True)) == 1


def test_pace_takes_a_step_to_last_longer_with_more_rows() -> None:
    """Bursts of steps of (0.7 + 0.025 rows) ms last 10 ms at most, also while rows come whose prompts' steps tell
    nothing; the longest that fit come back."""

    plan = next_plan(begun([1, 2, 3]))
    pace, taken = Pace(200), list[int]()
    for num_rows in (1, 1, 1, 256, 256, 256, 256, 256, 256, 20, *[100] * 9, *[1] * 20):
        step_ms = 0.7 + 0.025 * num_rows
        num_steps = pace.most_steps(Asked(is_closed=False, num_rows=num_rows))
        assert num_steps == 1 or num_steps * step_ms <= 10, (num_rows, num_steps)
        took = msgspec.structs.replace(plan, slot=[*range(num_rows)], length=[num_steps] * num_rows)
        pace.took(took, num_steps * step_ms / 1e3)
        taken.append(num_steps)
    assert taken[1:4] == [13, 13, 1] and taken[18] in (2, 3) and taken[-1] >= 12, taken


def test_who_may_stop_at_any_token_is_not_taken_to_go_on_for_long() -> None:
    bench = begun([1, 2, 3], stop_token_sequences=[[9, 9, 9, 9]])
    assert bench.scheduler.likely_steps() == 0
    next_plan(bench), next_plan(bench)
    assert bench.scheduler.likely_steps() == 33 // 16
    bench.submit("to its end", [4, 5], max_tokens=20, ignore_eos=True)
    bench.step()
    assert bench.scheduler.likely_steps() == 19


def test_a_closed_call_is_one_while_nobody_else_is_there() -> None:
    bench = Bench()
    assert bench.scheduler.is_closed
    bench.submit("open", [1, 2], max_tokens=2)
    assert not bench.scheduler.is_closed and not request("open", [1]).is_closed
    bench.run()
    assert bench.scheduler.is_closed
