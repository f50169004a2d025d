"""Several samples of one prompt: T46, the n > 1 of T03, and what may happen to children, on the scripted model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from perdure.api.checkpoint import Checkpoint
from perdure.api.ending import Failure
from perdure.api.plan import StepPlan
from tests.scenarios.scripted import Call, Stage, counting, flat
from tests.scenarios.streamed import shown
from tests.scenarios.test_checkpoint import DEPTHS
from tests.witness import witness

PROMPT = list(range(40))
SIZES = pytest.mark.parametrize(("page_size", "length"), [(16, 40), (16, 48), (16, 33), (16, 1), (1, 7), (64, 40)])
"""Full pages and a part of one; the prompt's end exactly a page's; only its last position in a page; none; all; one."""


def sampled(stage: Stage, n: int, seed: int | None = 42, prompt: Sequence[int] = PROMPT, **settings: Any) -> Call:
    return stage.submit(prompt, flat, n=n, seed=seed, **{"temperature": 1.0, "max_tokens": 16, **settings})


def ids(call: Call) -> list[list[int]]:
    return [call.records[child].token_ids for child in range(call.request.params.n)]


def one_by_one(n: int, seed: int = 42, prompt: Sequence[int] = PROMPT, **settings: Any) -> list[list[int]]:
    """The same with one row and nothing cached: each child computes its prompt and shares nothing."""
    stage = Stage(1, max_num_seqs=1, enable_prefix_caching=False)
    call = sampled(stage, n, seed, prompt, **settings)
    stage.run()
    assert not any(plan.copy_from for plan in stage.device.plans)
    return ids(call)


def positions(plans: Sequence[StepPlan]) -> int:
    return sum(sum(plan.length) for plan in plans)


def reasons(call: Call) -> list[str]:
    return [call.records[child].finish_reason for child in range(call.request.params.n)]


@DEPTHS
def test_T46_children_differ_repeat_and_begin_with_the_n_1_result(depth: int) -> None:
    runs = []
    for _ in range(2):
        stage = Stage(depth)
        call = sampled(stage, 4)
        stage.run()
        assert reasons(call) == ["length"] * 4 and [len(one) for one in ids(call)] == [16] * 4
        for child in range(4):
            assert shown(call, child).token_ids == ids(call)[child]
        runs.append(ids(call))
        stage.check_clean_end()
    assert runs[0] == runs[1] == one_by_one(4)
    assert all(one != other for one, other in combinations(runs[0], 2))
    stage = Stage(depth)
    separate = [sampled(stage, 1) for _ in range(4)]
    stage.run()
    assert [one.ended.token_ids for one in separate] == [runs[0][0]] * 4
    witness("T46", depth=depth, first_ids=[one[0] for one in runs[0]])


@DEPTHS
def test_T46_eight_children_in_a_crowd_under_pressure_are_those_alone(depth: int) -> None:
    """Pairwise different, and the same ids whatever is put aside."""
    stage = Stage(depth, num_pages=14, max_num_seqs=5, max_num_batched_tokens=33, paused_pages=3)
    others = [sampled(stage, 2, None, [7] * 20, max_tokens=30), sampled(stage, 1, None, [8] * 9, max_tokens=30)]
    call = sampled(stage, 8, max_tokens=32)
    stage.run()
    assert ids(call) == one_by_one(8, max_tokens=32)
    assert all(one != other for one, other in combinations(ids(call), 2))
    assert ids(others[0]) == one_by_one(2, others[0].ended.seed, [7] * 20, max_tokens=30)
    witness(
        "T46-crowd",
        depth=depth,
        num_evictions=sum(record.num_evictions for record in call.records.values()),
        num_copies=sum(len(plan.copy_from) for plan in stage.device.plans),
    )
    stage.check_clean_end()


@SIZES
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_prompt_is_computed_once_and_its_pages_are_shared(
    depth: int, caching: bool, page_size: int, length: int
) -> None:
    """Each later child computes its last position only; full pages are held once, whatever the cache does."""
    stage = Stage(depth, page_size=page_size, enable_prefix_caching=caching, num_pages=600)
    call = sampled(stage, 4, prompt=range(length), prompt_logprobs=0)
    stage.until(lambda: all(child.num_output >= 2 for child in call.group.children))
    shared = (length - 1) // page_size
    tables = [child.pages for child in call.group.children]
    assert all(table[:shared] == tables[0][:shared] for table in tables)
    private = [page for table in tables for page in table[shared:]]
    assert len({*private}) == len(private)
    assert stage.stats().num_pages - stage.stats().num_free_pages == shared + len(private)
    stage.run()
    assert ids(call) == one_by_one(4, prompt=range(length))
    assert positions(stage.device.plans) == length + 3 + 4 * 15
    copied = [length for plan in stage.device.plans for length in plan.copy_length]
    assert copied == [(length - 1) % page_size] * 3 * ((length - 1) % page_size > 0)
    scores = [record.prompt_scores for record in call.records.values()]
    assert (
        sum(one is not None for one in scores) == 1
        and sum(len(plan.targets) for plan in stage.device.plans) == length - 1
    )
    stats = stage.stats()
    assert (stats.num_requests, stats.num_prompt_tokens, stats.num_cached_tokens) == (4, length, 0)
    stage.check_clean_end()


@DEPTHS
def test_T03_an_abort_of_the_request_ends_all_its_children(depth: int) -> None:
    """Each with what it has: one end, ids and scores of the undisturbed run's first tokens."""
    stage = Stage(depth, max_num_seqs=3)
    call = sampled(stage, 5, logprobs=1)
    stage.until(lambda: call.state.num_output >= 5)
    stage.abort(call.request.request_id)
    stage.turn()
    assert call.num_ends == 1 and reasons(call) == ["abort"] * 5
    truth = one_by_one(5)
    counts = [len(one) for one in ids(call)]
    assert [one for one in ids(call)] == [one[:count] for one, count in zip(truth, counts)]
    assert counts[0] >= 5 and min(counts[:3]) > 0 and counts[3:] == [0, 0]
    for child, record in call.records.items():
        assert record.scores is not None and record.scores.num_scored == counts[child]
        assert shown(call, child).token_ids == record.token_ids
    witness("T03-n", depth=depth, num_tokens=counts[0])
    stage.check_clean_end()


@DEPTHS
@pytest.mark.parametrize("settings", [{"max_tokens": 1}, {"stop_token_ids": list(range(0, 512, 2))}])
def test_the_first_child_ends_with_its_first_token(settings: dict[str, Any], depth: int) -> None:
    """Before anybody could take its pages: the others are none the worse."""
    stage = Stage(depth, enable_prefix_caching=False)
    call = sampled(stage, 4, **settings)
    stage.run()
    assert ids(call) == one_by_one(4, **settings) and len(call.ended.token_ids) >= 1
    stage.check_clean_end()


@DEPTHS
@pytest.mark.parametrize("after", [1, 2])
def test_the_child_that_computes_the_prompt_fails(after: int, depth: int) -> None:
    """In its first or second chunk: it alone ends with an error, and another one goes on with the prompt, whose scores
    are each made once."""
    stage = Stage(depth, max_num_batched_tokens=16)
    calls: list[int] = []

    def fail(plan: StepPlan) -> dict[int, Failure]:
        calls.append(plan.step)
        return {0: Failure("StepFailed", "planted")} if len(calls) == after else {}

    stage.device._fail = fail
    call = sampled(stage, 3, prompt_logprobs=0)
    stage.run()
    assert reasons(call) == ["error", "length", "length"]
    assert ids(call)[1:] == one_by_one(3)[1:] and ids(call)[0] == []
    (scores,) = [record.prompt_scores for record in call.records.values() if record.prompt_scores is not None]
    assert scores.num_scored == len(PROMPT) - 1
    stage.check_clean_end()


@DEPTHS
def test_children_that_wait_for_their_prompt_let_others_past(depth: int) -> None:
    """Four requests of four, each prompt in one step: no step goes by with a prompt alone."""
    stage = Stage(depth, max_num_batched_tokens=200)
    calls = [sampled(stage, 4, prompt=[number] * 40) for number in range(4)]
    stage.turn(depth + 1)
    assert stage.device.plans[0].length == [40] * 4
    stage.run()
    for number, call in enumerate(calls):
        assert ids(call) == one_by_one(4, prompt=[number] * 40)
    assert len(stage.device.plans) <= 16 + depth
    stage.check_clean_end()


@DEPTHS
def test_a_group_with_fewer_rows_than_children(depth: int) -> None:
    """Two rows for six: whoever begins takes the prompt of one that runs, as long as there is one."""
    stage = Stage(depth, max_num_seqs=2, enable_prefix_caching=False)
    call = sampled(stage, 6)
    stage.run()
    assert ids(call) == one_by_one(6)
    assert len({child for child, record in call.records.items() if record.finish_reason == "length"}) == 6
    assert positions(stage.device.plans) < 2 * 40 + 6 * 16
    witness("n-rows", depth=depth, num_copies=sum(len(plan.copy_from) for plan in stage.device.plans))
    stage.check_clean_end()


@DEPTHS
@pytest.mark.parametrize("kv", ["persist", "offload", "recompute"])
def test_a_suspension_in_the_middle_of_a_group(kv: Any, depth: int) -> None:
    stage = Stage(depth, enable_prefix_caching=False)
    call = sampled(stage, 4)
    stage.until(lambda: call.state.num_output == 4)
    ticket = stage.suspend(kv)
    stage.until(lambda: ticket in stage.answers)
    before = positions(stage.device.plans)
    stage.resume()
    stage.run()
    assert ids(call) == one_by_one(4)
    again = positions(stage.device.plans) - before - sum(16 - 4 for _ in range(4))
    assert (again > 40) == (kv == "recompute") and again < 2 * 40 + 4 * 16  # the prompt once more, not four times
    stage.check_clean_end()


@DEPTHS
def test_a_checkpoint_holds_all_children_those_that_have_ended_too(depth: int) -> None:
    """It goes on in another engine: who had ended is told of again, the others end as they would have."""
    stops = {"stop_token_ids": list(range(0, 512, 9)), "max_tokens": 40, "logprobs": 1, "prompt_logprobs": 0}
    stage = Stage(depth)
    call = sampled(stage, 6, **stops)
    stage.until(lambda: len(call.records) >= 2)
    found = stage.checkpoint(call, end=True)
    data = found.to_bytes()
    ended = [child for child, sample in enumerate(found.samples) if sample.ending is not None]
    assert 2 <= len(ended) < 6 and Checkpoint.from_bytes(data) == found
    there = Stage(1, page_size=4, max_num_seqs=3, max_num_batched_tokens=9)
    again = there.go_on(Checkpoint.from_bytes(data), flat)
    there.run()
    assert ids(again) == one_by_one(6, **stops)
    assert sorted(again.records) == [*range(6)] and list(again.records)[: len(ended)] == ended
    for child in ended:
        assert (again.records[child].stop, again.records[child].scores) == (
            call.records[child].stop,
            call.records[child].scores,
        )
    (scores,) = [record.prompt_scores for record in again.records.values() if record.prompt_scores is not None]
    assert scores.num_scored == len(PROMPT) - 1
    for child in range(6):
        assert shown(again, child).finish_reason == again.records[child].finish_reason
    witness("checkpoint-n", depth=depth, num_ended=len(ended), num_bytes=len(data))
    stage.check_clean_end()
    there.check_clean_end()


@DEPTHS
def test_children_are_rows_of_their_own(depth: int) -> None:
    """In counts; and a paused request is named once."""
    stage = Stage(depth, max_num_seqs=3)
    call = sampled(stage, 5)
    stage.until(lambda: call.state.num_output >= 3)
    stats = stage.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_requests) == (3, 2, 5)
    stage.run()
    greedy = stage.submit(PROMPT, counting(60), n=3, max_tokens=5)
    stage.run()
    assert ids(greedy) == [[60, 61, 62, 63, 64]] * 3  # nothing is drawn
    stage.check_clean_end()
