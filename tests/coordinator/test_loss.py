"""Replicas killed and frozen in mid-stream, the coordinator gone and back: streams go on, and equal the undisturbed
run to the last bit; no token twice, none missing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import pytest

from perdure import LLM, AsyncLLM, ReplicaLost, SamplingParams
from perdure.api.output import RequestOutput
from perdure.coordinator.router import Routing
from tests.coordinator.conftest import MakeFleet
from tests.coordinator.fleet import Fleet
from tests.engine.helpers import check_equal, prompt
from tests.witness import witness

pytestmark = pytest.mark.skip(reason="not yet shown to hold: replicas in processes of their own, on a quiet machine")

NUM_STREAMS = 8
MOST_PAUSE_S = 2.0
"""Of a stream whose replica is lost, beside what is computed again; asserted only with room for a busy machine."""
ROOM = 10


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and drawn ones, with scores and without, of one sample and of several."""
    shapes = [(0.0, None, None, 1), (1.0, 0, None, 1), (1.0, 2, 1, 1), (0.7, 0, 0, 2)]
    found = []
    for at in range(NUM_STREAMS):
        temperature, logprobs, prompt_logprobs, n = shapes[at % len(shapes)]
        params = SamplingParams(
            temperature=temperature,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=n,
            seed=100 * seed + at,
            max_tokens=150,
            ignore_eos=True,
            output_kind="delta",
        )
        found.append((prompt(10 + 3 * at, seed=seed), params))
    return found


class Watched:
    """A stream read to its end, with the longest pause between two parts."""

    def __init__(self) -> None:
        self.num_parts = 0
        self.longest_s = 0.0
        self.parts: dict[int, list[int]] = {}

    async def read(self, client: AsyncLLM, ids: list[int], params: SamplingParams) -> RequestOutput:
        handle = client.submit(ids, params)
        last = None
        async for part in handle:
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - last if last is not None else 0.0)
            last = now
            self.num_parts += 1
            for output in part.outputs:
                self.parts.setdefault(output.index, []).extend(output.token_ids)
        return await handle


async def disturbed(fleet: Fleet, seed: int, disturb: Callable[[int], None]) -> tuple[list[RequestOutput], float]:
    """All streams at once; in the middle `disturb` is called with the index of a replica that has some of them."""
    client = await asyncio.to_thread(fleet.connect)
    rng = random.Random(seed)
    streams = [Watched() for _ in range(NUM_STREAMS)]
    reading = [
        asyncio.create_task(stream.read(client, *one)) for stream, one in zip(streams, requests(seed), strict=True)
    ]
    wanted = rng.randint(NUM_STREAMS, 60 * NUM_STREAMS)
    while sum(stream.num_parts for stream in streams) < wanted:
        await asyncio.sleep(0.001)
    victim = max(fleet.owners().items(), key=lambda one: one[1])[0]
    disturb(victim)
    results = await asyncio.gather(*reading)
    for stream, result in zip(streams, results, strict=True):
        assert stream.parts == {output.index: output.token_ids for output in result.outputs}
    return results, max(stream.longest_s for stream in streams)


def check_undisturbed(results: list[RequestOutput], seed: int, direct: LLM) -> None:
    for result, (ids, params) in zip(results, requests(seed), strict=True):
        (alone,) = direct.generate([ids], params)
        assert result.exact and len(result.outputs) == params.n
        for one, two in zip(result.outputs, alone.outputs, strict=True):
            assert one.token_ids == two.token_ids and one.text == two.text and one.finish_reason == two.finish_reason
            assert one.logprobs == two.logprobs
        assert result.prompt_logprobs == alone.prompt_logprobs


def moves(results: list[RequestOutput]) -> int:
    return sum(result.metrics.num_checkpoints for result in results if result.metrics is not None)


def test_kill_9_in_mid_stream(make_fleet: MakeFleet, direct: LLM, soak_factor: int) -> None:
    fleet = make_fleet()
    for seed in range(3 * soak_factor):

        def kill(victim: int) -> None:
            fleet.kill(victim)
            fleet.start(victim)

        results, pause_s = asyncio.run(disturbed(fleet, seed, kill))
        check_undisturbed(results, seed, direct)
        assert pause_s < ROOM * MOST_PAUSE_S
        witness("replica-killed", moved=moves(results), longest_pause_ms=round(1000 * pause_s))
        fleet.wait_until(lambda: fleet.num_serving == 2, "the killed one is back")


def test_a_frozen_replica_is_lost_and_what_it_says_when_it_thaws_is_nobodys(make_fleet: MakeFleet, direct: LLM) -> None:
    fleet = make_fleet()
    frozen: list[int] = []

    def freeze(victim: int) -> None:
        fleet.freeze(victim)
        frozen.append(victim)

    results, pause_s = asyncio.run(disturbed(fleet, 7, freeze))
    check_undisturbed(results, 7, direct)
    assert pause_s < ROOM * MOST_PAUSE_S and fleet.num_serving == 1
    fleet.thaw(frozen[0])
    fleet.wait_until(lambda: fleet.num_serving == 2, "it has joined again")
    witness("replica-frozen", moved=moves(results), longest_pause_ms=round(1000 * pause_s))


def test_a_coordinator_that_starts_anew_gives_no_second_answer(make_fleet: MakeFleet, direct: LLM) -> None:
    fleet = make_fleet()

    def restart(victim: int) -> None:
        fleet.end_coordinator()
        fleet.begin()

    results, pause_s = asyncio.run(disturbed(fleet, 11, restart))
    check_undisturbed(results, 11, direct)
    fleet.wait_until(lambda: fleet.num_serving == 2, "replicas are found again")
    witness("coordinator-restarted", moved=moves(results), longest_pause_ms=round(1000 * pause_s))


def test_fail_is_one_failure_each_and_the_coordinator_serves_on(make_fleet: MakeFleet, direct: LLM) -> None:
    fleet = make_fleet(num_replicas=1, routing=Routing("load_balanced", on_replica_loss="fail"))
    results, _ = asyncio.run(disturbed(fleet, 3, fleet.kill))
    failed = [result for result in results if result.error is not None]
    for result in failed:
        assert isinstance(result.error, ReplicaLost)
        assert {output.finish_reason for output in result.outputs} <= {"error", "length"}
    assert fleet.num_serving == 0
    fleet.start(0)
    (after,) = fleet.client().generate([prompt(9)], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    check_equal(after, direct.generate([prompt(9)], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0])
    witness("replica-lost-fail", failed=len(failed))


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_t63_pause_under_dp(mode: str, make_fleet: MakeFleet, direct: LLM, soak_factor: int) -> None:
    """Submit, pause in the same moment, then an update that all must agree on: nobody is stuck, all have an end."""
    fleet = make_fleet()

    async def run() -> dict[str, int]:
        client = await asyncio.to_thread(fleet.connect)
        rng = random.Random(mode)
        reasons: dict[str, int] = {}
        for turn in range(10 * soak_factor):
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            handles = [client.submit(prompt(8, seed=at), params) for at in range(3)]
            await asyncio.sleep(rng.random() * 0.02)
            await client.pause(mode)  # type: ignore[arg-type]
            await client.update_weights(None, epoch=turn + 1)
            await client.resume()
            for at, handle in enumerate(handles):
                result = await handle
                reason = result.outputs[0].finish_reason or ""
                reasons[reason] = reasons.get(reason, 0) + 1
                (alone,) = direct.generate([prompt(8, seed=at)], params)
                assert result.outputs[0].token_ids == alone.outputs[0].token_ids[: len(result.outputs[0].token_ids)]
        return reasons

    reasons = asyncio.run(run())
    assert set(reasons) <= ({"abort", "length"} if mode == "abort" else {"length"})
    witness(f"T63-{mode}", **{reason: count for reason, count in reasons.items() if count})
