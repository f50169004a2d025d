"""Faults met on the way: each ends what it touches, with a clear error, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from perdure import AsyncLLM, SamplingParams
from perdure.api.errors import EngineDead, InvalidValue, StepFailed
from perdure.api.plan import StepOutput, StepPlan
from tests.engine.conftest import MakeAsync, MakeLLM
from tests.engine.helpers import V, check_equal, in_thread, prompt, settings
from tests.witness import witness


class Raising:
    """Makes one chosen step of an engine's runner raise."""

    def __init__(self, engine: Any, when: Callable[[StepPlan], bool], error: BaseException, slow: float = 0.0) -> None:
        self.num_raised = 0
        self._runner = engine.resolved.runner
        self._run = self._runner._run
        self._when, self._error, self._slow = when, error, slow
        self._runner._run = self

    def __call__(self, plan: StepPlan) -> StepOutput:
        time.sleep(self._slow)
        if not self.num_raised and self._when(plan):
            self.num_raised += 1
            self._runner._rows.apply(plan)  # it raises where it hurts: rows stand at their beginning, tables are set
            raise self._error
        return self._run(plan)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_T16_a_step_that_raises_leaves_the_cached_prefix_of_others_whole(depth: int, make_llm: MakeLLM) -> None:
    """A prefix is cached; a request that shares it fails in its first step, with more steps launched behind."""
    llm, ids = make_llm(steps_in_flight=depth), prompt(40)
    (before,) = llm.generate([ids], settings())
    raising = Raising(llm._engine, lambda plan: True, MemoryError("no room"), slow=0.004)
    (failed,) = llm.generate([[*ids, 9]], settings())
    assert isinstance(failed.error, StepFailed) and "MemoryError: no room" in str(failed.error)
    assert failed.outputs[0].finish_reason == "error" and raising.num_raised == 1
    (after,) = llm.generate([ids], settings())
    witness("T16", num_cached_tokens=after.num_cached_tokens, num_raised=raising.num_raised)
    check_equal(after, before)


def test_a_huge_min_tokens_is_clipped_and_its_neighbour_does_not_notice(make_llm: MakeLLM) -> None:
    llm, ids = make_llm(), prompt(20)
    (alone,) = llm.generate([ids], settings(max_tokens=30))
    call = in_thread(lambda: llm.generate([ids], settings(max_tokens=30)))
    (huge,) = llm.generate([[1, 2, 3]], settings(min_tokens=2**63 - 1, max_tokens=None, ignore_eos=False))
    assert huge.outputs[0].finish_reason == "length" and len(huge.outputs[0].token_ids) == 256 - 3
    check_equal(call()[0], alone)


def test_min_tokens_that_leaves_no_id_to_sample_is_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidValue, match="min_tokens=2: all 512 ids"):
        make_llm().generate([1, 2], SamplingParams(min_tokens=2, stop_token_ids=range(V), max_tokens=5))


def test_a_cancelled_control_call_changes_nothing(make_async: MakeAsync) -> None:
    async def main(llm: AsyncLLM) -> None:
        handle = llm.submit(prompt(9), settings(max_tokens=100))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.pause("wait"), 0.001)
        await llm.resume()
        assert len((await handle).outputs[0].token_ids) == 100
        assert (await llm.stats()).num_running == 0

    asyncio.run(main(make_async()))


def test_a_cancelled_generate_aborts_its_request(make_async: MakeAsync) -> None:
    async def main(llm: AsyncLLM) -> None:
        raising = Raising(llm._engine, lambda plan: False, MemoryError(), slow=0.02)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.generate(prompt(9), settings(max_tokens=200)), 0.1)
        raising._slow = 0.0
        stats = await llm.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_requests) == (0, 0, 1)

    asyncio.run(main(make_async()))


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompts": [2**64]},
        {"prompts": [1], "request_ids": 2**64},
        {"prompts": [1], "request_ids": "\ud800"},
        {"prompts": "caf\udce9"},
    ],
    ids=str,
)
def test_a_value_no_journal_can_hold_is_refused(arguments: dict[str, Any], make_llm: MakeLLM, tmp_path: Any) -> None:
    llm = make_llm(journal=str(tmp_path / "journal"))
    with pytest.raises(InvalidValue):
        llm.generate(**arguments)
    assert llm.stats().num_requests == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": 2**64},
        {"max_tokens": 2**64},
        {"stop": ["\ud800"]},
        {"stop": 5},
        {"stop_token_ids": 5},
        {"stop_token_ids": [2**64]},
        {"stop_token_sequences": 5},
        {"stop_token_sequences": [5]},
        {"temperature": 10**400},
    ],
    ids=str,
)
def test_settings_no_column_can_hold_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_scores_of_a_continuation_of_nothing_are_refused(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(InvalidValue, match="empty"):
        llm.logprobs({"prompt_token_ids": []}, [5, 6, 7])
    (refused,) = llm.logprobs([[]], [[5, 6, 7]])
    assert isinstance(refused.error, InvalidValue) and refused.outputs[0].token_ids == []


def test_scores_of_an_aborted_continuation_are_as_many_as_its_ids(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.pause()
    call = in_thread(lambda: llm.logprobs([prompt(8)], [prompt(4)]))
    while not llm.stats().num_waiting:
        time.sleep(0.001)
    llm.abort()
    output = call()[0].outputs[0]
    assert output.finish_reason == "abort" and output.token_ids == [] and len(output.logprobs) == 0
    llm.resume()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_T16_a_dead_runner_is_told_to_every_waiter_within_a_second(error: BaseException, make_llm: MakeLLM) -> None:
    llm = make_llm()
    Raising(llm._engine, lambda plan: True, error)
    begin = time.monotonic()
    with pytest.raises(EngineDead, match=type(error).__name__):
        llm.generate([prompt(5)], settings())
    for later in (llm.stats, lambda: llm.generate([[1]], settings())):
        with pytest.raises(EngineDead):
            later()
    assert time.monotonic() - begin < 1


def test_T16_waiters_hear_of_a_dead_engine_before_its_slow_steps_end(make_llm: MakeLLM) -> None:
    llm = make_llm(steps_in_flight=4)
    Raising(llm._engine, lambda plan: False, MemoryError(), slow=0.7)
    commit = llm._engine._loop.scheduler.commit
    died: list[float] = []

    def fail(*arguments: Any) -> Any:
        died.append(time.monotonic())
        raise ValueError(f"planted, not {commit.__name__}")

    llm._engine._loop.scheduler.commit = fail  # type: ignore[method-assign]
    with pytest.raises(EngineDead, match="planted"):
        llm.generate([prompt(5)], settings())
    assert time.monotonic() - died[0] < 0.5


def test_a_refusal_has_the_shape_of_every_ending(make_llm: MakeLLM) -> None:
    (refused,) = make_llm().generate([[]], settings(logprobs=3))
    output = refused.outputs[0]
    assert (output.finish_reason, output.token_ids, output.text) == ("error", [], "")
    assert output.logprobs is not None and len(output.logprobs) == 0


def test_arrays_are_prompts_and_bytes_are_not(make_llm: MakeLLM) -> None:
    import numpy as np
    import torch

    llm, ids = make_llm(), prompt(7)
    (plain,) = llm.generate([ids], settings())
    for given in (np.array(ids), [torch.tensor(ids)], {"prompt_token_ids": np.array(ids)}):
        check_equal(llm.generate(given, settings())[0], plain)
    for wrong in (b"ab", [b"ab"], [[1, 2.5]], {"prompt": "x", 1: 2}):
        with pytest.raises(InvalidValue):
            raise_first(llm.generate(wrong, settings()))


def raise_first(outputs: Any) -> None:
    if outputs[0].error is not None:
        raise outputs[0].error
