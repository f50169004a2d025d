"""Faults met on the way: each ends what it touches, with a clear error, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from perdure import AsyncLLM, SamplingParams
from perdure.api.errors import BadLogits, EngineDead, InvalidValue, StepFailed
from perdure.api.plan import StepOutput, StepPlan
from perdure.models.tiny import make_tiny_llama
from tests.engine.conftest import MakeAsync, MakeLLM
from tests.engine.helpers import V, changed_tensors, check_empty, check_equal, in_thread, prompt, run_async, settings
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


@pytest.mark.parametrize("where", ["prefill", "decode", "sampling", "scores"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_T16_an_exception_ends_exactly_the_requests_of_its_step(
    where: str, depth: int, make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    """X, Y and Z are in the step that raises, W waits for a row: the three end once, with that error and what they had,
    and W, the engine and the next requests do not notice."""
    llm = make_llm(steps_in_flight=depth, max_num_seqs=3, enable_prefix_caching=False)
    prompts, params = [prompt(length) for length in (5, 17, 33, 9)], settings(max_tokens=12, prompt_logprobs=0)
    clean = llm.generate(prompts, params)
    runner = llm._engine.resolved.runner
    num_steps = 0
    if where in ("prefill", "decode"):
        Raising(llm._engine, lambda plan: (plan.start[0] >= 0) == (where == "prefill"), MemoryError("planted"))
    else:
        name = "sample" if where == "sampling" else "score_targets"
        work = getattr(runner._sampler, name)

        def fail_once(*arguments: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 3:
                raise MemoryError("planted")
            return work(*arguments)

        setattr(runner._sampler, name, fail_once)
    *failed, fourth = llm.generate(prompts, params)
    for output, whole in zip(failed, clean, strict=False):
        assert isinstance(output.error, StepFailed) and "MemoryError: planted" in str(output.error)
        assert output.outputs[0].finish_reason == "error"
        count = len(output.outputs[0].token_ids)
        assert count < 12 and (count > 0) == (where != "prefill")
        check_equal(replace(output, error=None), whole, count)
    check_equal(fourth, clean[3])
    witness("T16", failed=len(failed), kept=len(failed[0].outputs[0].token_ids) or "none", raised_in=where)
    for output, whole in zip(llm.generate(prompts, params), clean, strict=True):
        check_equal(output, whole)
    assert not caplog.records


def test_T16_logits_of_nan_end_one_request(make_llm: MakeLLM, tmp_path: Path) -> None:
    """A token whose embedding is NaN poisons its own request, before and after others share the batch with it."""
    make_tiny_llama(tmp_path, seed=0)
    with changed_tensors(tmp_path) as tensors:
        tensors["model.embed_tokens.weight"][77] = torch.nan
    llm = make_llm(tmp_path)
    ids = [token for token in prompt(40) if token != 77]
    poisoned, params = [*ids[:20], 77, *ids[20:]], settings(max_tokens=8, prompt_logprobs=1)
    (alone,) = llm.generate([ids], params)
    outputs = llm.generate([ids, poisoned, ids[:9], poisoned, ids], params)
    for at, output in enumerate(outputs):
        if at in (1, 3):
            assert isinstance(output.error, BadLogits) and "NaN" in str(output.error)
            assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "error"
        else:
            assert output.error is None and len(output.outputs[0].token_ids) == 8
    check_equal(outputs[0], alone)
    check_equal(outputs[4], alone)
    witness("T16-nan", num_failed=2, num_whole=3)
    check_empty(llm._engine)


class Silent:
    """A tokenizer that raises at a chosen id; the rest is another's."""

    spelling = None

    def __init__(self, tokenizer: Any, token: int) -> None:
        self._tokenizer, self._token = tokenizer, token

    def decode(self, token_ids: Any, *arguments: Any) -> str:
        if self._token in list(token_ids):
            raise OverflowError("no such glyph")
        text: str = self._tokenizer.decode(token_ids, *arguments)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("stop", [(), ("never this",)], ids=["result", "stop-string"])
def test_T16_a_text_that_cannot_be_made_ends_its_own_request(
    stop: tuple[str, ...], make_llm: MakeLLM, make_async: MakeAsync
) -> None:
    """Its ids and scores are there, its error says why; the others, streams too, do not notice; nobody waits on."""
    params = settings(max_tokens=12, stop=stop)
    (whole, beside) = make_llm().generate([prompt(20), prompt(9)], params)
    ids = whole.outputs[0].token_ids
    token = next(token for token in ids[4:] if token not in ids[:4] and token not in beside.outputs[0].token_ids)
    count = ids.index(token) + 1 if stop else 12
    llm = make_llm()
    llm._engine.tokenizer = Silent(llm._engine.tokenizer, token)
    failed, other = llm.generate([prompt(20), prompt(9)], params)
    assert isinstance(failed.error, StepFailed) and "OverflowError: no such glyph" in str(failed.error)
    assert failed.outputs[0].finish_reason == "error" and failed.outputs[0].text == ""
    assert failed.outputs[0].token_ids == ids[:count] and len(failed.outputs[0].logprobs or ()) == count
    check_equal(other, beside)
    witness("T16-text", kept=count)

    async def main(llm: AsyncLLM) -> None:
        llm._engine.tokenizer = Silent(llm._engine.tokenizer, token)
        handles = [llm.submit(prompt(length), params) for length in (20, 9)]
        with contextlib.suppress(OverflowError):
            parts = [part async for part in handles[0]]
            assert parts[-1].outputs[0].finish_reason == "error"
        with contextlib.suppress(OverflowError):
            assert isinstance((await handles[0]).error, StepFailed)
        check_equal(await handles[1], beside)
        while (await llm.stats()).num_running:
            await asyncio.sleep(0.001)

    run_async(main(make_async()))


def test_a_dead_engine_says_so_to_every_later_call(make_llm: MakeLLM, make_async: MakeAsync) -> None:
    """Whatever is asked, and however often, with the first cause; what needs no engine still works."""
    llm = make_llm()
    Raising(llm._engine, lambda plan: True, SystemExit(3))
    with pytest.raises(EngineDead, match="SystemExit"):
        llm.generate([prompt(5)], settings())
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([[1]], settings()),
        lambda: llm.logprobs([[1, 2]]),
        lambda: llm.abort("A"),
        llm.abort,
        lambda: llm.checkpoint("A"),
        llm.pause,
        lambda: llm.suspend("recompute"),
        llm.resume,
        llm.reset,
        llm.reset_prefix_cache,
        lambda: llm.update_weights(None, epoch=3),
        llm.stats,
    ]
    for call in calls * 2:
        with pytest.raises(EngineDead, match="SystemExit"):
            call()
    assert llm.vocab_size == V and llm.describe()["page_size"] == 16
    llm.shutdown()
    with pytest.raises(EngineDead, match="SystemExit"):
        llm.stats()

    async def main(llm: AsyncLLM) -> None:
        Raising(llm._engine, lambda plan: True, SystemExit(3))
        handle = llm.submit(prompt(5), settings())
        with pytest.raises(EngineDead):
            await handle
        with pytest.raises(EngineDead):
            [part async for part in handle]
        for later in (lambda: llm.submit([1], settings()), handle.abort):
            with pytest.raises(EngineDead, match="SystemExit"):
                later()
        for asked in (handle.checkpoint, llm.stats, llm.pause, llm.resume, llm.reset_prefix_cache):
            with pytest.raises(EngineDead, match="SystemExit"):
                await asked()

    engine = AsyncLLM(str(llm._engine.resolved.model_path), num_pages=16)
    run_async(main(engine))
    engine.shutdown()
    witness("dead-engine", num_calls=2 * len(calls))


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


def test_a_prompts_key_says_what_it_holds(make_llm: MakeLLM) -> None:
    llm = make_llm()
    wrong: list[tuple[Any, str]] = [
        ({"prompt_token_ids": "abc"}, "prompt_token_ids='abc' is not a list of token ids"),
        ({"prompt_token_ids": 5}, "prompt_token_ids=5 is not a list of token ids"),
        ({"prompt_token_ids": b"a"}, "prompt_token_ids=b'a' is not a list of token ids"),
        ({"prompt": [1, 2]}, "prompt=[1, 2] is not text: ids stand under prompt_token_ids"),
        ({"prompt": 5}, "prompt=5 is not text"),
    ]
    for given, words in wrong:
        with pytest.raises(InvalidValue) as caught:
            llm.generate(given, settings())
        assert words in str(caught.value)
    none, good = llm.generate([None, "a"], settings())  # type: ignore[list-item]
    assert "prompt=None" in str(none.error) and good.error is None
    assert llm.stats().num_requests == 1, "one that is wrong came as far as the engine"


def raise_first(outputs: Any) -> None:
    if outputs[0].error is not None:
        raise outputs[0].error
