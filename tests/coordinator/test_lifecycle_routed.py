"""T01 to T08 through the coordinator: names, aborts, and what they leave alone."""

from __future__ import annotations

import asyncio

import pytest

from perdure import LLM, InvalidValue
from perdure.api.output import RequestOutput
from tests.coordinator.conftest import MakeFleet
from tests.engine.helpers import check_equal, prompt, settings
from tests.witness import witness

pytestmark = pytest.mark.skip(reason="not yet shown to hold: replicas in processes of their own, on a quiet machine")


def test_t01_t02_t03_t07_t08_routed(make_fleet: MakeFleet, direct: LLM) -> None:
    fleet = make_fleet(max_num_seqs=8)
    asyncio.run(t01_duplicate_live_id(fleet, direct))
    asyncio.run(t02_id_reused_straight_after_abort(fleet, direct))
    asyncio.run(t03_abort_gives_the_partial_result(fleet, direct))
    asyncio.run(t07_harmless_aborts(fleet, direct))
    asyncio.run(t08_abort_all(fleet, direct))


def test_t04_routed(make_fleet: MakeFleet, direct: LLM) -> None:
    fleet = make_fleet(num_replicas=1, max_num_seqs=1)
    asyncio.run(t04_abort_of_a_queued_request(fleet, direct))


async def t01_duplicate_live_id(fleet, direct) -> None:  # type: ignore[no-untyped-def]
    client = await asyncio.to_thread(fleet.connect)
    for name in (7, "7"):
        one = client.submit([5, 6, 7, 8], settings(max_tokens=32), request_id=name)
        async for _ in one:
            break
        with pytest.raises(InvalidValue, match=f"request_id={name!r} is live"):
            await client.submit([9, 9], settings(), request_id=name)
        check_equal(await one, direct.generate([[5, 6, 7, 8]], settings(max_tokens=32))[0])
        again = await client.submit([9, 9], settings(max_tokens=2), request_id=name)
        assert len(again.outputs[0].token_ids) == 2
    witness("T01-routed", names=2)


async def t02_id_reused_straight_after_abort(fleet, direct) -> None:  # type: ignore[no-untyped-def]
    client = await asyncio.to_thread(fleet.connect)
    other = direct.generate([prompt(7)], settings(max_tokens=4))[0]
    for turn in range(30):
        first = client.submit(prompt(5), settings(max_tokens=200), request_id="x")
        num_parts = 0
        async for _ in first:
            num_parts += 1
            if num_parts > turn % 4:
                break
        first.abort()
        second = client.submit(prompt(7), settings(max_tokens=4), request_id="x")
        assert (await first).outputs[0].finish_reason == "abort"
        check_equal(await second, other)
    witness("T02-routed", turns=30)


async def t03_abort_gives_the_partial_result(fleet, direct) -> None:  # type: ignore[no-untyped-def]
    client = await asyncio.to_thread(fleet.connect)
    handle = client.submit(prompt(9), settings(max_tokens=100, n=2, temperature=1.0, seed=5))
    parts: list[RequestOutput] = []
    async for part in handle:
        parts.append(part)
        if len(parts) == 5:
            handle.abort()
    result = await handle
    (alone,) = direct.generate([prompt(9)], settings(max_tokens=100, n=2, temperature=1.0, seed=5))
    for one, two in zip(result.outputs, alone.outputs, strict=True):
        count = len(one.token_ids)
        assert one.finish_reason == "abort" and one.token_ids == two.token_ids[:count]
        assert one.logprobs is not None and two.logprobs is not None and one.logprobs == two.logprobs.cut(0, count)
    witness("T03-routed", tokens=sum(len(one.token_ids) for one in result.outputs))


async def t04_abort_of_a_queued_request(fleet, direct) -> None:  # type: ignore[no-untyped-def]
    client = await asyncio.to_thread(fleet.connect)
    running = client.submit(prompt(5), settings(max_tokens=60))
    async for _ in running:
        break
    queued = client.submit(prompt(6), settings(prompt_logprobs=0))
    queued.abort()
    result = await queued
    assert result.outputs[0].finish_reason == "abort" and result.outputs[0].token_ids == []
    assert result.outputs[0].logprobs is not None and len(result.outputs[0].logprobs) == 0
    check_equal(await running, direct.generate([prompt(5)], settings(max_tokens=60))[0])
    stats = await client.stats()
    assert stats.num_prompt_tokens == 5, "no forward held the aborted one's tokens"
    witness("T04-routed", steps=stats.num_steps)


async def t07_harmless_aborts(fleet, direct) -> None:  # type: ignore[no-untyped-def]
    client = await asyncio.to_thread(fleet.connect)
    handle = client.submit(prompt(8), settings(max_tokens=30), request_id="abc")
    for name in ("", "unknown", "ab", "ab", 7):
        await client.abort(name)
    check_equal(await handle, direct.generate([prompt(8)], settings(max_tokens=30))[0])
    handle.abort()
    await client.abort("abc")
    witness("T07-routed", tokens=len((await handle).outputs[0].token_ids))


async def t08_abort_all(fleet, direct) -> None:  # type: ignore[no-untyped-def]
    """Of one client: another's go on."""
    mine, theirs = [await asyncio.to_thread(fleet.connect) for _ in range(2)]
    other = theirs.submit(prompt(8), settings(max_tokens=40), request_id=0)
    handles = [mine.submit(prompt(6, seed=at), settings(max_tokens=200), request_id=at) for at in range(24)]
    async for _ in handles[0]:
        break
    await mine.abort()
    reasons = [(await handle).outputs[0].finish_reason for handle in handles]
    assert reasons == ["abort"] * 24
    check_equal(await other, direct.generate([prompt(8)], settings(max_tokens=40))[0])
    again = await mine.submit(prompt(8), settings(max_tokens=3))
    assert len(again.outputs[0].token_ids) == 3
    witness("T08-routed", aborted=len(reasons))
