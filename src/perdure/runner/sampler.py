"""From logits to what a step reports: tokens, their scores, the scores of prompt tokens, rows that failed.

- A row whose logits hold NaN, or whose settings leave nothing to draw, is an error of that row; others do not notice.
- Raw scores are of the model's logits as they come; processed ones of what was drawn from, after all that was asked.
- Scores of prompt tokens are raw and made a slice of rows at a time, so a long prompt needs no [tokens, V] memory.
- Nothing is computed for a row that did not ask.

Shapes: H = hidden size, V = vocabulary, S sampled rows, T targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from perdure.api.ending import BAD_LOGITS, NOTHING_ALLOWED, NOTHING_LEFT, Failure
from perdure.api.plan import NO_LOGPROBS, ScoreColumns
from perdure.models.base import Model
from perdure.ops.adjust import adjust
from perdure.ops.sampling import Scores, processed, sample, score, unusable_rows
from perdure.ops.select import Floats
from perdure.runner.inputs import Ints, Targets
from perdure.runner.masks import Masks
from perdure.runner.row_store import RowStore

TARGET_SLICE = 128  # prompt rows whose logits exist at once


class Sampler:
    """`errors` of its methods: {the plan's row: why it failed} of one step, filled as its logits are seen.

    masks: begun for the step before its logits are made.
    """

    def __init__(self, model: Model, rows: RowStore, masks: Masks, row_tile: int) -> None:
        self._model = model
        self._rows = rows
        self._masks = masks
        self._row_tile = row_tile

    def score_targets(
        self, hidden: torch.Tensor, targets: Targets, slots: Ints, errors: dict[int, Failure]
    ) -> ScoreEntries:
        """hidden [M, H]; slots [R] of the plan's rows."""
        entries = ScoreEntries()
        for low in range(0, len(targets.row), TARGET_SLICE):
            part = slice(low, low + TARGET_SLICE)
            logits = self._logits(hidden, targets.hidden_row[part])
            rows, positions, ids = targets.row[part], targets.position[part], targets.token[part]
            good = _good_rows(logits, rows, errors)
            if len(good) < len(rows):
                entries.end(np.delete(rows, good), np.delete(positions, good))
                logits, rows, positions, ids = logits[good], rows[good], positions[good], ids[good]
            num_top = self._rows.num_prompt_logprobs[slots[rows]]
            entries.add(rows, positions, score(logits, ids, num_top))
        return entries

    def sample(
        self,
        hidden: torch.Tensor,
        hidden_rows: Ints,
        rows: Ints,
        slots: Ints,
        positions: Ints,
        errors: dict[int, Failure],
    ) -> tuple[Ints, Ints, ScoreEntries]:
        """Draw for the plan's rows [S], whose tokens will stand at positions [S]; rows that failed already get none.

        Returns the rows that have a token, their tokens, and scores for those that asked.
        """
        return self.sample_from(self._logits(hidden, hidden_rows), rows, slots, positions, errors)

    def sample_from(
        self, logits: Floats, rows: Ints, slots: Ints, positions: Ints, errors: dict[int, Failure]
    ) -> tuple[Ints, Ints, ScoreEntries]:
        """`sample` of logits [S, V] that are there already."""
        good = _good_rows(logits, rows, errors)
        good = good[[int(row) not in errors for row in rows[good]]] if errors else good
        if len(good) < len(rows):
            logits, rows, slots, positions = logits[good], rows[good], slots[good], positions[good]
        adjusted, failed = self._adjusted(logits, slots, positions)
        if failed:
            errors.update((int(rows[at]), why) for at, why in failed.items())
            left = np.setdiff1d(np.arange(len(rows)), list(failed))
            logits, adjusted, rows, slots, positions = (x[left] for x in (logits, adjusted, rows, slots, positions))
        output_index = self._rows.output_index(slots, positions)
        columns = self._rows.sampling(slots, output_index)
        tokens = sample(adjusted, columns)
        self._rows.force(tokens, slots, output_index)

        entries = ScoreEntries()
        asked = self._rows.num_logprobs[slots] != NO_LOGPROBS
        of_processed = self._rows.processed_logprobs[slots]
        for use_processed in (False, True):
            chosen = np.flatnonzero(asked & (of_processed == use_processed))
            if len(chosen) == 0:
                continue
            x = adjusted if use_processed else logits
            x = x if len(chosen) == len(rows) else x[chosen]
            if use_processed:
                x = processed(x, columns.take(chosen))
            num_top = self._rows.num_logprobs[slots[chosen]]
            listed = [self._rows.listed_ids[slot] for slot in slots[chosen].tolist()]
            entries.add(rows[chosen], positions[chosen], score(x, tokens[chosen], num_top, listed))
        return rows, tokens, entries

    def _adjusted(self, logits: Floats, slots: Ints, positions: Ints) -> tuple[Floats, dict[int, Failure]]:
        """What temperature is applied to: the logits after all that was asked, or these themselves if nothing was. And
        why rows failed by it, by index."""
        asked_of = self._rows.adjustments
        masks, failed = self._masks.take(slots)
        x = asked_of.call_functions(slots, logits, failed)
        asked = asked_of.of(slots, self._rows.output_index(slots, positions), masks)
        if asked is not None:
            x = adjust(x, asked)
        if x is not logits:
            masked = () if masks is None else masks.row.tolist()
            nothing = np.flatnonzero(unusable_rows(x)).tolist()
            failed = {row: NOTHING_ALLOWED if row in masked else NOTHING_LEFT for row in nothing} | failed
        return x, failed

    def _logits(self, hidden: torch.Tensor, rows: Ints) -> Floats:
        """fp32 logits [len(rows), V] of packed rows; the head's product is padded to whole tiles of rows."""
        padded = np.zeros(-(-len(rows) // self._row_tile) * self._row_tile, np.int64)
        padded[: len(rows)] = rows
        logits: Floats = self._model.logits(hidden[torch.from_numpy(padded).to(hidden.device)]).cpu().numpy()
        return logits[: len(rows)]


def _good_rows(logits: Floats, rows: Ints, errors: dict[int, Failure]) -> Ints:
    """Indices of usable logits; the plan's rows of the others get an error."""
    unusable = unusable_rows(logits)
    errors.update((row, BAD_LOGITS) for row in rows[unusable].tolist())
    return np.flatnonzero(~unusable)


@dataclass(slots=True)
class ScoreEntries:
    """Scores collected in parts, any order of rows; in order of position within a row.

    A row's entries end before its first position without usable logits: what comes before is the same wherever a step
    ends. ends: that position, by row.
    """

    rows: list[Ints] = field(default_factory=list)
    positions: list[Ints] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)

    def add(self, rows: Ints, positions: Ints, scores: Scores) -> None:
        self.rows.append(rows)
        self.positions.append(positions)
        scores = replace(scores, top_ids=[ids.astype(np.int32) for ids in scores.top_ids])
        self.scores.append(scores)

    def end(self, rows: Ints, positions: Ints) -> None:
        """The logits of these are not usable."""
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            self.ends[row] = min(position, self.ends.get(row, position))

    def columns(self, without: Iterable[int] = ()) -> ScoreColumns:
        """In the plan's order of rows and in order of position. without: rows that have none."""
        if not self.rows:
            return ScoreColumns.empty()
        row, position = np.concatenate(self.rows), np.concatenate(self.positions)
        kept_rows = ~np.isin(row, list(without))
        for ended, end in self.ends.items():
            kept_rows &= (row != ended) | (position < end)
        order = np.argsort(row, kind="stable")
        order = order[kept_rows[order]]
        top_ids = [ids for part in self.scores for ids in part.top_ids]
        top_scores = [values for part in self.scores for values in part.top_scores]
        listed_ranks = [ranks for part in self.scores for ranks in part.listed_ranks]
        listed_scores = [values for part in self.scores for values in part.listed_scores]
        kept = order.tolist()
        return ScoreColumns(
            row=row[order].tolist(),
            position=position[order].tolist(),
            chosen=np.concatenate([part.chosen for part in self.scores])[order].tolist(),
            rank=np.concatenate([part.rank for part in self.scores])[order].tolist(),
            num_top=[len(top_ids[entry]) for entry in kept],
            num_listed=[len(listed_ranks[entry]) for entry in kept],
            listed_ranks=b"".join(listed_ranks[entry].astype("<i4").tobytes() for entry in kept),
            listed_scores=b"".join(listed_scores[entry].astype("<f4").tobytes() for entry in kept),
            top_ids=b"".join(top_ids[entry].astype("<i4").tobytes() for entry in kept),
            top_scores=b"".join(top_scores[entry].astype("<f4").tobytes() for entry in kept),
        )
