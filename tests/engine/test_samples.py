"""n > 1 through the real engine: T46, streams of each sample, an abort, and the shared prompt's pages."""

from __future__ import annotations

import asyncio
from itertools import combinations
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import InvalidValue, RequestOutput, SamplingParams
from perdure.api.output import CompletionOutput
from tests.engine.conftest import MakeAsync, MakeLLM
from tests.engine.helpers import check_equal, check_sample_equal, prompt, run_async
from tests.witness import witness

PROMPT = prompt(40)
DRAWN = SamplingParams(n=4, seed=42, max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=1)
SHARES_NOTHING: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "steps_in_flight": 1}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [16, 17, 40])
def test_T46_samples_share_a_prompt_and_nothing_shows(length: int, depth: int, make_llm: MakeLLM) -> None:
    """Pairwise different, the same twice, in a crowd and one by one; the first is what n=1 gives; all bit for bit."""
    ids = prompt(length)
    alone = make_llm(**SHARES_NOTHING).generate([ids], replace(DRAWN, n=8))[0]
    llm = make_llm(steps_in_flight=depth, page_size=16, enable_prefix_caching=False, check_integrity=True)
    runner, copies = llm._engine.resolved.runner, []
    execute = runner.execute
    runner.execute = lambda plan: (copies.extend(plan.copy_length), execute(plan))[1]  # type: ignore[method-assign]
    (one,) = llm.generate([ids], replace(DRAWN, n=8))
    assert copies == [(length - 1) % 16] * 7 * (length != 17)  # 16 positions of 17 are a whole page
    two = llm.generate([prompt(9), ids, prompt(30)], replace(DRAWN, n=8))[1]
    for result in (one, two):
        check_equal(result, alone)
        assert [sample.index for sample in result.outputs] == [*range(8)] and result.exact
    assert all(a.token_ids != b.token_ids for a, b in combinations(one.outputs, 2))
    single = llm.generate([ids] * 4, replace(DRAWN, n=1))
    for result in single:
        check_sample_equal(result.outputs[0], one.outputs[0])
    assert one.metrics is not None and one.metrics.finished_time == one.metrics.events[-1].time
    witness("T46-engine", depth=depth, num_samples=len(one.outputs), num_events=len(one.metrics.events))


@pytest.mark.parametrize("length", [3, 40])
@pytest.mark.parametrize("caches", [True, False])
def test_samples_of_one_token_do_not_wait_for_each_other(length: int, caches: bool, make_llm: MakeLLM) -> None:
    """Each ends with the prompt, so that none is there to begin from: after the first they compute it side by side."""
    params = replace(DRAWN, n=100, max_tokens=1)
    (alone,) = make_llm(**SHARES_NOTHING).generate([prompt(length)], params)
    llm = make_llm(max_num_seqs=16, max_num_batched_tokens=1024, enable_prefix_caching=caches, check_integrity=True)
    (result,) = llm.generate([prompt(length)], params)
    check_equal(result, alone)
    num_steps = llm.stats().num_steps
    assert num_steps <= 1 + -(-99 // 16) + 1
    witness("samples-of-one-token", samples=len(result.outputs), num_steps=num_steps)


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
@pytest.mark.parametrize("depth", [1, 3])
def test_T46_streams_of_each_sample(kind: Any, depth: int, make_llm: MakeLLM, make_async: MakeAsync) -> None:
    """Each has its index and one last part; joined they are the result, which has them all."""
    (alone,) = make_llm(**SHARES_NOTHING).generate([PROMPT], DRAWN)

    async def main() -> None:
        llm = make_async(steps_in_flight=depth)
        handle = llm.submit(PROMPT, replace(DRAWN, output_kind=kind))
        parts: list[RequestOutput] = [part async for part in handle]
        result = await handle
        check_equal(result, alone)
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(part.prompt_logprobs is None for part in parts[:-1]) and parts[-1].prompt_logprobs is not None
        if kind == "final":
            assert len(parts) == 1 and parts[0] is result
            return
        assert all(len(part.outputs) == 1 for part in parts)
        for final in result.outputs:
            own: list[CompletionOutput] = [p.outputs[0] for p in parts if p.outputs[0].index == final.index]
            assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + ["length"]
            if kind == "cumulative":
                check_sample_equal(own[-1], final)
            else:
                assert sum((one.token_ids for one in own), []) == final.token_ids  # noqa: RUF017
                assert "".join(one.text for one in own) == final.text

    run_async(main())


def test_T03_an_abort_ends_every_sample_with_what_it_has(make_llm: MakeLLM, make_async: MakeAsync) -> None:
    (alone,) = make_llm(**SHARES_NOTHING).generate([PROMPT], replace(DRAWN, max_tokens=60))

    async def main() -> None:
        llm = make_async(max_num_seqs=3)
        handle = llm.submit(PROMPT, replace(DRAWN, max_tokens=60))
        async for part in handle:
            if not part.outputs[0].index and part.outputs[0].token_ids and not part.finished:
                handle.abort()
        result = await handle
        assert [one.finish_reason for one in result.outputs] == ["abort"] * 4
        for one, whole in zip(result.outputs, alone.outputs, strict=True):
            check_sample_equal(one, whole, len(one.token_ids))
        assert result.outputs[0].token_ids and not result.outputs[3].token_ids
        stats = await llm.stats()
        assert stats.num_free_pages == stats.num_pages and stats.num_waiting == stats.num_running == 0
        witness("T03-samples", num_tokens=[len(one.token_ids) + 1 for one in result.outputs])
        await asyncio.sleep(0)

    run_async(main())


def test_a_refused_request_has_as_many_outputs_as_it_asked(make_llm: MakeLLM) -> None:
    refused, fine = make_llm().generate([[-1], PROMPT], replace(DRAWN, n=3))
    assert isinstance(refused.error, InvalidValue) and [one.index for one in refused.outputs] == [0, 1, 2]
    assert all(one.finish_reason == "error" and one.token_ids == [] for one in refused.outputs)
    assert fine.error is None and len(fine.outputs) == 3


def test_functions_of_the_caller_see_each_sample_s_own_history(make_llm: MakeLLM) -> None:
    seen: list[list[int]] = []

    def look(output_ids: list[int], logits: Any) -> Any:
        seen.append(list(output_ids))
        return logits

    (result,) = make_llm().generate([PROMPT], replace(DRAWN, logits_processors=(look,), max_tokens=5))
    expected = [one.token_ids[:count] for one in result.outputs for count in range(5)]
    assert sorted(seen) == sorted(expected)
