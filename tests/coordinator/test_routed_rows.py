"""More rows of the matrix through the coordinator, each a test of its id: sampling, admission, suspension, aborts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import LLM, AsyncLLM, InvalidValue, MaxSequenceLengthOverflow, SamplingParams
from perdure.api.output import RequestOutput
from perdure.core.admission import derived_seed
from perdure.ops import sampling_reference as oracle
from perdure.ops.philox import uniforms
from tests.coordinator.conftest import MakeFleet
from tests.coordinator.fleet import QUIET, Fleet
from tests.engine.helpers import (
    changed_tensors,
    check_equal,
    check_scores_equal,
    check_stopped_late,
    prompt,
    settings,
    stopping_late,
    whole_rows,
)
from tests.witness import witness

DEPTH = {"sync": 1, "async": 2}
EPS = 2.0**-23
MOST_TRIES = 20
"""Of what is to happen in the middle of a request: on a busy machine it may be over before."""


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    return make_fleet(steps_in_flight=2)


# optin, bos-stop


@pytest.mark.parametrize(
    "row",
    ["optin-echo0-detok0-eos0", "optin-echo1-detok1-eos0", "optin-echo1-detok0-eos0", "optin-echo0-detok0-eos1"],
)
def test_optin(row: str, fleet: Fleet, direct: LLM) -> None:
    """Five ids; prompt and text stand in the result exactly where asked. With the first token as an end: that one."""
    echo, detok, eos = (f"{name}1" in row for name in ("echo", "detok", "eos"))
    ids, params = prompt(12), settings(max_tokens=5, return_prompt=echo, detokenize=detok)
    (alone,) = direct.generate([ids], params)
    if eos:
        params = settings(max_tokens=5, detokenize=False, stop_token_ids=[alone.outputs[0].token_ids[0]])
        (alone,) = direct.generate([ids], params)
    (result,) = fleet.client().generate([ids], params, request_ids=[0])
    found = result.outputs[0]
    check_equal(result, alone)
    assert len(found.token_ids) == (1 if eos else 5) and bool(found.text) == detok
    assert result.prompt_token_ids == (ids if echo else None) and (result.prompt is not None) == echo
    witness(row, token_ids=found.token_ids, reason=found.finish_reason or "")


@pytest.mark.parametrize("row", [f"bos-stop-keep{keep}-skip{skip}" for keep in (0, 1) for skip in (0, 1)])
def test_bos_stop(row: str, make_fleet: MakeFleet, direct: LLM) -> None:
    """BOS before the text; a short drawn request before the greedy target ends first, and the target goes on."""
    keep, skip = "keep1" in row, "skip1" in row
    fleet = make_fleet(num_replicas=1, max_num_batched_tokens=32)
    (plain,) = direct.generate(["The target"], settings(max_tokens=20))
    ids = plain.outputs[0].token_ids
    at, params = stopping_late(ids, keep, skip)
    drawn = settings(temperature=1.0, max_tokens=3)
    ended: list[str] = []

    async def result_of(client: AsyncLLM, prompt: str, params: SamplingParams) -> RequestOutput:
        result = await client.submit(prompt, params)
        ended.append(prompt)
        return result

    async def together() -> list[RequestOutput]:
        client = await asyncio.to_thread(fleet.connect)
        wanted = {"A short one": drawn, "The target": params, "The next": drawn}
        return await asyncio.gather(*(result_of(client, *one) for one in wanted.items()))

    short, target, _ = asyncio.run(together())
    check_equal(target, direct.generate(["The target"], params)[0])
    check_stopped_late(target, ids, at, keep, skip)
    assert ended.index("A short one") < ended.index("The target"), "the short one ended first"
    witness(row, num_tokens=len(target.outputs[0].token_ids), beside=len(short.outputs[0].token_ids))


# sample-torch, T47: base seed 7


FILTERS = {"top-k": {"top_k": 4}, "top-p": {"top_p": 0.7}}


@pytest.fixture(scope="module")
def flatter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M with an eighth of its logits, so that several ids may be drawn."""
    directory = tmp_path_factory.mktemp("flatter") / "model"
    shutil.copytree(tiny, directory)
    with changed_tensors(directory) as tensors:
        tensors["lm_head.weight"] /= 8
    return directory


@pytest.fixture(scope="module")
def direct_flatter(flatter: Path) -> Iterator[LLM]:
    with LLM(str(flatter), page_size=16, num_pages=128, steps_in_flight=1, enable_prefix_caching=False) as llm:
        yield llm


@pytest.mark.parametrize(
    "row",
    [f"sample-torch-{n}-{p}-{m}" for p in ("shared", "per_replica") for n in FILTERS for m in ("raw", "processed")],
)
def test_sample_torch(row: str, make_fleet: MakeFleet, flatter: Path, direct_flatter: LLM) -> None:
    """One token at temperature 0.7 from each of two owners: the draw is keyed by the owner's seed, from the kept ids of
    the logits that an engine driven directly has, to the bit; its score is the mode's within 8 eps."""
    name, policy, mode = row.removeprefix("sample-torch-").rsplit("-", 2)
    client = make_fleet(model=flatter, seed=7, seed_policy=policy).client()
    ids, asked = prompt(20), {"temperature": 0.7, **FILTERS[name]}
    (alone,) = direct_flatter.generate([ids], settings(max_tokens=1, logprobs=-1))
    logits = whole_rows(alone.outputs[0].logprobs)[0].numpy()
    kept, processed = oracle.kept_ids(logits, **asked), oracle.processed(logits, **asked)
    arrival = client.stats().num_requests // 2  # each replica had half of all
    results = client.generate([ids] * 2, SamplingParams(max_tokens=1, logprobs=-1, logprobs_mode=mode, **asked))  # type: ignore[arg-type]
    assert client.stats().num_requests == 2 * arrival + 2
    seeds, tokens = [], []
    for owner, result in enumerate(results):
        seeds.append(derived_seed(7, owner if policy == "per_replica" else 0, arrival))
        u = float(uniforms(np.array([seeds[-1]], np.uint64), np.array([0]))[0])
        mass = np.exp((logits[kept].astype(np.float64) - logits.max()) / 0.7)
        tokens.append(kept[int(np.searchsorted(np.cumsum(mass) / mass.sum(), u, side="right"))])
        scores = result.outputs[0].logprobs
        assert scores is not None and result.outputs[0].token_ids == [tokens[-1]]
        truth = logits if mode == "raw" else processed
        assert abs(scores.chosen[0] - truth[tokens[-1]]) <= 8 * EPS * max(1.0, float(np.abs(logits).max()) / 0.7)
        if mode == "raw":
            assert whole_rows(scores)[0].numpy().tobytes() == logits.tobytes()
        assert logits[tokens[-1]] != processed[tokens[-1]]
    check_scores_equal(*(result.outputs[0].logprobs.cut(0, 0) for result in results if result.outputs[0].logprobs))
    assert 1 < len(kept) < len(logits)
    assert (seeds[0] == seeds[1]) == (policy == "shared")
    witness(row, seeds=seeds, num_kept=len(kept), tokens=[token + 1 for token in tokens])


@pytest.mark.parametrize("policy", ["shared", "per_replica"])
def test_t47_first_tokens_of_two_replicas(policy: str, make_fleet: MakeFleet, flatter: Path) -> None:
    """Without a seed: two replicas give the same prompt equal tokens under one policy, and different ones under the
    other; one after another, they are never the same."""
    client = make_fleet(model=flatter, seed=7, seed_policy=policy).client()
    params = settings(temperature=1.0, max_tokens=16)
    pairs = [[one.outputs[0].token_ids for one in client.generate([prompt(9)] * 2, params)] for _ in range(10)]
    for one, two in pairs:
        assert one == two if policy == "shared" else one[0] != two[0] or one != two
    assert sum(one[0] != two[0] for one, two in pairs) > 5 * (policy == "per_replica") - 1
    distinct = len({tuple(tokens) for pair in pairs for tokens in pair})
    assert distinct == (10 if policy == "shared" else 20)
    witness(f"T47-{policy}", distinct=distinct)


# admit-overlength, s10 to s12


def test_admit_overlength(fleet: Fleet, direct: LLM) -> None:
    """One failure, no forward, nothing retained; then a healthy request to the same replica."""
    client = fleet.client()
    before = client.stats()
    with pytest.raises(MaxSequenceLengthOverflow, match="257"):
        client.generate(prompt(257), settings())
    after = client.stats()
    assert (after.num_steps, after.num_prompt_tokens) == (before.num_steps, before.num_prompt_tokens), "no forward"
    fleet.router.check_idle()
    (healthy,) = client.generate([prompt(8)], settings(), request_ids=[0])
    check_equal(healthy, direct.generate([prompt(8)], settings())[0])
    witness("admit-overlength", steps_of_the_healthy_one=client.stats().num_steps - after.num_steps)


def test_s10_all_invalid(fleet: Fleet) -> None:
    """All of a call's failures at once, and no forward."""
    client = fleet.client()
    before = client.stats().num_steps
    refused = client.generate([[], [512], prompt(257)], settings())
    kinds = [type(one.error) for one in refused]
    assert kinds == [InvalidValue, InvalidValue, MaxSequenceLengthOverflow]
    assert all(one.outputs[0].finish_reason == "error" and not one.outputs[0].token_ids for one in refused)
    assert client.stats().num_steps == before
    witness("s10", refused=len(refused))


def test_s11_failure_ownership(fleet: Fleet, direct: LLM) -> None:
    """Two clients whose names overlap: a failure is of the call that submitted it, and of nobody else's."""
    mine, theirs = fleet.client(), fleet.client()
    ids = [prompt(8), prompt(9)]

    async def both() -> list[list[RequestOutput]]:
        calls = [
            asyncio.to_thread(mine.generate, [[600], ids[0]], settings(), request_ids=[0, 1]),
            asyncio.to_thread(theirs.generate, ids, settings(), request_ids=[0, 1]),
        ]
        return list(await asyncio.gather(*calls))

    mixed, healthy = asyncio.run(both())
    assert isinstance(mixed[0].error, InvalidValue) and [one.error for one in healthy] == [None, None]
    for result, one in zip([mixed[1], *healthy], [ids[0], *ids]):
        check_equal(result, direct.generate([one], settings())[0])
    witness("s11", refused=1, healthy=3)


def test_s12_coordinator_failure(fleet: Fleet) -> None:
    """Only an invalid request, number 42: one reply, no entry left, and no later step."""
    client = fleet.client()
    before = client.stats()
    (refused,) = client.generate([[512]], settings(), request_ids=[42])
    fleet.router.check_idle()
    after = client.stats()
    assert isinstance(refused.error, InvalidValue) and refused.request_id == 42
    assert after.num_steps == before.num_steps and after.num_running == after.num_waiting == 0
    witness("s12-coordinator-failure", submitted=fleet.router.entries._next - 1)


# life


@pytest.mark.parametrize("row", [f"life-{s}-{kv}" for s in DEPTH for kv in ("persist", "offload", "recompute")])
def test_life(row: str, make_fleet: MakeFleet, direct: LLM) -> None:
    """Suspended after generation began: what was drawn stays, and the rest equals the direct run."""
    _, scheduling, kv = row.split("-")
    fleet = make_fleet(steps_in_flight=DEPTH[scheduling])
    ids, params = [prompt(16, seed=4), prompt(16, seed=5)], settings(max_tokens=200)

    async def run() -> tuple[list[int], list[RequestOutput]]:
        clients = [await asyncio.to_thread(fleet.connect) for _ in ids]
        handles = [client.submit(one, params, request_id=0) for client, one in zip(clients, ids)]
        for handle in handles:
            async for _ in handle:
                break
        await clients[0].suspend(kv=kv)  # type: ignore[arg-type]
        assert (await clients[1].stats()).state == "suspended"
        done = [entry.num_output for entry in fleet.router.entries.all]
        await clients[0].resume()
        return done, [await handle for handle in handles]

    for _ in range(MOST_TRIES):
        done, results = asyncio.run(run())
        for result, one in zip(results, ids):
            check_equal(result, direct.generate([one], params)[0])
        if len(done) == 2:
            break
    assert len(done) == 2 and min(done) >= 1, "they had ended before, each time"
    kinds = [event.kind for result in results if result.metrics for event in result.metrics.events]
    assert kinds.count("scheduled") == (4 if kv == "recompute" else 2)
    witness(row, tokens_before=done, times_prefilled=kinds.count("scheduled"))


@pytest.mark.parametrize("row", ["life-epoch-zmq0", "life-epoch-zmq1"])
def test_life_epoch(row: str, make_fleet: MakeFleet) -> None:
    """An active and an idle replica; the epoch moves on both, by calls of one kind, and earlier tokens keep theirs."""
    fleet = make_fleet(steps_in_flight=2, routing=QUIET._replace(blocking_collectives=row.endswith("1")))
    client = fleet.client()
    kind = "blocking" if row.endswith("1") else "by messages"

    async def run() -> RequestOutput:
        client = await asyncio.to_thread(fleet.connect)
        await client.update_weights(None, epoch=3)
        handle = client.submit(prompt(16), settings(max_tokens=200))
        async for _ in handle:
            break
        await client.update_weights(None, epoch=7)
        return await handle

    for _ in range(MOST_TRIES):
        before = dict(fleet.router.orders.num_calls)
        result = asyncio.run(run())
        epochs = result.outputs[0].weight_epochs
        if len(epochs) == 2:
            break
    assert epochs[0] == (0, 3) and epochs[1][1] == 7 and epochs[1][0] > 0
    assert client.stats().weight_epoch == 7
    assert [replica.about.weight_epoch for replica in fleet.router.members.serving] == [7, 7]
    calls = {
        name: count - before[name] for name, count in fleet.router.orders.num_calls.items() if count != before[name]
    }
    assert calls == {kind: 4}, "two phases an order"
    witness(row, epoch=7, calls=calls, changed_at=epochs[1][0])


@pytest.mark.parametrize("row", ["life-abort-queued", "life-abort-active"])
def test_life_abort_and_t64(row: str, fleet: Fleet, direct: LLM) -> None:
    """T64 too: clients A and B both have a 0, on different replicas, in parts of 3; A aborts its own. B's stream is
    whole, A has one end, and its owner has its pages back."""
    params = settings(max_tokens=200, stream_interval=3, output_kind="delta")

    async def run() -> tuple[list[RequestOutput], list[RequestOutput], int]:
        a, b = [await asyncio.to_thread(fleet.connect) for _ in range(2)]
        free = (await a.stats()).num_free_pages
        if row == "life-abort-queued":
            await a.pause()
        mine = a.submit(prompt(16, seed=1), params, request_id=0)
        theirs = b.submit(prompt(16, seed=2), params, request_id=0)
        await asyncio.to_thread(
            fleet.wait_until, lambda: fleet.owners() == {0: 1, 1: 1} or not len(fleet.router.entries), ""
        )
        parts = [await anext(aiter(mine))] if row == "life-abort-active" else []
        mine.abort()
        parts += [part async for part in mine]
        await a.resume()
        others = [part async for part in theirs]
        return parts, others, free - (await a.stats()).num_free_pages

    for _ in range(MOST_TRIES):
        parts, others, missing = asyncio.run(run())
        if parts[-1].outputs[0].finish_reason == "abort":
            break
    tokens, (alone,) = (
        [t for one in parts for t in one.outputs[0].token_ids],
        direct.generate([prompt(16, seed=1)], params),
    )
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].outputs[0].finish_reason == "abort" and tokens == alone.outputs[0].token_ids[: len(tokens)]
    assert bool(tokens) == (row == "life-abort-active") and missing == 0
    (alone,) = direct.generate([prompt(16, seed=2)], params)
    assert [t for one in others for t in one.outputs[0].token_ids] == alone.outputs[0].token_ids
    assert all(len(one.outputs[0].token_ids) >= 3 for one in others[:-1]) and len(others) > 60
    witness(row, parts_of_the_other=len(others), tokens=len(tokens) + 1)
    witness("T64", parts_of_the_other=len(others), ends=sum(part.finished for part in parts))


def test_life_pressure_victim(make_fleet: MakeFleet, direct: LLM) -> None:
    """A pool of five pages, a paused budget of one, three requests a replica: who is paused is evicted and prefilled
    again, under the same name."""
    fleet = make_fleet(num_pages=5, paused_pages=1, max_num_seqs=3, max_model_len=64)
    client, prompts = fleet.client(), [prompt(15, seed=seed) for seed in range(6)]
    results = client.generate(prompts, settings(max_tokens=20), request_ids=list(range(6)))
    victims: dict[str, int] = {}
    for at, (result, ids) in enumerate(zip(results, prompts)):
        assert result.request_id == at and result.metrics is not None
        check_equal(result, direct.generate([ids], settings(max_tokens=20))[0])
        kinds: list[Any] = [event.kind for event in result.metrics.events]
        assert kinds.count("scheduled") == 1 + result.metrics.num_evictions
        if result.metrics.num_evictions:
            victims[str(at)] = kinds.count("scheduled")
    stats = client.stats()
    witness("life-pressure-victim", evictions=stats.num_evictions, pauses=stats.num_pauses, prefilled=victims)
