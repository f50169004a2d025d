"""Forced continuations and listed ids on M: scores of given tokens as if they had been drawn, and of given ids."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from perdure import InvalidValue, MaxSequenceLengthOverflow, SamplingParams
from perdure.api.output import CompletionOutput, RequestOutput
from perdure.engine.async_llm import Handle
from perdure.models.tiny import EOS_ID
from tests.engine.conftest import MakeAsync, MakeLLM, Solo
from tests.engine.helpers import (
    L,
    V,
    check_equal,
    check_reference,
    check_scores_equal,
    pressure,
    prompt,
    run_async,
    settings,
    whole_rows,
)
from tests.engine.reference import Reference
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])
GIVEN = [9, EOS_ID, 40, 41, 300, 9, 9, 77]


@DEPTHS
@pytest.mark.parametrize("budget", [512, 7])
def test_a_forced_continuation_has_the_scores_of_the_same_ids_in_a_prompt(
    budget: int, depth: int, make_llm: MakeLLM, solo: Solo
) -> None:
    """Bit for bit, whatever the depth, chunks and evictions; the ids are those given, the model's end id among them."""
    llm = make_llm(steps_in_flight=depth, max_num_batched_tokens=budget, num_pages=7, paused_pages=0)
    long = prompt(60, 5)
    params = [settings(max_tokens=50), SamplingParams(forced_token_ids=long, logprobs=3, temperature=0.7, seed=3)]
    beside, forced = llm.generate([prompt(40), prompt(20)], params)
    output = forced.outputs[0]
    assert output.token_ids == long and output.finish_reason == "length"
    (scored,) = llm.generate([prompt(20) + long], settings(max_tokens=0, prompt_logprobs=3))
    assert scored.prompt_logprobs is not None
    check_scores_equal(output.logprobs, scored.prompt_logprobs.cut(19, 79))
    (tail,) = llm.logprobs([prompt(20)], [long])
    assert tail.outputs[0].selected_logprobs == output.selected_logprobs
    check_equal(beside, solo(prompt(40), params[0]))
    witness("forced", num_evictions=pressure(forced)[0] + pressure(beside)[0])


@DEPTHS
def test_generation_goes_on_after_a_forced_continuation(
    depth: int, make_llm: MakeLLM, solo: Solo, reference: Reference
) -> None:
    """As after a prompt that ends with it; stops inside it are ignored, those after it count."""
    llm, ids = make_llm(steps_in_flight=depth), prompt(20)
    plain = llm.generate([ids + GIVEN], settings(max_tokens=10))[0]
    check_reference(plain, ids + GIVEN, reference)
    going_on = plain.outputs[0].token_ids
    stop = going_on[4]
    assert stop not in going_on[:4]
    asked = {"forced_token_ids": GIVEN, "stop_token_ids": [GIVEN[2], stop], "stop_token_sequences": [GIVEN[3:5]]}
    (output,) = llm.generate([ids], settings(max_tokens=20, ignore_eos=False, **asked))
    assert output.outputs[0].token_ids == GIVEN + going_on[:5]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    check_equal(output, solo(ids, settings(max_tokens=20, ignore_eos=False, **asked)))


def test_processed_scores_of_a_forced_continuation(make_llm: MakeLLM) -> None:
    """Of what would have been drawn from: an id that could not be drawn has -inf, and penalties count it too."""
    llm, ids = make_llm(), prompt(12)
    asked: dict[str, Any] = {"temperature": 1.0, "logprobs_mode": "processed", "logprobs": -1, "frequency_penalty": 1.5}
    (output,) = llm.generate([ids], settings(forced_token_ids=GIVEN, bad_words=[[40]], max_tokens=8, **asked))
    scores = output.outputs[0].selected_logprobs
    assert output.outputs[0].token_ids == GIVEN and scores is not None
    assert [value == -np.inf for value in scores] == [token == 40 for token in GIVEN]
    raw = whole_rows(llm.generate([ids + GIVEN], settings(prompt_logprobs=-1, max_tokens=0))[0].prompt_logprobs)
    row = raw[len(ids) + 5].clone()  # the logits before GIVEN[6], whose 9 came twice
    for token, count in {9: 2, EOS_ID: 1, 41: 1, 300: 1, 40: 1}.items():
        row[token] -= 1.5 * count
    row[40] = -np.inf
    assert abs(scores[6] - row.log_softmax(0)[9].item()) < 1e-4


def test_a_forced_continuation_that_does_not_fit_is_refused(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(MaxSequenceLengthOverflow, match=r"forced_token_ids holds 30 ids, .* room for 16 of 256"):
        llm.generate(prompt(L - 16), settings(max_tokens=None, forced_token_ids=[5] * 30))
    with pytest.raises(InvalidValue, match="forced_token_ids holds 3 ids, more than max_tokens=2"):
        SamplingParams(forced_token_ids=[1, 2, 3], max_tokens=2)
    (nothing,) = llm.generate([prompt(L)], SamplingParams(forced_token_ids=[], prompt_logprobs=0))
    assert nothing.outputs[0].token_ids == [] and nothing.outputs[0].finish_reason == "length"
    assert nothing.prompt_logprobs is not None and len(nothing.prompt_logprobs) == L


# logprob_token_ids


@DEPTHS
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_listed_ids_are_scored_at_each_position(
    mode: str, logprobs: int | None, depth: int, make_llm: MakeLLM, solo: Solo
) -> None:
    """Their scores and ranks are those of the whole vocabulary's, to the bit; flat, and in the dictionaries."""
    llm, ids, listed = make_llm(steps_in_flight=depth), prompt(15), [500, 3, 77, 3]
    asked: dict[str, Any] = {"temperature": 1.2, "top_k": 50, "seed": 8, "logprobs_mode": mode}
    one = settings(**asked, logprobs=logprobs, logprob_token_ids=listed)
    found, whole, plain = llm.generate([ids] * 3, [one, settings(**asked, logprobs=-1), settings(**asked)])
    scores = found.outputs[0].logprobs
    assert scores is not None and scores.listed_ids == tuple(listed)
    rows = whole_rows(whole.outputs[0].logprobs).numpy()
    assert np.array_equal(np.array(scores.listed_scores, np.float32).reshape(-1, 4), rows[:, listed])
    for index, entry in enumerate(scores):
        truth = whole.outputs[0].logprobs
        assert entry is not None and truth is not None and truth[index] is not None
        assert {*listed, scores.token_ids[index]} <= {*entry}
        assert all(one == truth[index][id_] for id_, one in entry.items())  # type: ignore[index]
        assert len(entry) <= (logprobs or 0) + 4
    assert plain.outputs[0].logprobs is not None and plain.outputs[0].logprobs.chosen == scores.chosen
    check_equal(found, solo(ids, one))


# T39


def check_lengths(output: CompletionOutput, asked: SamplingParams) -> None:
    """Ids, chosen scores and rows are as many; the chosen score is its entry's in its row of the best."""
    scores = output.logprobs
    assert (scores is not None) == asked.asks_scores
    if scores is None:
        return
    width = len(asked.logprob_token_ids or ())
    assert len(output.token_ids) == len(scores) == len(scores.chosen) == len(scores.num_top) == len(scores.rank)
    assert len(scores.listed_scores) == len(scores.listed_ranks) == width * len(scores)
    assert scores.token_ids.tolist() == output.token_ids
    best = V if asked.logprobs == -1 else asked.logprobs or 0
    assert {*scores.num_top} <= {best}
    for token, entry, chosen in zip(output.token_ids, scores, scores.chosen):
        assert entry is not None and entry[token].logprob == chosen


def random_params(rng: random.Random, likely: list[int]) -> SamplingParams:
    def some(most: int) -> list[int]:
        return rng.choices(likely, k=rng.randint(1, most))

    return SamplingParams(
        max_tokens=rng.randint(1, 40),
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(100),
        top_k=rng.choice((0, 8)),
        logprobs=rng.choice((None, 0, 1, 5, -1)),
        prompt_logprobs=rng.choice((None, None, 1)),
        logprob_token_ids=rng.choice((None, None, [4, 9])),
        logprobs_mode=rng.choice(("raw", "processed")),
        stop_token_ids=some(2) if rng.random() < 0.4 else [],
        stop_token_sequences=[some(3), some(2)] if rng.random() < 0.6 else [],
        stop=rng.choice(([], [], ["e"], ["th", "in"])),
        strip_stop_tokens=rng.random() < 0.5,
        repetition_penalty=rng.choice((1.0, 1.2)),
        forced_token_ids=None,
        output_kind=rng.choice(("delta", "delta", "cumulative", "final")),
        stream_interval=rng.choice((1, 3)),
    )


async def follow(handle: Handle, params: SamplingParams, abort_after: int | None = None) -> RequestOutput:
    """Its parts as they come: each has as many ids as scores and rows, and so has all that came so far; joined they are
    the result."""
    ids: list[int] = []
    chosen: list[float] = []
    top: list[int] = []
    text = ""
    async for part in handle:
        one = part.outputs[0]
        check_lengths(one, params)
        if params.output_kind != "delta":
            assert one.token_ids[: len(ids)] == ids and one.text.startswith(text)
            ids, chosen, top, text = [], [], [], ""
        ids += one.token_ids
        text += one.text
        if one.logprobs is not None:
            chosen += one.logprobs.chosen
            top += one.logprobs.top_ids
        if abort_after is not None and len(ids) > abort_after:
            handle.abort()
    result = await handle
    final = result.outputs[0]
    check_lengths(final, params)
    assert (ids, text) == (final.token_ids, final.text)
    if final.logprobs is not None:
        assert chosen == final.logprobs.chosen.tolist() and top == final.logprobs.top_ids.tolist()
        assert list(accumulate(final.logprobs.num_top, initial=0))[:-1] == final.logprobs.top_first.tolist()
    return result


@pytest.mark.parametrize("depth", [1, 2])
def test_T39_lengths_always_agree(depth: int, make_async: MakeAsync) -> None:
    """Random stops kept and stripped, evictions, aborts, intervals, kinds of parts, all at once."""

    async def main() -> None:
        llm = make_async(steps_in_flight=depth, num_pages=12, paused_pages=2, max_num_batched_tokens=40)
        rng = random.Random(depth)
        seen = (await llm.submit(prompt(20), settings(max_tokens=60))).outputs[0].token_ids
        calls = []
        for index in range(60):
            params = random_params(rng, seen)
            handle = llm.submit(prompt(rng.randint(1, 30), index), params)
            calls.append(follow(handle, params, abort_after=3 if index % 9 == 4 else None))
        results = await asyncio.gather(*calls)
        reasons = Counter(str(result.outputs[0].finish_reason) for result in results)
        assert {*reasons} == {"stop", "length", "abort"}
        witness("T39", **reasons, num_evictions=sum(pressure(result)[0] for result in results))

    run_async(main())


@pytest.mark.parametrize("depth", [1, 2])
def test_T39_lengths_agree_over_interruptions(depth: int, make_async: MakeAsync, soak_factor: int) -> None:
    """Random settings of a handful of requests, while the engine is paused, suspended in every way, its cache and its
    epoch changed, and some go on from a checkpoint: as above, for what was streamed before and after."""
    llm = make_async(steps_in_flight=depth, num_pages=6, paused_pages=0, max_num_batched_tokens=40)
    seen = prompt(40, 3)
    count: Counter[str] = Counter()

    async def interrupted(handles: list[tuple[Handle, SamplingParams]], rng: random.Random) -> list[RequestOutput]:
        results = []
        for _ in range(rng.randint(1, 6)):
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.004)))
            kind = rng.choice(("pause", "suspend", "suspend", "clear", "epoch", "checkpoint", "checkpoint"))
            count[kind] += 1
            if kind == "pause":
                await llm.pause()
                await llm.resume()
            elif kind == "suspend":
                await llm.suspend(rng.choice(("persist", "offload", "recompute")))
                await llm.resume()
            elif kind == "clear":
                await llm.reset_prefix_cache()
            elif kind == "epoch":
                count["epochs"] += 1
                await llm.update_weights(None, epoch=10 + count["epochs"])
            else:
                handle, params = rng.choice(handles)
                with contextlib.suppress(InvalidValue):  # it has ended
                    begun = await handle.checkpoint(end=True)
                    count["went on"] += 1
                    results.append(await follow(llm.submit(begun), params))
        return results

    @examples(max_examples=12 * soak_factor)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng = random.Random(seed)

        async def main() -> None:
            handles = []
            for index in range(6):
                params = random_params(rng, seen)
                handles.append((llm.submit(prompt(rng.randint(1, 30), index), params), params))
            followed = [follow(handle, params, rng.choice((None, None, 3))) for handle, params in handles]
            *results, more = await asyncio.gather(*followed, interrupted(handles, rng))
            for result in [*results, *more]:
                count[str(result.outputs[0].finish_reason)] += 1
                count["evictions"] += pressure(result)[0]

        run_async(main())

    check()
    witness("T39", **{name.replace(" ", "_"): value for name, value in sorted(count.items())})


def test_streamed_rows_are_held_back_with_their_tokens(make_async: MakeAsync) -> None:
    """What may still become a stop that is stripped is held, its ids with their scores and rows; what cannot is not."""

    async def main() -> None:
        llm, ids = make_async(steps_in_flight=1), prompt(20)
        distinct = {"repetition_penalty": 3.0, "frequency_penalty": 2.0, "max_tokens": 12}
        free = (await llm.submit(ids, settings(**distinct))).outputs[0].token_ids
        assert len({*free}) == 12
        never, begun = [free[4], free[5], V - 1], [free[8], free[9], free[10]]
        asked = settings(
            **distinct, logprobs=2, strip_stop_tokens=True, stop_token_sequences=[never, begun], output_kind="delta"
        )
        parts = [part.outputs[0] async for part in llm.submit(ids, asked)]
        for part in parts:
            check_lengths(part, asked)
        assert [len(part.token_ids) for part in parts] == [1, 1, 1, 1, 3, 1, 0]
        assert [token for part in parts for token in part.token_ids] == free[:8]

    run_async(main())
