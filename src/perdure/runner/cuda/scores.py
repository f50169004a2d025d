"""Scores of a step on their way from the device: columns that are copied without waiting, and entries once they are
there.

Whoever asks for what the device does not score (listed ids, processed scores, whole vocabularies) is scored on the
host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perdure.ops.sampling import NO_LIST, Scores
from perdure.ops.triton.sampling import score_ids, top_ids
from perdure.runner.inputs import Ints
from perdure.runner.sampler import BAD_LOGITS, ScoreEntries


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Of n entries; the tensors are the host's, and valid once the step's event has come. rows are the plan's."""

    rows: Ints
    positions: Ints
    num_top: Ints
    chosen: Tensor
    rank: Tensor
    bad: Tensor
    top_ids: Tensor | None
    top_scores: Tensor | None

    def add_to(self, entries: ScoreEntries, errors: dict[int, str]) -> None:
        """As entries; the rows of unusable logits get an error instead."""
        bad = self.bad.numpy()
        errors.update((row, BAD_LOGITS) for row in self.rows[bad].tolist() if row not in errors)
        good = np.flatnonzero(~bad)
        counts = self.num_top[good].tolist()
        ids, values = self._tops(good, counts)
        none = [NO_LIST] * len(good)
        scores = Scores(
            chosen=self.chosen.numpy()[good],
            rank=self.rank.numpy()[good],
            top_ids=ids,
            top_scores=values,
            listed_ranks=none,
            listed_scores=[np.empty(0, np.float32)] * len(good),
        )
        entries.add(self.rows[good], self.positions[good], scores)

    def _tops(self, good: Ints, counts: list[int]) -> tuple[list[Ints], list[np.ndarray]]:
        if self.top_ids is None or self.top_scores is None:
            return [NO_LIST] * len(good), [np.empty(0, np.float32)] * len(good)
        ids, values = self.top_ids.numpy()[good], self.top_scores.numpy()[good]
        return (
            [row[:count] for row, count in zip(ids, counts, strict=True)],
            [row[:count] for row, count in zip(values, counts, strict=True)],
        )


def score(logits: Tensor, ids: Tensor, rows: Ints, positions: Ints, num_top: Ints) -> PendingScores:
    """Raw scores of ids [n] (int32, on the device) in logits [n, V], and of the num_top best of each row."""
    chosen, rank, normaliser, bad = score_ids(logits, ids)
    most = min(int(num_top.max(initial=0)), logits.shape[1])
    best = values = None
    if most > 0:
        found = top_ids(logits, most)
        best = to_host(found)
        values = to_host((logits.gather(1, found).double() - normaliser[:, None]).float())
    return PendingScores(
        rows, positions, num_top, to_host(chosen), to_host(rank), to_host(bad), best, values
    )  # fmt: skip


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, on its way."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
