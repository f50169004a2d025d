"""Pages that nobody owns are full of NaN, and nobody ever reads one: rows vpage-*, T58, T11."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from perdure import LLM
from perdure.api.plan import StepPlan
from perdure.engine.engine import Engine
from perdure.ops.native import library
from tests.engine.conftest import DEVICES, Check, MakeLLM, Solo
from tests.engine.helpers import check_equal, pressure, prompt, replays_on, settings
from tests.witness import witness

BACKENDS = [
    *(("cpu", name) for name in ("tiled", "reference", "plain", *(["native"] if library() is not None else []))),
    *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("triton", "reference")),
]
LENGTHS = (1, 15, 16, 17)


class PageWatch:
    """Looks at the pool whenever private pages are cleared.

    num_poisoned: pages that were all NaN when they were taken; by_step: how many in each step of the engine.
    """

    def __init__(self, engine: Engine) -> None:
        runner = engine.resolved.runner
        self._pool, self._clear = runner._kv._pool, runner._kv.clear
        self._step = -1
        self.num_poisoned = 0
        self.num_kept = 0
        self.by_step: dict[int, int] = {}
        runner._kv.clear = self._cleared  # type: ignore[method-assign]
        name = "execute" if hasattr(runner, "execute") else "launch"
        setattr(runner, name, partial(self._executed, getattr(runner, name)))

    def _executed(self, execute: Callable[[StepPlan], Any], plan: StepPlan) -> Any:
        self._step = plan.step
        return execute(plan)

    def _cleared(self, pages: Iterable[int]) -> None:
        """Only these change: whatever else holds numbers, cached or of others, keeps its bytes."""
        taken = list(pages)
        num_poisoned = sum(bool(self._pool[:, :, :, page].isnan().all()) for page in taken)
        before = self._pool.clone()
        self._clear(taken)
        assert not self._pool[:, :, :, taken].any(), "a page was not cleared"
        others = [page for page in range(self._pool.shape[3]) if page not in taken]
        same = self._pool[:, :, :, others].view(torch.int16) == before[:, :, :, others].view(torch.int16)
        assert same.all(), "clearing changed a page that was not taken"
        self.num_kept += sum(not before[:, :, :, page].isnan().any() for page in others)
        self.num_poisoned += num_poisoned
        self.by_step[self._step] = self.by_step.get(self._step, 0) + num_poisoned


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_vpage_admission(device: str, backend: str, make_llm: MakeLLM, check_as_promised: Check) -> None:
    """Prompts of 1, 15, 16 and 17 tokens, then again over the pages they have cached; every backend of attention."""
    config: dict[str, Any] = {"attention_backend": backend, "num_pages": 24, "steps_in_flight": 1}
    config["batch_invariant"] = device == "cpu" and backend != "plain"
    plain, poisoned = make_llm(**config), make_llm(poison_free_pages=True, **config)
    watch = PageWatch(poisoned._engine)
    prompts, params = [prompt(length) for length in LENGTHS], settings(max_tokens=1, prompt_logprobs=0, logprobs=3)
    for _ in range(2):
        for output, other in zip(poisoned.generate(prompts, params), plain.generate(prompts, params)):
            check_as_promised(output, other)
    (again,) = poisoned.generate([prompt(17)], settings(max_tokens=1))
    assert again.num_cached_tokens == 16
    assert watch.num_poisoned >= 2 * 5
    witness("vpage-admission", num_poisoned_pages=watch.num_poisoned, num_kept=watch.num_kept)
    witness("T58", num_poisoned_pages=watch.num_poisoned)


def test_vpage_growth(make_llm: MakeLLM, solo: Solo) -> None:
    """A paused request resumes, and the page it grows by was poisoned."""
    llm = make_llm(num_pages=4, paused_pages=4, poison_free_pages=True, enable_prefix_caching=False)
    watch = PageWatch(llm._engine)
    prompts, params = [prompt(40), prompt(15)], [settings(max_tokens=8, prompt_logprobs=0), settings(max_tokens=30)]
    outputs = llm.generate(prompts, params)
    for output, ids, one in zip(outputs, prompts, params):
        check_equal(output, solo(ids, one))
    num_pauses = sum(pressure(output)[1] for output in outputs)
    resumed = [event.kind for output in outputs if output.metrics for event in output.metrics.events]
    assert num_pauses and not sum(pressure(output)[0] for output in outputs)
    witness(
        "vpage-growth",
        num_poisoned_pages=watch.num_poisoned,
        num_pauses=num_pauses,
        num_resumed=resumed.count("resumed"),
    )


@pytest.mark.parametrize("depth", [2, 4])
def test_vpage_async(depth: int, make_llm: MakeLLM, solo: Solo) -> None:
    """The page of a step that was planned while steps before it were in flight."""
    llm = make_llm(num_pages=24, steps_in_flight=depth, poison_free_pages=True)
    watch = PageWatch(llm._engine)
    scheduler = llm._engine._loop.scheduler
    ahead: dict[int, int] = {}
    plan = scheduler.plan

    def planned(most_steps: int) -> Any:
        before = scheduler.steps_in_flight
        made = plan(most_steps)
        if made is not None and made.fresh_pages:
            ahead[made.step] = before
        return made

    scheduler.plan = planned  # type: ignore[method-assign]
    prompts, params = [prompt(length) for length in LENGTHS], settings(max_tokens=40)
    for output, ids in zip(llm.generate(prompts, params), prompts):
        check_equal(output, solo(ids, params))
    num_ahead = sum(count for step, count in watch.by_step.items() if ahead.get(step))
    witness("vpage-async", num_poisoned_pages_taken_ahead=num_ahead, most_steps_in_flight=max(ahead.values()))


UNEVEN = (5, 17, 33, 48, 16, 31, 64, 9)


@DEVICES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_vpage_saturation_and_T11(
    depth: int, caching: bool, temperature: float, device: str, make_llm: MakeLLM, check_as_promised: Check
) -> None:
    """Eight uneven prompts, 64 tokens each, in a pool of 10 pages with a paused budget of 3, poisoned: everything is
    what the roomy pool gives; greedy and seeded."""
    prompts = [prompt(length) for length in UNEVEN]
    params = [
        settings(max_tokens=64, prompt_logprobs=1, logprobs=2, temperature=temperature, seed=seed)
        for seed in range(len(prompts))
    ]
    config: dict[str, Any] = {"enable_prefix_caching": caching, "max_model_len": 128}
    roomy = make_llm(steps_in_flight=1, **config).generate(prompts, params)
    tight: LLM = make_llm(num_pages=10, paused_pages=3, steps_in_flight=depth, poison_free_pages=True, **config)
    watch = PageWatch(tight._engine)
    outputs = tight.generate(prompts, params)
    for output, other, ids in zip(outputs, roomy, prompts):
        check_as_promised(output, other)
        assert len(output.outputs[0].token_ids) == 64 and output.num_cached_tokens <= len(ids)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(ids)
    stats = tight.stats()
    assert not any(sum(pressure(output)) for output in roomy)
    found = {"num_pauses": stats.num_pauses, "num_evictions": stats.num_evictions}
    found |= replays_on(device, tight)
    witness("vpage-saturation", num_poisoned_pages=watch.num_poisoned, **found)
    witness("T58", num_poisoned_pages=watch.num_poisoned, **found)
    witness("T11", **found)
