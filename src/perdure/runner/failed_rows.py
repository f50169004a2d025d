"""Leaving rows out of a step: those of requests that failed while this step was launched already.

Deltas stay: the block tables they change belong to rows of the same plan, and pages must be cleared for whoever gets
them next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from perdure.api.ending import Failure
from perdure.api.plan import ScoreColumns, StepOutput, StepPlan

COLUMNS = ("request", "slot", "start", "length", "num_tokens", "sample", "target_start", "num_targets")


class FailedRows:
    """Slots whose rows hold nothing to go on from, and why, until their slot gets another request."""

    def __init__(self) -> None:
        self._why: dict[int, Failure] = {}

    def add(self, slots: Iterable[int], why: Failure) -> None:
        self._why.update((slot, why) for slot in slots)

    def learn(self, slots: Sequence[int], errors: Iterable[tuple[int, Failure]]) -> None:
        """slots: of a step's rows. errors: what its output says of some of them."""
        self._why.update((slots[row], why) for row, why in errors)

    def of(self, plan: StepPlan) -> dict[int, Failure]:
        """The plan's rows to leave out. Rows that it begins have not failed."""
        for init in plan.row_inits:
            self._why.pop(init.slot, None)
        return {row: self._why[slot] for row, slot in enumerate(plan.slot) if slot in self._why}

    def clear(self) -> None:
        self._why.clear()


def without_rows(plan: StepPlan, failed: Mapping[int, Failure]) -> StepPlan:
    """The plan with these rows' columns, tokens and targets taken out."""
    kept = [row for row in range(len(plan.slot)) if row not in failed]
    tokens: list[int] = []
    targets: list[int] = []
    token_at = target_at = 0
    for row, (num_tokens, num_targets) in enumerate(zip(plan.num_tokens, plan.num_targets, strict=True)):
        if row not in failed:
            tokens += plan.tokens[token_at : token_at + num_tokens]
            targets += plan.targets[target_at : target_at + num_targets]
        token_at += num_tokens
        target_at += num_targets
    columns = {name: [getattr(plan, name)[row] for row in kept] for name in COLUMNS}
    return replace(plan, **columns, tokens=tokens, targets=targets)


def failed_output(plan: StepPlan, why: Failure) -> StepOutput:
    """Every row failed."""
    num_rows = len(plan.slot)
    errors = [(row, why) for row in range(num_rows)]
    return StepOutput(plan.step, [0] * num_rows, [], ScoreColumns.empty(), ScoreColumns.empty(), errors)


def with_rows(output: StepOutput, failed: Mapping[int, Failure], plan: StepPlan) -> StepOutput:
    """The output of `without_rows(plan, failed)` as one of the whole plan, the rows left out being errors."""
    kept = [row for row in range(len(plan.slot)) if row not in failed]
    num_sampled = [0] * len(plan.slot)
    for row, count in zip(kept, output.num_sampled, strict=True):
        num_sampled[row] = count

    def renamed(scores: ScoreColumns) -> ScoreColumns:
        return replace(scores, row=[kept[row] for row in scores.row])

    return replace(
        output,
        num_sampled=num_sampled,
        records=renamed(output.records),
        prompt_records=renamed(output.prompt_records),
        errors=sorted([*failed.items(), *((kept[row], why) for row, why in output.errors)]),
    )
