"""Bursts through an engine: whatever a request asks, its result is that of single steps."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import LLM, SamplingParams
from perdure.api.plan import StepPlan
from perdure.engine.pace import Pace
from tests.engine.conftest import MakeLLM
from tests.engine.helpers import V, check_close, check_equal, prompt, settings
from tests.witness import witness

ASKED: dict[str, dict[str, Any]] = {
    "greedy, scored": {"max_tokens": 40, "logprobs": 2, "prompt_logprobs": 1},
    "drawn": {"max_tokens": 37, "temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 7, "logprobs": 0},
    "stop ids": {"max_tokens": 60, "temperature": 1.0, "seed": 5, "stop_token_ids": [*range(0, V, 12)], "logprobs": 1},
    "not before": {"max_tokens": 60, "temperature": 1.0, "seed": 6, "stop_token_ids": [*range(9)], "min_tokens": 20},
    "sequences": {"max_tokens": 60, "temperature": 1.0, "seed": 8, "stop_token_sequences": [[i] for i in range(20)]},
    "text": {"max_tokens": 60, "temperature": 1.0, "seed": 9, "stop": ["a", "e"], "min_tokens": 4},
    "penalties": {
        "max_tokens": 45, "temperature": 0.7, "seed": 10, "repetition_penalty": 1.3, "presence_penalty": 0.5,
        "frequency_penalty": 0.2, "logprobs": 1, "logprobs_mode": "processed",
    },
    "bad words": {"max_tokens": 45, "temperature": 1.0, "seed": 11, "bad_words": [[3, 4], [5], [6, 7, 8]]},
    "given": {"forced_token_ids": prompt(33, 3), "max_tokens": 33, "logprob_token_ids": [1, 2]},
    "two": {"n": 2, "max_tokens": 24, "temperature": 1.0, "seed": 12, "logprobs": 0},
}  # fmt: skip


class Fixed(Pace):
    """Bursts of so many steps, however long a step takes."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self._num_steps = num_steps

    def most_steps(self, requests: object) -> int:
        return self._num_steps


def watched(llm: LLM, most_steps: int) -> list[StepPlan]:
    """Its plans from now on, in bursts of so many steps."""
    loop, plans = llm._engine._loop, list[StepPlan]()
    loop.pace = Fixed(most_steps)
    plan = loop.scheduler.plan

    def planned(most_steps: int) -> StepPlan | None:
        made = plan(most_steps)
        if made is not None:
            plans.append(made)
        return made

    loop.scheduler.plan = planned  # type: ignore[method-assign]
    return plans


@pytest.mark.parametrize(
    ("device", "exact"),
    [
        ("cpu", True),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_results_are_those_of_single_steps(depth: int, device: str, exact: bool, make_llm: MakeLLM) -> None:
    """All at once and one at a time, in bursts of up to 1, 4 and 16 steps: the same bits where that is asked."""
    config = {"steps_in_flight": depth, "max_num_seqs": 16, "batch_invariant": exact}
    check = check_equal if exact else check_close
    prompts = [prompt(5 + 7 * number) for number in range(len(ASKED))]
    params: list[SamplingParams | None] = [settings(**asked) for asked in ASKED.values()]
    llm = make_llm(max_burst_ms=0, **config)
    single = llm.generate(prompts, params)
    assert {output.outputs[0].finish_reason for output in single} == {"stop", "length"}
    for most_steps in (4, 16):
        llm = make_llm(**config)
        plans = watched(llm, most_steps)
        for found, right in zip(llm.generate(prompts, params), single, strict=True):
            check(found, right)
        together = len(plans)
        for ids, one, right in list(zip(prompts, params, single, strict=True))[2:6]:
            check(llm.generate(ids, one)[0], right)
        lengths = [plan.num_steps for plan in plans]
        assert max(lengths[:together]) == max(lengths[together:]) == most_steps
        ends_inside = sum(min(plan.length) < plan.num_steps for plan in plans)
        witness(
            "burst",
            device=device,
            form="the same bits" if exact else "closely",
            most_steps=most_steps,
            num_bursts=sum(n > 1 for n in lengths),
            ends_inside=ends_inside,
        )
