"""What scores of every generated token cost, as a part of the step that gives the token."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from perdure import LLM, SamplingParams
from perdure.api.plan import StepOutput, StepPlan
from perdure.core import scores
from perdure.runner import sampler
from tests.engine.helpers import prompt
from tests.witness import witness

pytestmark = pytest.mark.alone

NUM_ROWS, NUM_TOKENS = 4, 24
MOST = 0.10


class Watch:
    """The seconds that a step spent making scores and keeping them, and its other seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        self.shares: list[float] = []
        self._seconds = 0.0
        for owner, name in (
            (sampler, "score"),
            (sampler.ScoreEntries, "columns"),
            (scores.StepScores, "__init__"),
            (scores.StepScores, "append"),
        ):
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))
        runner = llm._engine.resolved.runner
        self._execute = runner.execute
        runner.execute = self._step  # type: ignore[method-assign]

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            begin = time.perf_counter()
            found = function(*arguments)
            self._seconds += time.perf_counter() - begin
            return found

        return watched

    def _step(self, plan: StepPlan) -> StepOutput:
        kept, self._seconds = self._seconds, 0.0  # what committing the step before took
        begin = time.perf_counter()
        output = self._execute(plan)
        whole = time.perf_counter() - begin
        if not plan.tokens and len(plan.request) == NUM_ROWS:
            self.shares.append((self._seconds + kept) / (whole - self._seconds))
            self._seconds = 0.0
        return output


@pytest.mark.parametrize("logprobs", [0, 5])
def test_scores_of_every_token_cost_under_a_tenth_of_a_step(
    logprobs: int, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2, four rows. Both parts of one step are timed in the same moments, so that other programs slow them alike;
    the median step counts."""
    asked = SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=logprobs)
    with LLM(str(smollm2_path), max_model_len=64, num_pages=32, steps_in_flight=1) as llm:
        watch = Watch(monkeypatch, llm)
        outputs = llm.generate([prompt(8, n) for n in range(NUM_ROWS)], asked)
    assert all(len(output.outputs[0].logprobs or ()) == NUM_TOKENS for output in outputs)
    assert len(watch.shares) == NUM_TOKENS - 1 and min(watch.shares) > 0
    share = median(watch.shares)
    witness("scores-cost", logprobs=str(logprobs), percent_of_a_step=round(100 * share, 2))
    assert share < MOST
