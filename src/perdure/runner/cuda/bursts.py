"""The numbers of a burst: those of its first step, and what differs in each step after it.

- A step's rows stay at their places, so one shape, and one graph, serves all of them. A row that is in no more steps is
  padding from then on: it writes nowhere and draws into a slot that nobody has.
- All are known before the first step runs: positions grow by one, pages are in the table, tokens are on the device.
  Rows that end by an id are left out there.

Shapes: k steps, n rows, all of which decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perdure.api.plan import MOST_STEPS, NO_LOGPROBS
from perdure.runner.cuda.graphs import Outputs
from perdure.runner.cuda.sampler import DeviceSampler, of_outputs
from perdure.runner.cuda.scores import PendingScores
from perdure.runner.cuda.step import NOWHERE, StepColumns, StepSize, longest_first
from perdure.runner.cuda.ticket import StagedStep
from perdure.runner.inputs import Ints, PackedStep
from perdure.runner.row_store import RowStore


@dataclass(frozen=True, slots=True)
class Burst:
    """first: its first step. lengths [n]: in how many steps each row is."""

    first: PackedStep
    lengths: Ints

    @property
    def num_steps(self) -> int:
        return int(self.lengths.max())

    @property
    def ends(self) -> Ints:
        """Where rows stand after it, [n]."""
        ends: Ints = self.first.starts + self.lengths
        return ends

    def present(self, step: int) -> Ints:
        """The rows that are in this step."""
        return np.flatnonzero(self.lengths > step)

    def at(self, step: int) -> PackedStep:
        """This step; rows that are in it no more stay where they were."""
        starts = self.first.starts + np.minimum(step, self.lengths - 1)
        return replace(self.first, positions=starts, starts=starts, ends=starts + 1)


class Bursts:
    """results [k, 2, most]: what came of each step. size: of the largest step of a burst."""

    def __init__(self, rows: RowStore, sampler: DeviceSampler, page_size: int, size: StepSize) -> None:
        num_slots, device = len(rows.request), sampler.results.device
        self._rows = rows
        self._sampler = sampler
        self._page_size = page_size
        self.num_words = MOST_STEPS * size.num_words
        self._words = torch.zeros(self.num_words, dtype=torch.int32, device=device)
        self.results = torch.zeros(MOST_STEPS, 2, num_slots, dtype=torch.int32, device=device)

    def run(
        self, burst: Burst, size: StepSize, staged: StagedStep, words: Tensor, compute: Callable[[int], Outputs]
    ) -> list[PendingScores]:
        """Send the numbers of all steps, then compute each of those at `words`; what was asked of scores is on its way.
        Between two steps there is nothing but what the device does (`ops.triton.bursts`)."""
        num_steps, width = burst.num_steps, size.num_words
        self.fill(staged.words[: num_steps * width].reshape(num_steps, width), size, burst)
        staged.copy_to(self._words[: num_steps * width])
        found, count = [], len(burst.lengths)
        columns, row_ends, results = StepColumns.on_device(words, size), self._sampler.row_ends, self._sampler.results
        draws = columns.samples
        asks_scores = bool((self._rows.num_logprobs[burst.first.slots] != NO_LOGPROBS).any())
        for step in range(num_steps):
            numbers = self._words[step * width : (step + 1) * width]
            row_ends.turn(numbers, words, columns.write, columns.at, columns.slots, draws.slots, count)
            outputs = compute(step)
            row_ends.learn(results, self.results[step], draws.slots, draws.output_index, count)
            if asks_scores:
                drawn = *of_outputs(outputs[1:]), draws.settings()
                found.append(self._sampler.scores_in_burst(burst.at(step), burst.present(step), drawn))
        return [scores for scores in found if scores is not None]

    def fill(self, words: NDArray[np.int32], size: StepSize, burst: Burst) -> None:
        """Write the numbers [k, w] of its steps."""
        first, count, sampler = burst.first, len(burst.lengths), self._sampler
        every = np.arange(count)
        order = longest_first(first, every)
        columns = StepColumns.on_host(words[0], size)
        columns.pad(sampler.nobody)
        columns.fill(first, order, np.empty((0, 4), np.int64), every)
        parts = sampler.parts(first)
        assert len(parts.with_step) == count, "a row of a burst needs the host"
        sampler.fill(columns.samples, first, parts)
        words[1:] = words[0]
        for step in range(1, len(words)):
            columns, now, gone = StepColumns.on_host(words[step], size), burst.at(step), burst.lengths <= step
            page, inside = np.divmod(now.starts, self._page_size)
            write = self._rows.block_table[now.slots, page] * self._page_size + inside
            columns.positions[:count] = now.starts
            columns.write[:count] = np.where(gone, NOWHERE, write)
            columns.at[:count] = np.where(gone, NOWHERE, now.starts)[order]
            sampler.turn(columns.samples, now)
            columns.samples.leave(np.flatnonzero(gone), sampler.nobody)
