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
from perdure.ops.sampling import NO_LIST, Scores
from perdure.ops.triton.adjust import unadjusted
from perdure.ops.triton.scores import Entries, View, best_ids, score
from perdure.runner.cuda.pages import to_device
from perdure.runner.inputs import Ints, Targets
from perdure.runner.sampler import TARGET_SLICE, ScoreEntries

NO_SCORES: np.ndarray = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Of m entries; the tensors are the host's, and valid once the step's event has come. rows are the plan's. scores,
    ranks [m, 1 + most]: of the token, then of each one's num_listed ids."""

    rows: Ints
    positions: Ints
    num_top: Ints
    num_listed: Ints
    scores: Tensor
    ranks: Tensor
    bad: Tensor
    top_ids: Tensor | None
    top_scores: Tensor | None

    def add_to(self, entries: ScoreEntries, errors: dict[int, Failure]) -> None:
        """As entries; the rows of unusable logits get an error instead."""
        bad = self.bad.numpy()
        entries.end(self.rows[bad], self.positions[bad])
        errors.update((row, BAD_LOGITS) for row in self.rows[bad].tolist() if row not in errors)
        good = np.flatnonzero(~bad)
        values, ranks = self.scores.numpy()[good], self.ranks.numpy()[good]
        listed, top = self.num_listed[good], self.num_top[good]
        ids, best = [NO_LIST] * len(good), [NO_SCORES] * len(good)
        if self.top_ids is not None and self.top_scores is not None:
            ids, best = _cut(self.top_ids.numpy()[good], top), _cut(self.top_scores.numpy()[good], top)
        scores = Scores(
            chosen=values[:, 0],
            rank=ranks[:, 0],
            top_ids=ids,
            top_scores=best,
            listed_ranks=_cut(ranks[:, 1:], listed),
            listed_scores=_cut(values[:, 1:], listed),
        )
        entries.add(self.rows[good], self.positions[good], scores)


def _cut(rows: np.ndarray, counts: Ints) -> list[np.ndarray]:
    """As much of each row as its count says."""
    return [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]


def pending(
    view: View, ids: Tensor, rows: Ints, positions: Ints, num_top: Ints, num_listed: Ints
) -> PendingScores:  # fmt: skip
    """Scores of the view's entries at ids [m, 1 + most] (int32, on the device), and of the num_top best of each."""
    found = score(view, ids)
    most = min(int(num_top.max(initial=0)), view.of.logits.shape[1])
    best = values = None
    if most > 0:
        best, values = map(to_host, best_ids(view, most, found.normaliser))
    return PendingScores(
        rows=rows,
        positions=positions,
        num_top=num_top,
        num_listed=num_listed,
        scores=to_host(found.scores),
        ranks=to_host(found.ranks),
        bad=to_host(found.is_bad),
        top_ids=best,
        top_scores=values,
    )


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
