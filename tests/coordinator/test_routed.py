"""Rows of the matrix through the coordinator: two replicas in processes of their own, real clients, all numbering from
zero; every result equals that of one engine driven directly."""

from __future__ import annotations

import asyncio

import pytest

from perdure import LLM
from perdure.api.output import RequestOutput
from perdure.coordinator.router import Routing
from tests.coordinator.conftest import MakeFleet
from tests.engine.helpers import check_equal, prompt, settings
from tests.witness import witness

DEPTH = {"sync": 1, "async": 2}


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_route(scheduling: str, make_fleet: MakeFleet, direct: LLM) -> None:
    """route-sync-{0,1,3}, route-async-{0,1,3}: one request a replica, assigned while all are paused, then released."""
    fleet = make_fleet(steps_in_flight=DEPTH[scheduling])
    prompts = [prompt(16, seed=1), prompt(16, seed=2)]

    async def run(interval: int) -> tuple[list[RequestOutput], list[list[RequestOutput]], dict[int, int]]:
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

    for interval in (0, 1, 3):
        before = fleet.client().stats()
        results, parts, owners = asyncio.run(run(interval))
        after = fleet.client().stats()
        assert owners == {0: 1, 1: 1}
        for result, ids, own in zip(results, prompts, parts):
            (alone,) = direct.generate([ids], settings(logprobs=3, prompt_logprobs=3, return_prompt=True))
            check_equal(result, alone)
            assert result.prompt_token_ids == ids and result.request_id == 0
            assert [part.finished for part in own] == [False] * (len(own) - 1) + [True]
            joined = [token for part in own for token in part.outputs[0].token_ids]
            assert (
                joined == result.outputs[0].token_ids
                and "".join(p.outputs[0].text for p in own) == alone.outputs[0].text
            )
            for part in own:
                assert len(part.outputs[0].logprobs or ()) == len(part.outputs[0].token_ids)
                assert part.finished or len(part.outputs[0].token_ids) >= interval
            assert len(own) > 1 or not interval
        witness(
            f"route-{scheduling}-{interval}",
            owners=len(owners),
            prompt_tokens=after.num_prompt_tokens - before.num_prompt_tokens + 32 * (interval > 0),
            generated=after.num_generated_tokens - before.num_generated_tokens,
            parts=sum(map(len, parts)),
        )


@pytest.mark.parametrize("policy", ["longest_prefix", "first_prefix_block"])
def test_route_prefix(policy: str, make_fleet: MakeFleet, direct: LLM) -> None:
    fleet = make_fleet(routing=Routing(policy, alpha=0.0))  # type: ignore[arg-type]
    client, ids = fleet.client(), prompt(33)
    first, again = (client.generate([ids], settings())[0] for _ in range(2))
    (alone,) = direct.generate([ids], settings())
    check_equal(first, alone)
    check_equal(again, alone)
    assert first.num_cached_tokens == 0 and again.num_cached_tokens == 32
    witness(f"route-prefix-{policy}", cached=again.num_cached_tokens, read=client.stats().num_cached_tokens)
