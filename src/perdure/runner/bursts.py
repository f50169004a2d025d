"""A burst where the host drives every step anyway: taken apart into its steps, and their outputs joined.

- Row i of the plan is in the first length[i] steps. A row that fails is an error of its later steps, and gets nothing.
- What the plan says comes before any row runs is in the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from perdure.api.ending import Failure
from perdure.api.plan import DEVICE_POSITION, ScoreColumns, StepOutput, StepPlan

Part = tuple[Sequence[int], StepOutput]
"""What came of a step, and which of the plan's rows were in it."""

DELTAS = (
    *("row_inits", "table_slot", "table_index", "table_page", "fresh_pages", "poisoned_pages"),
    *("copy_from", "copy_to", "copy_length"),
)


def steps_of(plan: StepPlan) -> Iterator[tuple[list[int], StepPlan]]:
    """Each step with its rows of the plan."""
    assert plan.start.count(DEVICE_POSITION) == len(plan.start) == sum(plan.sample), "a row of a burst does not decode"
    for step in range(plan.num_steps):
        rows = [row for row, length in enumerate(plan.length) if length > step]
        zeros, ones = [0] * len(rows), [1] * len(rows)
        deltas: dict[str, list[int]] = {} if step == 0 else {name: [] for name in DELTAS}
        yield (
            rows,
            replace(
                plan,
                request=[plan.request[row] for row in rows],
                slot=[plan.slot[row] for row in rows],
                start=[DEVICE_POSITION] * len(rows),
                length=ones,
                num_tokens=zeros,
                sample=ones,
                target_start=zeros,
                num_targets=zeros,
                **deltas,
            ),
        )


def joined(plan: StepPlan, parts: Sequence[Part]) -> StepOutput:
    """The output of the whole burst."""
    tokens: list[list[int]] = [[] for _ in plan.slot]
    errors: dict[int, Failure] = {}
    for rows, output in parts:
        at = 0
        for row, count in zip(rows, output.num_sampled, strict=True):
            tokens[row] += output.tokens[at : at + count]
            at += count
        for index, why in output.errors:
            errors.setdefault(rows[index], why)
    return StepOutput(
        step=plan.step,
        num_sampled=[len(some) for some in tokens],
        tokens=[token for some in tokens for token in some],
        records=_joined_scores([(rows, output.records) for rows, output in parts if output.records.row]),
        prompt_records=ScoreColumns.empty(),
        errors=sorted(errors.items()),
    )


def _joined_scores(parts: Sequence[tuple[Sequence[int], ScoreColumns]]) -> ScoreColumns:
    """By row, and in the order of the steps within one."""
    if not parts:
        return ScoreColumns.empty()
    row = np.concatenate([np.array(rows)[columns.row] for rows, columns in parts])
    order = np.argsort(row, kind="stable").tolist()

    def numbers(name: str) -> list[Any]:
        together = [one for _, columns in parts for one in getattr(columns, name)]
        return [together[entry] for entry in order]

    def packed(name: str, counts: str) -> bytes:
        pieces = [piece for _, columns in parts for piece in _pieces(getattr(columns, name), getattr(columns, counts))]
        return b"".join(pieces[entry] for entry in order)

    return ScoreColumns(
        row=row[order].tolist(),
        position=numbers("position"),
        chosen=numbers("chosen"),
        rank=numbers("rank"),
        num_top=numbers("num_top"),
        top_ids=packed("top_ids", "num_top"),
        top_scores=packed("top_scores", "num_top"),
        num_listed=numbers("num_listed"),
        listed_ranks=packed("listed_ranks", "num_listed"),
        listed_scores=packed("listed_scores", "num_listed"),
    )


def _pieces(values: bytes, counts: Sequence[int]) -> Iterator[bytes]:
    """Of four bytes a value."""
    at = 0
    for count in counts:
        yield values[at : at + 4 * count]
        at += 4 * count
