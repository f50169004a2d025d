"""T45, T48 and T49 through an engine: a seeded draw is its request's own, and filters do what the rules say."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import InvalidValue, SamplingParams
from tests.engine.conftest import DEVICES, Check, MakeAsync, MakeLLM, Solo
from tests.engine.helpers import (
    V,
    check_equal,
    check_reference,
    constant_model,
    pressure,
    prompt,
    replays_on,
    run_async,
    settings,
)
from tests.engine.reference import Reference
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])
R = prompt(40)
DRAWN = settings(temperature=1.0, seed=42, max_tokens=32, logprobs=1)


def others(count: int, seeded: bool) -> list[SamplingParams]:
    return [settings(temperature=1.0, seed=100 + n if seeded else None, max_tokens=5 + 3 * n) for n in range(count)]


@DEVICES
@DEPTHS
@pytest.mark.parametrize("budget", [512, 7])
def test_T45_a_seeded_result_does_not_depend_on_neighbours(
    budget: int, depth: int, device: str, make_llm: MakeLLM, solo: Solo, check_as_promised: Check
) -> None:
    """Alone, beside 7 seeded or unseeded ones, first or last, its prompt in one piece or in chunks, at any depth."""
    truth = solo(R, DRAWN)
    assert len({*truth.outputs[0].token_ids}) > 10
    llm = make_llm(steps_in_flight=depth, max_num_batched_tokens=budget, enable_prefix_caching=False)
    check_as_promised(llm.generate(R, DRAWN)[0], truth)
    prompts = [prompt(3 + n) for n in range(7)]
    for seeded in (False, True):
        for place in (0, 7):
            batch, params = [*prompts], others(7, seeded)
            batch.insert(place, R)
            params.insert(place, DRAWN)
            outputs = llm.generate(batch, params)
            check_as_promised(outputs[place], truth)
            if seeded and place:
                for output, ids, one in zip(outputs, batch, params):
                    check_as_promised(output, solo(ids, one))
    num_ids = len(truth.outputs[0].token_ids)
    witness("T45", num_ids=num_ids, neighbours=7, budget=budget, device=device, **replays_on(device, llm))


@DEVICES
@DEPTHS
def test_T45_neighbours_come_and_go(
    depth: int, device: str, make_async: MakeAsync, solo: Solo, check_as_promised: Check
) -> None:
    """Others arrive, end and are aborted while it runs, and there are too few pages for all: it is evicted, too."""
    truth = solo(R, DRAWN)

    async def main() -> None:
        rng = random.Random(depth)
        llm = make_async(steps_in_flight=depth, num_pages=10, paused_pages=0)
        older = [llm.submit(prompt(30, seed), settings(max_tokens=60)) for seed in range(2)]
        request = llm.submit(R, DRAWN)
        handles = [*older]
        while not request._result.done():
            await asyncio.sleep(rng.random() * 0.003)
            if len(handles) < 20:
                handles.append(llm.submit(prompt(rng.randint(1, 30)), others(4, False)[rng.randrange(4)]))
            if rng.random() < 0.3:
                rng.choice(handles[2:] or handles).abort()
        output = await request
        check_as_promised(output, truth)
        num_evictions, num_pauses = pressure(output)
        aside = num_evictions + num_pauses
        witness("T45", times_put_aside=aside, device=device, **replays_on(device, llm))
        for handle in handles:
            assert (await handle).error is None

    run_async(main())


def test_T45_the_same_seed_gives_the_same_ids_and_no_seed_does_not(make_llm: MakeLLM) -> None:
    """T47's half too: unseeded ones differ; an engine with the same seed and order of requests gives them again."""
    params = [DRAWN, DRAWN, *[settings(temperature=1.0, max_tokens=16)] * 6]
    runs = [make_llm(seed=seed).generate([R] * 8, params) for seed in (3, 3, 4)]
    ids = [[output.outputs[0].token_ids for output in run] for run in runs]
    assert ids[0] == ids[1] and ids[0][0] == ids[0][1] == ids[2][0]
    assert len({tuple(one) for one in ids[0][2:] + ids[2][2:]}) == 12


# T48, T49: constant logits


def test_T48_greedy_edges_in_one_batch(make_llm: MakeLLM, solo: Solo, reference: Reference) -> None:
    """Temperatures 0, 1e-6, 1e-3, 1, 2 and unset beside each other: the tiny ones are the argmax where it leads."""
    llm, ids = make_llm(), prompt(12)
    params = [settings(temperature=t, seed=5, logprobs=2) for t in (0, 0.0, 1e-6, 1e-3, 1, 2.0)]
    unset = SamplingParams(seed=5, logprobs=2, ignore_eos=True, max_tokens=16)
    outputs = llm.generate([ids] * 7, [*params, unset])
    for output, one in zip(outputs, [*params, unset]):
        check_equal(output, solo(ids, one))
        assert all(math.isfinite(score) for score in output.outputs[0].selected_logprobs or [math.nan])
    for output in outputs[:4]:
        check_reference(output, ids, reference)
    check_equal(outputs[6], outputs[4])
    assert outputs[4].outputs[0].token_ids != outputs[0].outputs[0].token_ids
    assert outputs[5].outputs[0].token_ids != outputs[4].outputs[0].token_ids


def test_T48_ties_and_large_logits(make_llm: MakeLLM, tmp_path: Path) -> None:
    """Logits of 1e4 with a tie at 7 and 9: T = 0 takes 7, the lowest; 1e-6 to 2 draw both and nothing else; no NaN."""
    logits = [0.0] * V
    logits[3], logits[7], logits[9], logits[500] = -1e4, 1e4, 1e4, 1e4 - 1.0
    llm = make_llm(constant_model(tmp_path / "large", logits))
    params = [settings(temperature=t, seed=5, max_tokens=64) for t in (0, 1e-6, 1e-3, 1, 2)]
    outputs = llm.generate([[1, 2]] * 5, params)
    drawn = [{*output.outputs[0].token_ids} for output in outputs]
    assert drawn == [{7}, {7, 9}, {7, 9}, {7, 9, 500}, {7, 9, 500}]
    for output in outputs:
        assert all(math.isfinite(score) for score in output.outputs[0].selected_logprobs or [math.nan])


OFF = (0, -1, 512, 513, 10**7)


def chi_squared_limit(freedom: int) -> float:
    """The value exceeded with probability 1e-3 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def test_T49_top_k_mixed_in_one_batch(make_llm: MakeLLM, tmp_path: Path) -> None:
    """0, -1, 512, 513 and 10^7 are off: 20,000 draws follow the softmax. 1 is the argmax, 4 the four best."""
    generator = torch.Generator().manual_seed(0)
    logits: list[float] = torch.randn(V, generator=generator).tolist()
    llm = make_llm(constant_model(tmp_path / "drawn", logits), max_num_seqs=128, num_pages=2048)
    drawn = {"temperature": 1.0, "max_tokens": 250, "logprobs": None}
    off = [settings(**drawn, top_k=k, seed=16 * n + s) for n, k in enumerate(OFF) for s in range(16)]
    special = [settings(**drawn, top_k=k, seed=1) for k in (1, 4)]
    greedy = settings(temperature=0.0, max_tokens=250, logprobs=None)
    one_seed = [settings(**drawn, top_k=k, seed=1000) for k in OFF]
    params = [*off, *special, greedy, *one_seed]
    outputs = llm.generate([[index] for index in range(len(params))], params)

    counts, truth = torch.zeros(V), torch.tensor(logits).double().softmax(0)
    for output in outputs[:80]:
        counts += torch.bincount(torch.tensor(output.outputs[0].token_ids), minlength=V)
    assert counts.sum() == 20_000
    expected = truth * 20_000
    rare = expected < 5  # pooled, as the test's approximation wants
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    assert float(((observed - expected) ** 2 / expected).sum()) < chi_squared_limit(len(expected) - 1)

    one, four, zero = ({*output.outputs[0].token_ids} for output in outputs[80:83])
    assert one == zero == {int(truth.argmax())}
    assert four == {*truth.topk(4).indices.tolist()}
    assert len({tuple(output.outputs[0].token_ids) for output in outputs[83:]}) == 1


def test_T49_ties_at_the_border_are_all_kept(make_llm: MakeLLM, tmp_path: Path) -> None:
    """Four ids tie for the second place: top_k 2 to 5 keep them all beside the best, top_k 1 keeps the best alone."""
    logits = [-20.0] * V
    logits[100] = 1.0
    for tied in (5, 50, 300, 511):
        logits[tied] = 0.5
    llm = make_llm(constant_model(tmp_path / "ties", logits))
    params = [settings(temperature=1.0, top_k=k, seed=3, max_tokens=200) for k in (1, 2, 3, 5)]
    drawn = [{*output.outputs[0].token_ids} for output in llm.generate([[1]] * 4, params)]
    assert drawn == [{100}] + [{5, 50, 100, 300, 511}] * 3


@pytest.mark.parametrize("value", [-2, -100, 1.5, "4", True])
def test_T49_other_values_are_refused(value: Any) -> None:
    with pytest.raises(InvalidValue, match="top_k"):
        SamplingParams(top_k=value)
