"""Replicas killed and frozen in mid-stream, the coordinator gone and back, a client gone: streams go on, and equal the
undisturbed run to the last bit; no token twice, none missing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure import LLM, AsyncLLM, Client, ReplicaLost, SamplingParams
from perdure.api.output import RequestOutput
from perdure.coordinator.router import Routing
from tests.coordinator.conftest import MakeFleet
from tests.coordinator.fleet import PATIENCE_S, QUIET, Fleet, process
from tests.engine.helpers import check_equal, prompt, settings
from tests.witness import witness

Wanted = list[tuple[list[int], SamplingParams]]
HANGS = Routing("load_balanced", replica_wait_s=PATIENCE_S)
"""Where one may hang: who is silent for 1.2 s is lost, which on a busy machine may be wrong, and harms nobody."""
MOST_TRIES = 20
"""Of what is to happen in the middle of requests: on a busy machine they may be over before."""
MOST_PAUSE_S = 2.0
"""Of a stream whose replica is lost, beside what is computed again."""
AGAIN_S = 0.5
"""That, here, and for a machine that does other things too."""


def wanted_of_tiny(seed: int) -> Wanted:
    """Greedy and drawn ones, with scores and without, of one sample and of several."""
    shapes = [(0.0, None, None, 1), (1.0, 0, None, 1), (1.0, 2, 1, 1), (0.7, 0, 0, 2)]
    found = []
    for at in range(8):
        temperature, logprobs, prompt_logprobs, n = shapes[at % len(shapes)]
        params = SamplingParams(
            temperature=temperature,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=n,
            seed=100 * seed + at,
            max_tokens=200,
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


async def disturbed(
    fleet: Fleet, wanted: Wanted, rng: random.Random, disturb: Callable[[int], None]
) -> tuple[list[RequestOutput], float]:
    """All streams at once; somewhere in the first third `disturb` is called with the index of a replica that has most
    of them. Returns their results and the longest pause of any."""
    client = await asyncio.to_thread(fleet.connect)
    streams = [Watched() for _ in wanted]
    reading = [asyncio.create_task(stream.read(client, *one)) for stream, one in zip(streams, wanted, strict=True)]
    after = rng.randint(1, sum(params.n * (params.max_tokens or 0) for _, params in wanted) // 3)
    while sum(stream.num_parts for stream in streams) < after:
        await asyncio.sleep(0.001)
    disturb(max(fleet.owners().items(), key=lambda one: one[1])[0])
    results = await asyncio.wait_for(asyncio.gather(*reading), PATIENCE_S)
    for stream, result in zip(streams, results, strict=True):
        found = {output.index: output.token_ids for output in result.outputs if output.token_ids}
        assert stream.parts == found, "a token twice, or one is missing"
    return results, max(stream.longest_s for stream in streams)


def undisturbed(direct: LLM, wanted: Wanted) -> list[RequestOutput]:
    return direct.generate([ids for ids, _ in wanted], [params for _, params in wanted])


def check_undisturbed(results: list[RequestOutput], alone: list[RequestOutput]) -> None:
    for result, truth in zip(results, alone, strict=True):
        check_equal(result, truth)
        assert result.exact and len(result.outputs) == len(truth.outputs)


def moves(results: list[RequestOutput]) -> int:
    return sum(result.metrics.num_checkpoints for result in results if result.metrics is not None)


def kill(fleet: Fleet, index: int) -> None:
    fleet.kill(index)
    fleet.start(index)


def freeze(fleet: Fleet, index: int) -> None:
    fleet.freeze(index)


def back_again(fleet: Fleet) -> None:
    for index in fleet.processes:
        fleet.thaw(index)
    fleet.wait_until_all_serve()


LOSSES = {"kill-9": (kill, QUIET), "sigstop": (freeze, HANGS)}


@pytest.mark.parametrize("how", LOSSES)
def test_a_replica_lost_in_mid_stream(how: str, make_fleet: MakeFleet, direct: LLM, soak_factor: int) -> None:
    """At random moments. What a frozen one says when it thaws is nobody's, and it joins again."""
    lose, routing = LOSSES[how]
    fleet = make_fleet(steps_in_flight=2, routing=routing)
    wanted, rng, num_moved = wanted_of_tiny(1), random.Random(how), list[int]()
    alone = undisturbed(direct, wanted)
    for _ in range(MOST_TRIES * soak_factor):
        results, _ = asyncio.run(disturbed(fleet, wanted, rng, lambda victim: lose(fleet, victim)))
        check_undisturbed(results, alone)
        back_again(fleet)
        if moved := moves(results):
            num_moved.append(moved)
        if len(num_moved) == 3 * soak_factor:
            break
    assert len(num_moved) == 3 * soak_factor, "they had ended before, most times"
    witness(f"replica-lost-{how}", times=len(num_moved), moved=sum(num_moved), lost=fleet.router.num_lost_replicas)


@pytest.mark.alone
@pytest.mark.parametrize("how", LOSSES)
def test_the_pause_that_a_client_sees(how: str, make_fleet: MakeFleet, direct: LLM) -> None:
    """Under two seconds, and what is computed again."""
    lose, _ = LOSSES[how]
    fleet = make_fleet(steps_in_flight=2, routing=HANGS)
    wanted = wanted_of_tiny(2)
    alone = undisturbed(direct, wanted)
    for turn in range(MOST_TRIES):
        rng = random.Random(turn)
        results, pause_s = asyncio.run(disturbed(fleet, wanted, rng, lambda victim: lose(fleet, victim)))
        check_undisturbed(results, alone)
        back_again(fleet)
        if moves(results):
            break
    assert pause_s < MOST_PAUSE_S + AGAIN_S
    witness(f"pause-{how}", moved=moves(results), longest_pause_ms=round(1000 * pause_s))


@pytest.fixture(scope="module")
def direct_smollm2(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), steps_in_flight=1, enable_prefix_caching=False) as llm:
        yield llm


@pytest.mark.parametrize("how", LOSSES)
def test_many_losses_of_the_default_model(
    how: str, make_fleet: MakeFleet, smollm2_path: Path, request: pytest.FixtureRequest, soak_factor: int
) -> None:
    """64 requests in flight, 50 times in a soak: texts equal the undisturbed run's."""
    if soak_factor == 1:
        pytest.skip("hours: in a soak only")
    lose, routing = LOSSES[how]
    direct: LLM = request.getfixturevalue("direct_smollm2")
    params = SamplingParams(max_tokens=32, seed=5, logprobs=0, output_kind="delta", ignore_eos=True)
    wanted: Wanted = [(prompt(8 + at % 9, seed=at), params) for at in range(64)]
    alone = undisturbed(direct, wanted)
    fleet = make_fleet(model=smollm2_path, num_pages=None, check_integrity=False, routing=routing)
    rng, num_moved, pauses = random.Random(how), list[int](), list[float]()
    for _ in range(5 * soak_factor):
        results, pause_s = asyncio.run(disturbed(fleet, wanted, rng, lambda victim: lose(fleet, victim)))
        check_undisturbed(results, alone)
        assert [[o.text for o in one.outputs] for one in results] == [[o.text for o in one.outputs] for one in alone]
        back_again(fleet)
        num_moved.append(moves(results))
        pauses.append(pause_s)
    longest_ms = round(1000 * max(pauses))
    witness(f"many-losses-{how}", times=len(num_moved), moved=sum(num_moved), longest_pause_ms=longest_ms)


def test_a_coordinator_that_starts_anew_gives_no_second_answer(make_fleet: MakeFleet, direct: LLM) -> None:
    """It finds its replicas again, and clients submit again what is unanswered, from where it stands."""
    fleet = make_fleet(steps_in_flight=2)
    wanted = wanted_of_tiny(3)

    def restart(victim: int) -> None:
        fleet.end_coordinator()
        fleet.begin(fleet.routing)

    for turn in range(MOST_TRIES):
        results, _ = asyncio.run(disturbed(fleet, wanted, random.Random(turn), restart))
        check_undisturbed(results, undisturbed(direct, wanted))
        fleet.wait_until_all_serve()
        if moves(results):
            break
    witness("coordinator-restarted", moved=moves(results), submitted_again=fleet.router.entries._next - 1)


@pytest.mark.parametrize("how", LOSSES)
def test_fail_is_one_failure_each(how: str, make_fleet: MakeFleet, direct: LLM) -> None:
    """And what the lost one still says is ignored: it thaws, joins again, and serves."""
    lose, routing = LOSSES[how]
    fleet = make_fleet(steps_in_flight=2, routing=routing._replace(on_replica_loss="fail"))
    wanted = wanted_of_tiny(4)
    for turn in range(MOST_TRIES):
        results, _ = asyncio.run(disturbed(fleet, wanted, random.Random(turn), lambda victim: lose(fleet, victim)))
        back_again(fleet)
        failed = [result for result in results if result.error is not None]
        if failed:
            break
    for result, alone in zip(results, undisturbed(direct, wanted), strict=True):
        if result.error is None:
            check_equal(result, alone)
            continue
        assert isinstance(result.error, ReplicaLost)
        for one, two in zip(result.outputs, alone.outputs, strict=True):
            assert one.token_ids == two.token_ids[: len(one.token_ids)]
            assert one.finish_reason == ("error" if len(one.token_ids) < 200 else "length")
    (after,) = fleet.client().generate([prompt(9)], settings())
    check_equal(after, direct.generate([prompt(9)], settings())[0])
    witness(f"fail-{how}", failed=len(failed), served_again=len(after.outputs[0].token_ids))


def test_a_coordinator_lives_with_no_replica(make_fleet: MakeFleet, direct: LLM) -> None:
    """Requests wait for one as long as they may, and fail; whoever registers then serves."""
    fleet = make_fleet(num_replicas=1, routing=QUIET._replace(replica_wait_s=0.5))
    client, other = fleet.client(), fleet.client()
    fleet.kill(0)
    fleet.wait_until(lambda: not fleet.num_serving, "it is lost")
    lost = client.generate([prompt(5), prompt(6)], settings(), request_ids=[0, 1])
    assert [type(one.error) for one in lost] == [ReplicaLost, ReplicaLost]
    assert all(one.outputs[0].finish_reason == "error" and not one.outputs[0].token_ids for one in lost)
    fleet.router.check_idle()
    fleet.start(0)
    fleet.wait_until_all_serve()
    (served,) = other.generate([prompt(7)], settings(), request_ids=[0])
    check_equal(served, direct.generate([prompt(7)], settings())[0])
    witness("no-replica", failed=len(lost), served=len(served.outputs[0].token_ids))


def _want_for_ever(endpoint: str) -> None:
    """A client in a process of its own, which never has enough."""
    client = Client(endpoint)
    while True:
        client.generate([prompt(9, seed=at) for at in range(6)], settings(max_tokens=200))


def test_a_client_that_is_killed_leaves_nothing(make_fleet: MakeFleet, direct: LLM) -> None:
    """Its requests end, and nobody else notices."""
    fleet = make_fleet(steps_in_flight=2)
    killed = process(_want_for_ever, fleet.endpoint)
    fleet.wait_until(lambda: len(fleet.router.entries) == 6, "its requests are here")
    killed.kill()
    killed.join()
    (other,) = fleet.client().generate([prompt(8)], settings(max_tokens=100))
    check_equal(other, direct.generate([prompt(8)], settings(max_tokens=100))[0])
    fleet.wait_until(lambda: not len(fleet.router.entries), "its requests have ended")
    witness("client-killed", serials=fleet.router.entries._next - 1)


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_t63_pause_under_dp(mode: str, make_fleet: MakeFleet, direct: LLM) -> None:
    """100 times: submit, pause in the same moment, then an update that all must agree on. Nobody is stuck, all end."""
    fleet = make_fleet(steps_in_flight=2)
    params = settings(max_tokens=12)
    alone = [direct.generate([prompt(8, seed=at)], params)[0].outputs[0] for at in range(3)]

    async def run() -> dict[str, int]:
        client = await asyncio.to_thread(fleet.connect)
        rng = random.Random(mode)
        reasons: dict[str, int] = {}
        for turn in range(100):
            handles = [client.submit(prompt(8, seed=at), params) for at in range(3)]
            await asyncio.sleep(rng.choice((0.0, rng.random() * 0.02)))
            await client.pause(mode)  # type: ignore[arg-type]
            await client.update_weights(None, epoch=turn + 1)
            await client.resume()
            for handle, truth in zip(handles, alone, strict=True):
                found = (await handle).outputs[0]
                reasons[found.finish_reason or ""] = reasons.get(found.finish_reason or "", 0) + 1
                assert found.token_ids == truth.token_ids[: len(found.token_ids)]
                assert (found.finish_reason == "length") == (len(found.token_ids) == 12)
        return reasons

    reasons = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert set(reasons) <= ({"abort", "length"} if mode == "abort" else {"length"})
    witness(f"T63-{mode}", times=100, ends=reasons, epoch=fleet.client().stats().weight_epoch)
