"""Scores of a step on their way from the device: columns that are copied without waiting, and entries once they are
there.

Who asks for scores of whole vocabularies is scored on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perdure.api.ending import BAD_LOGITS, Failure
from perdure.models.base import Model
from perdure.ops.triton.adjust import unadjusted
from perdure.ops.triton.scores import Entries, View, best_ids, score
from perdure.runner.cuda.pages import to_device
from perdure.runner.inputs import Ints, Targets
from perdure.runner.sampler import TARGET_SLICE, EntryColumns, ScoreEntries


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Of m entries. rows are the plan's. numbers (int32, the host's, valid once the step's event has come) are rows of
    scores and ranks [m, 1 + most] of the token and of each one's num_listed ids, whether logits are unusable [m, 1],
    and the num_best best ids and their scores; scores are the bits of fp32."""

    rows: Ints
    positions: Ints
    num_top: Ints
    num_listed: Ints
    num_best: int
    numbers: Tensor

    def add_to(self, entries: ScoreEntries, errors: dict[int, Failure]) -> None:
        """As entries; the rows of unusable logits get an error instead."""
        numbers, count = self.numbers.numpy(), self.num_best
        width = (numbers.shape[1] - 1) // 2 - count
        bad, rows, positions = numbers[:, 2 * width] != 0, self.rows, self.positions
        if bad.any():
            entries.end(rows[bad], positions[bad])
            errors.update((row, BAD_LOGITS) for row in rows[bad].tolist() if row not in errors)
        good = np.flatnonzero(~bad)
        numbers, listed, top = numbers[good], self.num_listed[good], np.clip(self.num_top[good], 0, count)
        values, ranks = numbers[:, :width].view(np.float32), numbers[:, width : 2 * width]
        best = numbers[:, 2 * width + 1 :]
        part = EntryColumns(
            row=rows[good],
            position=positions[good],
            chosen=values[:, 0],
            rank=ranks[:, 0],
            num_top=top,
            top_ids=_cut(best[:, :count], top),
            top_scores=_cut(best[:, count:], top).view(np.float32),
            num_listed=listed,
            listed_ranks=_cut(ranks[:, 1:], listed),
            listed_scores=_cut(values[:, 1:], listed),
        )
        entries.add(part)


def _cut(rows: np.ndarray, counts: Ints) -> np.ndarray:
    """As much of each row as its count says, flat."""
    flat: np.ndarray = rows[np.arange(rows.shape[1]) < counts[:, None]]
    return flat


def pending(
    view: View, ids: Tensor, rows: Ints, positions: Ints, num_top: Ints, num_listed: Ints
) -> PendingScores:  # fmt: skip
    """Scores of the view's entries at ids [m, 1 + most] (int32, on the device), and of the num_top best of each."""
    found = score(view, ids)
    count = min(int(num_top.max(initial=0)), view.of.logits.shape[1])
    parts = [found.scores.view(torch.int32), found.ranks, found.is_bad.int()[:, None]]
    if count > 0:
        best, values = best_ids(view, count, found.normaliser)
        parts += [best, values.view(torch.int32)]
    return PendingScores(rows, positions, num_top, num_listed, count, to_host(torch.cat(parts, 1)))


def score_targets(model: Model, hidden: Tensor, targets: Targets, num_top: Ints) -> list[PendingScores]:
    """Raw scores of known tokens of prompts [T], and of the num_top best beside each, a slice at a time."""
    found = []
    for low in range(0, len(targets.row), TARGET_SLICE):
        part = slice(low, low + TARGET_SLICE)
        row, position, most = targets.row[part], targets.position[part], num_top[part]
        at = to_device([targets.hidden_row[part].tolist(), targets.token[part].tolist()], torch.int64, hidden.device)
        every = torch.arange(len(row), dtype=torch.int32, device=hidden.device)
        view = View(unadjusted(model.logits(hidden[at[0]])), Entries(every, torch.zeros_like(every)))
        found.append(pending(view, at[1].int()[:, None], row, position, most, np.zeros(len(row), np.int64)))
    return found


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, on its way."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
