"""A launched step on its way: the memory its numbers went and come back through, and what becomes of them.

- `Staging` holds pinned blocks; a step has one from its launch until its results were taken, so no step overwrites
  another's numbers that are still being copied.
- `Launched` is what the host knows of a step, completed by what comes back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.api.ending import BAD_LOGITS, NOTHING_ALLOWED, NOTHING_LEFT, Failure
from perdure.api.errors import StepFailed
from perdure.api.plan import ScoreColumns, StepOutput, StepPlan
from perdure.ops.triton.adjust import FINE, STALE, UNUSABLE
from perdure.ops.triton.adjust import NOTHING_LEFT as LEAVES_NOTHING
from perdure.runner.cuda.scores import PendingScores
from perdure.runner.failed_rows import failed_output, with_rows
from perdure.runner.inputs import Ints
from perdure.runner.sampler import ScoreEntries

NONE: Ints = np.empty(0, np.int64)

WHY = {
    UNUSABLE.value: BAD_LOGITS,
    LEAVES_NOTHING.value: NOTHING_LEFT,
    STALE.value: Failure.of(StepFailed("the row's history on the device is not the one before this token")),
}


class StagedStep:
    """words: the step's numbers, as the host writes them."""

    def __init__(self, num_words: int, results: torch.Tensor) -> None:
        on_gpu = results.is_cuda
        self._words = torch.zeros(num_words, dtype=torch.int32, pin_memory=on_gpu)
        self._results = torch.zeros(results.shape, dtype=torch.int32, pin_memory=on_gpu)
        self.words = self._words.numpy()
        self._event = torch.cuda.Event() if on_gpu else None
        self._num_steps = self._count = 0

    def copy_to(self, words: torch.Tensor) -> None:
        """Have the numbers copied to the device."""
        words.copy_(self._words[: len(words)], non_blocking=True)

    def send(self, results: torch.Tensor, count: int) -> None:
        """Have the results [k, 2, most] of so many rows copied back once they are there, with all that was copied
        before."""
        self._num_steps, self._count = len(results), count
        if count:
            self._results[: len(results)].copy_(results, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def receive(self) -> tuple[Ints, np.ndarray]:
        """Wait for them: tokens [k, n], and what came of each row in each step."""
        if self._event is not None:
            self._event.synchronize()
        found = self._results[: self._num_steps, :, : self._count].numpy()
        return found[:, 0].astype(np.int64), found[:, 1].copy()


class Staging:
    """Blocks for steps in flight, as many as are needed. results: what comes back at most, on the device."""

    def __init__(self, num_words: int, results: torch.Tensor) -> None:
        self._make = lambda: StagedStep(num_words, results)
        self._free = [self._make() for _ in range(2)]

    def take(self) -> StagedStep:
        return self._free.pop() if self._free else self._make()

    def give_back(self, staged: StagedStep) -> None:
        self._free.append(staged)


@dataclass(slots=True)
class Launched:
    """requests: of the plan's rows. rows, slots: of those that the device samples, in the order of its results; masked:
    those of rows that a grammar holds. host_*: of those that the host sampled at launch. errors: by the plan's row."""

    step: int
    requests: list[int]
    rows: Ints
    slots: Ints
    all_slots: Ints
    errors: dict[int, Failure] = field(default_factory=dict)
    masked: Ints = field(default_factory=lambda: NONE)
    scores: list[PendingScores] = field(default_factory=list)
    prompt_scores: list[PendingScores] = field(default_factory=list)
    prompt_entries: ScoreEntries = field(default_factory=ScoreEntries)
    host_rows: Ints = field(default_factory=lambda: NONE)
    host_tokens: Ints = field(default_factory=lambda: NONE)
    host_entries: ScoreEntries = field(default_factory=ScoreEntries)

    def output(self, tokens: Ints, codes: np.ndarray) -> tuple[StepOutput, NDArray[np.bool_]]:
        """What came of the step, and which of `rows` have a token, [k, n]; of one step here."""
        (tokens,), (codes,) = tokens, codes
        of_prompts: dict[int, Failure] = {}
        for pending in self.prompt_scores:
            pending.add_to(self.prompt_entries, of_prompts)
        errors = self.errors | of_prompts  # a prompt's fault comes before that of the token drawn after it
        good: NDArray[np.bool_] = codes == FINE.value
        for row, code in zip(self.rows[~good].tolist(), codes[~good].tolist(), strict=True):
            is_masked = code == LEAVES_NOTHING.value and row in self.masked
            errors.setdefault(row, NOTHING_ALLOWED if is_masked else WHY[code])
        for pending in self.scores:
            pending.add_to(self.host_entries, errors)
        if errors:
            good = ~np.isin(self.rows, list(errors))
        rows = np.concatenate([self.rows[good], self.host_rows])
        drawn = np.concatenate([tokens[good], self.host_tokens])
        if len(self.host_rows):
            order = np.argsort(rows, kind="stable")
            rows, drawn = rows[order], drawn[order]
        num_sampled = np.zeros(len(self.requests), np.int64)
        num_sampled[rows] = 1
        output = StepOutput(
            step=self.step,
            num_sampled=num_sampled.tolist(),
            tokens=drawn.tolist(),
            records=self.host_entries.columns(errors),
            prompt_records=self.prompt_entries.columns(),
            errors=sorted(errors.items()),
        )
        return output, good[None]


@dataclass(slots=True)
class LaunchedBurst(Launched):
    """Of rows that the device samples, all of them. lengths: in how many steps each is; first: where its first token
    will stand. scores: in the order of the steps."""

    lengths: Ints = field(default_factory=lambda: NONE)
    first: Ints = field(default_factory=lambda: NONE)

    def output(self, tokens: Ints, codes: np.ndarray) -> tuple[StepOutput, NDArray[np.bool_]]:
        """The same of all steps: of each row what came before its first failure."""
        steps = np.arange(len(tokens))[:, None]
        bad = (codes != FINE.value) & (steps < self.lengths)
        fails = bad.any(axis=0)
        counts = np.where(fails, bad.argmax(axis=0), self.lengths)
        failed = np.flatnonzero(fails)
        errors = {
            row: WHY[code] for row, code in zip(failed.tolist(), codes[counts[failed], failed].tolist(), strict=True)
        }
        entries = ScoreEntries()
        entries.end(failed, self.first[failed] + counts[failed])
        for pending in self.scores:
            pending.add_to(entries, errors)
        for row, end in entries.ends.items():
            counts[row] = min(int(counts[row]), end - int(self.first[row]))
        good: NDArray[np.bool_] = steps < counts
        output = StepOutput(
            step=self.step,
            num_sampled=counts.tolist(),
            tokens=tokens.T[good.T].tolist(),
            records=entries.columns(),
            prompt_records=ScoreColumns.empty(),
            errors=sorted(errors.items()),
        )
        return output, good


Finish = Callable[[Launched, Ints, np.ndarray], StepOutput]


class StepTicket:
    """One launched step (`perdure.runner.base.Ticket`). whole, failed: the plan as it came, and the rows of it that
    were left out because they had failed."""

    def __init__(
        self,
        finish: Finish | None,
        launched: Launched | None = None,
        staged: StagedStep | None = None,
        staging: Staging | None = None,
        whole: StepPlan | None = None,
        failed: Mapping[int, Failure] | None = None,
    ) -> None:
        self._finish = finish
        self._launched = launched
        self._staged = staged
        self._staging = staging
        self._whole = whole
        self._failed = failed
        self._lock = threading.Lock()
        self._output: StepOutput | None = None

    @staticmethod
    def of(output: StepOutput) -> StepTicket:
        """Of a step that is known already."""
        ticket = StepTicket(None)
        ticket._output = output
        return ticket

    def wait(self) -> StepOutput:
        with self._lock:
            if self._output is None:
                self._output = self._received()
            return self._output

    def _received(self) -> StepOutput:
        assert self._finish and self._launched and self._staged and self._staging and self._whole is not None
        try:
            tokens, codes = self._staged.receive()
            output = self._finish(self._launched, tokens, codes)
        except Exception as error:
            return failed_output(self._whole, Failure.of_step(error))
        self._staging.give_back(self._staged)
        return with_rows(output, self._failed, self._whole) if self._failed else output
