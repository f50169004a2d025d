"""Rows route-* and sched-* through the coordinator: two replicas in processes of their own, clients that all number
from zero; every result equals that of one engine driven directly."""

from __future__ import annotations

import asyncio

import pytest

from perdure import LLM
from perdure.api.output import RequestOutput
from tests.coordinator.conftest import MakeFleet
from tests.coordinator.fleet import QUIET
from tests.engine.helpers import check_equal, prompt, settings
from tests.witness import witness

DEPTH = {"sync": 1, "async": 2}


@pytest.mark.parametrize("row", [f"route-{scheduling}-{interval}" for scheduling in DEPTH for interval in (0, 1, 3)])
def test_route(row: str, make_fleet: MakeFleet, direct: LLM) -> None:
    """One request a replica, assigned while all are paused, then released; every client's is its number 0."""
    scheduling, interval = row.split("-")[1], int(row[-1])
    fleet = make_fleet(steps_in_flight=DEPTH[scheduling])
    prompts = [prompt(16, seed=1), prompt(16, seed=2)]
    before = fleet.client().stats()

    async def run() -> tuple[list[RequestOutput], list[list[RequestOutput]], dict[int, int]]:
        clients = [await asyncio.to_thread(fleet.connect) for _ in prompts]
        params = settings(
            logprobs=3,
            prompt_logprobs=3,
            return_prompt=True,
            output_kind="delta" if interval else "final",
            stream_interval=max(1, interval),
        )
        await clients[0].pause()
        handles = [client.submit(ids, params, request_id=0) for client, ids in zip(clients, prompts)]
        await asyncio.to_thread(fleet.wait_until, lambda: sum(fleet.owners().values()) == 2, "both are assigned")
        owners = fleet.owners()
        await clients[0].resume()
        parts = [[part async for part in handle] for handle in handles]
        return [await handle for handle in handles], parts, owners

    results, parts, owners = asyncio.run(run())
    after = fleet.client().stats()
    assert owners == {0: 1, 1: 1}
    for result, ids, own in zip(results, prompts, parts):
        (alone,) = direct.generate([ids], settings(logprobs=3, prompt_logprobs=3, return_prompt=True))
        check_equal(result, alone)
        assert result.prompt_token_ids == ids and result.prompt == alone.prompt and result.request_id == 0
        assert [part.finished for part in own] == [False] * (len(own) - 1) + [True]
        joined = [token for part in own for token in part.outputs[0].token_ids]
        assert joined == result.outputs[0].token_ids
        assert "".join(part.outputs[0].text for part in own) == alone.outputs[0].text
        for part in own:
            assert len(part.outputs[0].logprobs or ()) == len(part.outputs[0].token_ids)
            assert part.finished or len(part.outputs[0].token_ids) >= interval
        assert len(own) > 1 or not interval
    prompt_tokens = after.num_prompt_tokens - before.num_prompt_tokens
    generated = after.num_generated_tokens - before.num_generated_tokens
    assert (prompt_tokens, generated) == (32, 32), "each replica computed its own, once"
    witness(row, owners=len(owners), prompt_tokens=prompt_tokens, generated=generated, parts=sum(map(len, parts)))


@pytest.mark.parametrize("policy", ["longest_prefix", "first_prefix_block"])
def test_route_prefix(policy: str, make_fleet: MakeFleet, direct: LLM) -> None:
    fleet = make_fleet(steps_in_flight=2, routing=QUIET._replace(policy=policy, alpha=0.0))
    client, ids = fleet.client(), prompt(33)
    before = client.stats().num_cached_tokens
    first, again = (client.generate([ids], settings())[0] for _ in range(2))
    read = client.stats().num_cached_tokens - before
    (alone,) = direct.generate([ids], settings())
    check_equal(first, alone)
    check_equal(again, alone)
    assert first.num_cached_tokens == 0 and again.num_cached_tokens == 32 == read
    witness(f"route-prefix-{policy}", cached=again.num_cached_tokens, read=read)


@pytest.mark.parametrize(
    ("row", "alpha", "ttl_s", "cached"),
    [("sched-affinity", 0.0, 300.0, 32), ("sched-load", 100.0, 300.0, 0), ("sched-expired", 0.0, 0.0, 0)],
)
def test_sched(row: str, alpha: float, ttl_s: float, cached: int, make_fleet: MakeFleet, direct: LLM) -> None:
    """A warm prompt, and a competitor on the warm replica: the prefix, the load or the time decides."""
    routing = QUIET._replace(policy="longest_prefix", alpha=alpha, affinity_ttl=ttl_s)
    fleet = make_fleet(steps_in_flight=2, routing=routing)
    client, ids = fleet.client(), prompt(33)
    client.generate([ids], settings())
    fleet.wait_until(lambda: not any(fleet.owners().values()), "the first is confirmed, and no load of its replica's")
    before = client.stats().num_cached_tokens

    async def beside() -> RequestOutput:
        competitor = await asyncio.to_thread(fleet.connect)
        await competitor.pause()
        held = competitor.submit(prompt(20, seed=5), settings(max_tokens=4))
        await asyncio.to_thread(fleet.wait_until, lambda: sum(fleet.owners().values()) == 1, "one is held")
        again = competitor.submit(ids, settings())
        await asyncio.to_thread(fleet.wait_until, lambda: sum(fleet.owners().values()) == 2, "both are")
        assert sorted(fleet.owners().values()) == ([0, 2] if row == "sched-affinity" else [1, 1])
        await competitor.resume()
        await held
        return await again

    result = asyncio.run(beside())
    check_equal(result, direct.generate([ids], settings())[0])
    assert result.num_cached_tokens == client.stats().num_cached_tokens - before == cached
    witness(row, computed=33 - cached, alpha=str(alpha))


def test_sched_chunk_beside_decode(make_fleet: MakeFleet, direct: LLM) -> None:
    """65 tokens under a budget of 32: the first part shares its step with the other's prompt of 5, the second with its
    decode."""
    fleet = make_fleet(num_replicas=1, max_num_batched_tokens=32)

    async def run() -> list[RequestOutput]:
        client = await asyncio.to_thread(fleet.connect)
        await client.pause()
        decoding = client.submit(prompt(5), settings(max_tokens=40))
        target = client.submit(prompt(65), settings(prompt_logprobs=0))
        await client.resume()
        return [await decoding, await target]

    decoding, target = asyncio.run(run())
    check_equal(target, direct.generate([prompt(65)], settings(prompt_logprobs=0))[0])
    check_equal(decoding, direct.generate([prompt(5)], settings(max_tokens=40))[0])
    assert target.metrics is not None
    chunks = [event.num_tokens for event in target.metrics.events if event.kind == "chunk"]
    assert chunks == [32 - 5, 32 - 1, 65 - 27 - 31]
    witness("sched-chunk-beside-decode", chunks=chunks)
