"""What is done to logits before their temperature, vectorised over rows with mixed settings.

- In this order: logit bias; allowed ids; masks (what a grammar allows); banned ids (bad words about to be completed);
  repetition penalty; frequency and presence penalties; ids that would end a request too early.
- repetition: a logit x of an id in prompt or output becomes x / r where it is above 0, else x * r (Keskar et al.,
  "CTRL", 2019, with the sign rule of transformers and vLLM). frequency, presence: x - (f * count + p * (count > 0))
  over the output (OpenAI's API reference).
- Each row is a function of its own logits, settings and history. Logits are never changed: a step that adjusts some
  rows gets a copy.

Shapes: n rows, V = vocabulary, S = slots, P penalised rows, E ids of rows, W = words of 32 bits that hold V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.ops.select import Floats, Ids, row_slices


@dataclass(frozen=True, slots=True)
class RowIds:
    """Ids of rows, flat [E]: id[e] belongs to row[e]."""

    row: Ids
    id: Ids

    @staticmethod
    def of(lists: Sequence[tuple[int, Ids]]) -> RowIds:
        """From (row, its ids)."""
        if not lists:
            return NO_IDS
        rows = np.array([row for row, _ in lists], np.int64)
        counts = [len(ids) for _, ids in lists]
        return RowIds(np.repeat(rows, counts), np.concatenate([ids for _, ids in lists]))


NO_IDS = RowIds(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Of row[m] the ids whose bit is set in bits[m] [W] may be sampled: id i is bit i % 32 of word i // 32."""

    row: Ids
    bits: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Row row[p] has the settings at p and the history in slot[p]: output_counts [S, V], how often each id is in the
    output, and in_prompt [S, V]."""

    row: Ids
    slot: Ids
    repetition: Floats
    presence: Floats
    frequency: Floats
    output_counts: NDArray[np.int32]
    in_prompt: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepAdjustments:
    """Of the n rows of a step. bias_values belong to the ids of bias."""

    bias: RowIds
    bias_values: Floats
    allowed: RowIds
    banned: RowIds
    penalties: Penalties | None
    too_early: RowIds
    masks: RowMasks | None = None


def adjust(logits: Floats, asked: StepAdjustments) -> Floats:
    """The logits [n, V] that temperature is applied to; a row may have nothing left but -inf."""
    x = logits.copy()
    x[asked.bias.row, asked.bias.id] += asked.bias_values  # an id has one bias in its row
    if len(asked.allowed.row):
        at = asked.allowed.row, asked.allowed.id
        kept = x[at]
        x[np.unique(asked.allowed.row)] = -np.inf
        x[at] = kept
    if asked.masks is not None:
        for row, bits in zip(asked.masks.row.tolist(), asked.masks.bits, strict=True):
            is_set = np.unpackbits(bits.view(np.uint8), bitorder="little", count=x.shape[1])
            np.copyto(x[row], -np.inf, where=is_set == 0)
    x[asked.banned.row, asked.banned.id] = -np.inf
    if asked.penalties is not None:
        _penalise(x, asked.penalties)
    x[asked.too_early.row, asked.too_early.id] = -np.inf
    return x


def _penalise(x: Floats, given: Penalties) -> None:
    """In place."""
    for part in row_slices(len(given.row), x.shape[1]):
        rows, slots = given.row[part], given.slot[part]
        counts = given.output_counts[slots]
        in_output = counts > 0
        repetition, presence, frequency = (
            column[part, None] for column in (given.repetition, given.presence, given.frequency)
        )
        with np.errstate(over="ignore"):
            y = x[rows]
            scaled = np.where(y > 0, y / repetition, y * repetition)
            y = np.where(in_output | given.in_prompt[slots], scaled, y)
            x[rows] = y - (frequency * counts.astype(np.float32) + presence * in_output)
