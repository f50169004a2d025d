"""T01 to T09 through the faces: `LLM` from threads, `AsyncLLM` through handles."""

from __future__ import annotations

import asyncio
import random
from itertools import accumulate
from typing import Any

import pytest

from perdure import AsyncLLM, InvalidValue
from perdure.api.command import PauseMode
from perdure.api.output import RequestOutput
from perdure.api.request import RequestId
from perdure.engine.async_llm import Handle
from tests.engine.conftest import MakeAsync, MakeLLM, Solo
from tests.engine.helpers import (
    Brake,
    check_equal,
    check_reference,
    in_thread,
    pressure,
    prompt,
    run_async,
    settings,
)
from tests.engine.reference import Reference
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
A = [5, 6, 7, 8]


def ids_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


async def held(brake: Brake) -> None:
    await asyncio.get_running_loop().run_in_executor(None, brake.wait_until_held)


async def parts_until(handle: Handle, num_tokens: int) -> list[RequestOutput]:
    """The parts with the first so many tokens."""
    parts: list[RequestOutput] = []
    async for part in handle:
        parts.append(part)
        if sum(len(ids_of(one)) for one in parts) >= num_tokens:
            break
    return parts


@pytest.mark.parametrize("request_id", [7, "7"])
@pytest.mark.parametrize("where", ["running", "queued", "paused", "preempted"])
def test_T01_a_live_id_is_refused_wherever_its_request_is(
    where: str, request_id: RequestId, make_async: MakeAsync, reference: Reference
) -> None:
    """The error names the id, nothing is made for the twin, A gives its 32 ids, and then the id is free."""

    async def main() -> None:
        pool = {"num_pages": 4, "paused_pages": 0} if where == "preempted" else {}
        llm = make_async(max_num_seqs=1 if where == "queued" else 8, **pool)
        brake = Brake(llm._engine)
        brake.hold(after=10)
        others = []
        if where in ("queued", "preempted"):
            others.append((prompt(17), llm.submit(prompt(17), settings(max_tokens=30))))
        first = llm.submit(A, settings(max_tokens=32), request_id=request_id)
        await held(brake)
        if where == "preempted":  # its second page, at 12 tokens, is the fifth of all
            brake.hold(after=14)
            await held(brake)
        if where == "paused":
            pausing = asyncio.ensure_future(llm.pause())
            await asyncio.sleep(0)
            brake.release()
            await pausing
            before = await llm.stats()
            assert (before.state, before.num_running) == ("paused", 1)
        twin = llm.submit([9, 9], settings(), request_id=request_id)
        brake.release()
        with pytest.raises(InvalidValue, match=f"request_id={request_id!r} is live"):
            await twin
        if where == "paused":
            assert await llm.stats() == before
            await llm.resume()
        output = await first
        assert output.request_id == request_id and type(output.request_id) is type(request_id)
        assert len(ids_of(output)) == 32
        check_reference(output, A, reference)
        if where == "preempted":
            witness("T01", num_evictions=pressure(output)[0])
        for ids, other in others:
            check_reference(await other, ids, reference)
        again = await llm.generate([9, 9], settings(), request_id=request_id)
        check_reference(again, [9, 9], reference)
        assert (await llm.stats()).num_requests == len(others) + 2

    run_async(main())


@DEPTHS
def test_T02_an_id_is_free_in_the_turn_of_its_abort(depth: int, make_async: MakeAsync, reference: Reference) -> None:
    """200 times: after any number of steps abort "x" and submit "x" again in the same turn of the event loop."""

    async def main() -> None:
        rng = random.Random(2)
        llm = make_async(steps_in_flight=depth)
        brake = Brake(llm._engine)
        for index in range(200):
            brake.hold(after=rng.randint(1, 6))
            second_prompt = prompt(5, seed=index % 7)
            first = llm.submit(A, settings(max_tokens=None), request_id="x")
            await parts_until(first, rng.randint(0, 1))
            first.abort()
            second = llm.submit(second_prompt, settings(max_tokens=4), request_id="x")
            brake.release()
            one, two = await first, await second
            assert one.outputs[0].finish_reason == "abort" and len(ids_of(one)) <= 6
            check_reference(one, A, reference)
            assert (len(ids_of(two)), two.outputs[0].finish_reason) == (4, "length")
            check_reference(two, second_prompt, reference)

    run_async(main())


@DEPTHS
@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_T03_an_aborted_request_gives_what_it_has(
    kind: Any, depth: int, make_async: MakeAsync, reference: Reference, solo: Solo
) -> None:
    """One last part, reason abort, at least the 5 ids delivered, with the undisturbed run's scores, and their text."""
    params = settings(max_tokens=40, logprobs=3, prompt_logprobs=0, output_kind=kind)

    async def main() -> None:
        llm = make_async(steps_in_flight=depth)
        brake = Brake(llm._engine)
        brake.hold(after=5)
        handle = llm.submit(A, params)
        beside = llm.submit(prompt(9), settings(max_tokens=30))
        await held(brake)
        handle.abort()
        brake.release()
        parts = [part async for part in handle]
        output = await handle
        completion = output.outputs[0]
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        assert completion.finish_reason == parts[-1].outputs[0].finish_reason == "abort"
        assert len(completion.token_ids) >= 5
        assert llm.tokenizer is not None and completion.text == llm.tokenizer.decode(completion.token_ids)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(A)
        check_reference(output, A, reference)
        check_equal(output, solo(A, params), len(completion.token_ids))
        check_parts(kind, parts, output)
        check_reference(await beside, prompt(9), reference)

    run_async(main())


def check_parts(kind: str, parts: list[RequestOutput], output: RequestOutput) -> None:
    """Parts, put together as their kind says, are the result; in each, ids and scores have one length."""
    final, pieces = output.outputs[0], [part.outputs[0] for part in parts]
    for piece in pieces:
        assert piece.logprobs is not None and len(piece.logprobs) == len(piece.token_ids)
    if kind == "delta":
        assert len(parts) >= 5
        assert [token for piece in pieces for token in piece.token_ids] == final.token_ids
        assert [entry for piece in pieces for entry in piece.logprobs or ()] == list(final.logprobs or ())
        assert "".join(piece.text for piece in pieces) == final.text
    elif kind == "cumulative":
        assert len(parts) >= 5 and parts[-1] == output
        for piece in pieces:
            assert final.token_ids[: len(piece.token_ids)] == piece.token_ids and final.text.startswith(piece.text)
        lengths = [len(piece.token_ids) for piece in pieces]
        assert lengths == list(accumulate(lengths, max)), "a cumulative part went back"
    else:
        assert parts == [output]


def test_T04_an_aborted_queued_request_was_never_computed(make_llm: MakeLLM, reference: Reference) -> None:
    """Zero ids, scores present and empty, and no token of it in any forward: each step holds one row, A's."""
    llm = make_llm(max_num_seqs=1)
    brake = Brake(llm._engine)
    brake.hold(after=4)
    call = in_thread(lambda: llm.generate([A, prompt(20)], settings(max_tokens=12), request_ids=["A", "B"]))
    brake.wait_until_held()
    llm.abort("B")
    brake.release()
    first, second = call()
    check_reference(first, A, reference)
    completion = second.outputs[0]
    assert (completion.token_ids, completion.finish_reason, completion.text) == ([], "abort", "")
    assert completion.logprobs is not None and len(completion.logprobs) == 0
    stats = llm.stats()
    assert (stats.num_steps, stats.num_prompt_tokens) == (12, len(A))


@DEPTHS
def test_T05_an_aborted_preempted_request_keeps_its_six_tokens(
    depth: int, make_llm: MakeLLM, reference: Reference
) -> None:
    """B lacks a page when it has 6 tokens, is evicted, and aborted while it waits for A's pages."""
    llm = make_llm(num_pages=4, paused_pages=0, steps_in_flight=depth)
    prompts = [prompt(33), prompt(11)]
    brake = Brake(llm._engine)
    brake.hold(after=11)
    call = in_thread(lambda: llm.generate(prompts, settings(max_tokens=15), request_ids=["A", "B"]))
    brake.wait_until_held()
    llm.abort("B")
    brake.release()
    first, second = call()
    witness("T05", num_evictions=pressure(second)[0])
    assert (len(ids_of(second)), second.outputs[0].finish_reason) == (6, "abort")
    for output, ids in zip((first, second), prompts):
        check_reference(output, ids, reference)


@DEPTHS
def test_T06_an_abort_in_the_last_step(depth: int, make_async: MakeAsync, reference: Reference) -> None:
    """The abort comes while the step runs that would end B by length: one end, by the abort."""

    async def main() -> None:
        llm = make_async(steps_in_flight=depth)
        brake = Brake(llm._engine)
        brake.hold(after=5)
        handle = llm.submit(A, settings(max_tokens=6))
        await held(brake)
        handle.abort()
        handle.abort()
        brake.release()
        parts = [part async for part in handle]
        assert sum(part.finished for part in parts) == 1
        output = await handle
        assert (len(ids_of(output)), output.outputs[0].finish_reason) == (5, "abort")
        check_reference(output, A, reference)

    run_async(main())


def test_T07_aborts_of_what_is_not_there_do_nothing(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm()
    llm.generate([A], settings(), request_ids="done")
    brake = Brake(llm._engine)
    brake.hold(after=3)
    call = in_thread(lambda: llm.generate([A, prompt(7)], settings(), request_ids=["abc", "gone"]))
    brake.wait_until_held()
    strangers: list[RequestId | list[RequestId]] = ["", "unknown", "done", "ab", ["ABC", 0, -1], []]
    for ids in (*strangers, "gone", ["gone", "gone"]):
        llm.abort(ids)
    brake.release()
    kept, gone = call()
    llm.abort()
    check_reference(kept, A, reference)
    assert kept.outputs[0].finish_reason == "length" and gone.outputs[0].finish_reason == "abort"


@DEPTHS
def test_T08_abort_all(depth: int, make_llm: MakeLLM, reference: Reference) -> None:
    """8 running and 8 waiting: 16 ends, queued ones without tokens, and the next call works as it is."""
    llm = make_llm(max_num_seqs=8, steps_in_flight=depth)
    prompts = [prompt(6, seed) for seed in range(16)]
    brake = Brake(llm._engine)
    brake.hold(after=4)
    call = in_thread(lambda: llm.generate(prompts, settings(max_tokens=None)))
    brake.wait_until_held()
    llm.abort()
    brake.release()
    outputs = call()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 16
    assert [len(ids_of(output)) for output in outputs] == [4] * 8 + [0] * 8
    for output, ids in zip(outputs, prompts):
        check_reference(output, ids, reference)
    (after,) = llm.generate([A], settings())
    check_reference(after, A, reference)


@DEPTHS
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("budget", [512, 16])
def test_T09_pause_and_resume_are_invisible(
    budget: int, mode: PauseMode, depth: int, make_async: MakeAsync, reference: Reference, solo: Solo
) -> None:
    """2 greedy and 2 seeded requests, one with a long prompt, are paused after 4 steps; a fifth comes meanwhile.

    With the small budget the pause falls into the chunked prefill of the long one.
    """
    prompts = [A, prompt(100), prompt(30), prompt(17), [9, 8, 7]]
    params = [settings(max_tokens=24, prompt_logprobs=0, logprobs=2)] * 2
    params += [settings(max_tokens=24, temperature=1.0, seed=seed) for seed in (1, 2)]
    params += [settings()]

    async def main() -> None:
        llm = make_async(steps_in_flight=depth, max_num_batched_tokens=budget)
        brake = Brake(llm._engine)
        brake.hold(after=4)
        handles = [llm.submit(*one) for one in zip(prompts[:4], params)]
        await held(brake)
        pausing = asyncio.ensure_future(llm.pause(mode))
        await asyncio.sleep(0)
        brake.release()
        await pausing
        fifth = llm.submit(prompts[4], params[4])
        await check_stands_still(llm, [*handles, fifth])
        before = await llm.stats()
        assert (before.state, before.num_waiting) == ("paused", 1 if mode != "keep" or budget == 512 else 3)
        await llm.resume()
        outputs = [await handle for handle in [*handles, fifth]]
        if mode == "abort":
            assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 4 + ["length"]
        for output, one in zip(outputs, zip(prompts, params)):
            check_equal(output, solo(*one), len(ids_of(output)) if mode == "abort" else None)
        for index in (0, 1, 4):
            check_reference(outputs[index], prompts[index], reference)
        if mode == "keep":
            witness("T09", num_kept=before.num_running, pages_kept=before.num_pages - before.num_free_pages)

    run_async(main())


async def check_stands_still(llm: AsyncLLM, handles: list[Handle]) -> None:
    """Between the answer to a pause and the resume no step is planned and no part arrives."""
    await asyncio.sleep(0)
    before = [handle._parts.qsize() for handle in handles], (await llm.stats()).num_steps
    await asyncio.sleep(0.02)
    assert ([handle._parts.qsize() for handle in handles], (await llm.stats()).num_steps) == before
