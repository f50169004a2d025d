"""T01 to T04, T07 and T08 through the coordinator: names, aborts, and what they leave alone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from perdure import LLM, AsyncLLM, InvalidValue
from perdure.api.output import RequestOutput
from tests.coordinator.conftest import MakeFleet
from tests.coordinator.fleet import PATIENCE_S, Fleet
from tests.engine.helpers import check_equal, prompt, settings
from tests.witness import witness


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    return make_fleet(steps_in_flight=2)


@pytest.fixture
def client(fleet: Fleet) -> AsyncLLM:
    return fleet.connect()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


@pytest.mark.parametrize("name", [7, "7"])
def test_t01_duplicate_live_id(name: int | str, client: AsyncLLM, direct: LLM) -> None:
    async def body() -> None:
        one = client.submit([5, 6, 7, 8], settings(max_tokens=240), request_id=name)
        with pytest.raises(InvalidValue, match=f"request_id={name!r} is live"):
            await client.submit([9, 9], settings(), request_id=name)
        check_equal(await one, direct.generate([[5, 6, 7, 8]], settings(max_tokens=240))[0])
        again = await client.submit([9, 9], settings(max_tokens=2), request_id=name)
        check_equal(again, direct.generate([[9, 9]], settings(max_tokens=2))[0])

    run(body())
    witness("T01-routed", name=repr(name))


def test_t02_id_reused_straight_after_abort(client: AsyncLLM, direct: LLM) -> None:
    """200 times, each after another number of parts: the abort and the next submission are one turn of the loop."""
    (other,) = direct.generate([prompt(7)], settings(max_tokens=4))
    (whole,) = direct.generate([prompt(5)], settings(max_tokens=200))
    num_aborted = 0

    async def body() -> None:
        nonlocal num_aborted
        for turn in range(200):
            first = client.submit(prompt(5), settings(max_tokens=200), request_id="x")
            parts = aiter(first)
            for _ in range(turn % 4):
                await anext(parts)
            first.abort()
            second = client.submit(prompt(7), settings(max_tokens=4), request_id="x")
            found = (await first).outputs[0]
            num_aborted += found.finish_reason == "abort"
            assert found.token_ids == whole.outputs[0].token_ids[: len(found.token_ids)]
            check_equal(await second, other)

    run(body())
    assert num_aborted > 150, "most were still on their way"
    witness("T02-routed", turns=200, aborted=num_aborted)


def test_t03_abort_gives_the_partial_result(client: AsyncLLM, direct: LLM) -> None:
    params = settings(max_tokens=200, n=2, temperature=1.0, seed=5)

    async def body() -> RequestOutput:
        handle = client.submit(prompt(9), params)
        parts: list[RequestOutput] = []
        async for part in handle:
            parts.append(part)
            if len(parts) == 5:
                handle.abort()
        assert sum(part.finished for part in parts) == 1
        return await handle

    result = asyncio.run(asyncio.wait_for(body(), PATIENCE_S))
    (alone,) = direct.generate([prompt(9)], params)
    for one, two in zip(result.outputs, alone.outputs, strict=True):
        count = len(one.token_ids)
        assert one.token_ids == two.token_ids[:count] and one.finish_reason == ("abort" if count < 200 else "length")
        assert one.logprobs is not None and two.logprobs is not None and one.logprobs == two.logprobs.cut(0, count)
    witness("T03-routed", tokens=[len(one.token_ids) for one in result.outputs])


def test_t04_abort_of_a_queued_request(make_fleet: MakeFleet, direct: LLM) -> None:
    """One runs, one waits and is aborted: no forward has its tokens."""
    fleet = make_fleet(num_replicas=1, max_num_seqs=1)

    async def body() -> None:
        client = await asyncio.to_thread(fleet.connect)
        await client.pause()
        running = client.submit(prompt(5), settings(max_tokens=60))
        queued = client.submit(prompt(6), settings(prompt_logprobs=0))
        await client.resume()
        queued.abort()
        result = await queued
        assert result.outputs[0].finish_reason == "abort" and result.outputs[0].token_ids == []
        assert result.outputs[0].logprobs is not None and len(result.outputs[0].logprobs) == 0
        check_equal(await running, direct.generate([prompt(5)], settings(max_tokens=60))[0])
        stats = await client.stats()
        assert stats.num_prompt_tokens == 5, "no forward held the aborted one's tokens"
        witness("T04-routed", steps=stats.num_steps)

    run(body())


def test_t07_harmless_aborts(client: AsyncLLM, direct: LLM) -> None:
    async def body() -> None:
        handle = client.submit(prompt(8), settings(max_tokens=200), request_id="abc")
        for name in ("", "unknown", "ab", "ab", 7):
            await client.abort(name)
        check_equal(await handle, direct.generate([prompt(8)], settings(max_tokens=200))[0])
        handle.abort()
        await client.abort("abc")
        witness("T07-routed", tokens=len((await handle).outputs[0].token_ids))

    run(body())


def test_t08_abort_all(fleet: Fleet, client: AsyncLLM, direct: LLM) -> None:
    """Of one client, queued and running: another's go on. The engine serves on without any resume."""

    async def body() -> None:
        other = await asyncio.to_thread(fleet.connect)
        await other.pause()
        theirs = other.submit(prompt(8), settings(max_tokens=40), request_id=0)
        handles = [client.submit(prompt(6, seed=at), settings(max_tokens=200), request_id=at) for at in range(16)]
        await asyncio.gather(other.resume(), client.abort())
        results = [(await handle).outputs[0] for handle in handles]
        assert [one.finish_reason for one in results] == ["abort"] * 16
        check_equal(await theirs, direct.generate([prompt(8)], settings(max_tokens=40))[0])
        again = await client.submit(prompt(8), settings(max_tokens=3))
        check_equal(again, direct.generate([prompt(8)], settings(max_tokens=3))[0])
        witness("T08-routed", aborted=len(results))

    run(body())
