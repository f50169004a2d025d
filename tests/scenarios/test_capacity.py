"""T14, T15, T18 and T22 on the scripted model: what fits, what is refused, and who hears of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from perdure.api.errors import InvalidValue
from perdure.api.sampling import SamplingParams
from tests.scenarios.scripted import END, Stage, check_equals_solo, counting, solo
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])


@DEPTHS
@pytest.mark.parametrize("paused_pages", [0, 6])
@pytest.mark.parametrize("budget", [512, 32])
def test_T14_no_live_lock(budget: int, paused_pages: int, depth: int) -> None:
    """12 pages, two requests of 11 each: both end, in bounded steps, and each return gives at least one new token."""
    stage = Stage(depth, num_pages=12, paused_pages=paused_pages, max_num_batched_tokens=budget, max_model_len=192)
    calls = [stage.submit([n] * 16, counting(50 * n), max_tokens=160) for n in (1, 2)]
    stage.run()
    for call in calls:
        check_equals_solo(call)
        assert len(call.residencies) == 1 + call.ended.num_evictions
        assert all(late > early for early, late in pairwise(call.residencies)), "a return gave no new token"
    num_evictions = sum(call.ended.num_evictions for call in calls)
    witness("T14", num_evictions=num_evictions)
    prefill_rows = sum(num_tokens > 0 for plan in stage.device.plans for num_tokens in plan.num_tokens)
    recompute_steps = prefill_rows - len(calls)  # a first prefill is one step of 16 tokens
    solo_steps = 160 * len(calls)
    assert stage.stats().num_steps <= solo_steps + 2 * recompute_steps
    stage.check_clean_end()


@DEPTHS
def test_T15_what_can_never_fit_is_refused_and_blocks_nobody(depth: int) -> None:
    """8 pages are 128 tokens. A has 200 and is refused with need and capacity; B ends; C is clipped to 28. Twice."""
    stage = Stage(depth, num_pages=8)
    for _ in range(2):
        never = stage.submit([1] * 200, counting(10), max_tokens=4)
        other = stage.submit([2] * 20, counting(20), max_tokens=10)
        clipped = stage.submit([3] * 100, counting(30), max_tokens=100)
        stage.turn()
        assert never.refusal is not None
        assert "201 tokens" in never.refusal.message and "128" in never.refusal.message
        stage.run()
        check_equals_solo(other)
        check_equals_solo(clipped)
        assert (len(clipped.ended.token_ids), clipped.ended.finish_reason) == (28, "length")
    stage.check_clean_end()


@DEPTHS
def test_T18_failures_go_to_the_call_that_submitted_them(depth: int) -> None:
    """Two calls submit at once, one of them something invalid: each hears of its own, and no refusal costs a step."""
    stage = Stage(depth)
    first = [
        stage.submit([-1], counting(1), request_id=9),
        stage.submit([1, 2], counting(10), request_id=10, max_tokens=6),
    ]
    second = [stage.submit([n, 5], counting(20 * n), request_id=n - 1, max_tokens=6) for n in (1, 2)]
    invalid = [stage.submit(prompt, counting(1), request_id=f"no{len(prompt)}") for prompt in ([512], [1, 2**63 - 1])]
    stage.run()
    assert first[0].refusal is not None and "prompt_token_ids[0]=-1" in first[0].refusal.message
    for call in (first[1], *second):
        check_equals_solo(call)
    for call in invalid:
        assert call.refusal is not None and call.refusal.kind == "InvalidValue"
    assert stage.stats().num_requests == 3

    num_steps = stage.stats().num_steps
    stage.submit([], counting(1))
    stage.run()
    assert stage.stats().num_steps == num_steps, "a call with nothing valid reached the device"
    stage.check_clean_end()


@DEPTHS
@pytest.mark.parametrize(
    ("max_tokens", "num_tokens"), [(None, 236), (0, 0), (1, 1), (236, 236), (237, 236), (2**31, 236)]
)
def test_T22_max_tokens(max_tokens: int | None, num_tokens: int, depth: int) -> None:
    """L = 256, prompt of 20: None is up to the limit, 0 gives prompt scores only, too much is clipped; all `length`."""
    stage = Stage(depth)
    call = stage.submit(range(100, 120), counting(30), max_tokens=max_tokens, prompt_logprobs=2)
    plain = stage.submit(range(100, 120), counting(30), max_tokens=max_tokens, logprobs=None)
    stage.run()
    for one in (call, plain):
        assert (len(one.ended.token_ids), one.ended.finish_reason) == (num_tokens, "length")
        check_equals_solo(one)
    assert call.ended.prompt_scores is not None and len(call.ended.prompt_scores) == 20
    assert plain.ended.prompt_scores is None and plain.ended.scores is None
    stage.check_clean_end()


@pytest.mark.parametrize("value", [-1, "5", 1.5, True])
def test_T22_other_values_are_refused(value: Any) -> None:
    with pytest.raises(InvalidValue, match="max_tokens"):
        SamplingParams(max_tokens=value)


def test_T22_the_end_id_ends_before_the_limit() -> None:
    """Without max_tokens the end id stops it, unless ignored: the limit is never the reason of a stop."""
    stage = Stage(2)
    ended, ignoring = (stage.submit([1], [40, 41, END], max_tokens=8, ignore_eos=ignore) for ignore in (False, True))
    stage.run()
    assert (ended.ended.token_ids, ended.ended.finish_reason) == ([40, 41, END], "stop")
    assert (len(ignoring.ended.token_ids), ignoring.ended.finish_reason) == (8, "length")
    assert solo(ended).stop == ended.ended.stop and ended.ended.stop is not None and ended.ended.stop.reason is None
    stage.check_clean_end()
