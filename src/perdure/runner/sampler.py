"""From logits to what a step reports: tokens, their scores, the scores of prompt tokens, rows that failed.

- A row whose logits hold NaN, or whose settings leave nothing to draw, is an error of that row; others do not notice.
- Raw scores are of the model's logits as they come; processed ones of what was drawn from, after all that was asked.
- Scores of prompt tokens are raw and made a slice of rows at a time, so a long prompt needs no [tokens, V] memory.
- Nothing is computed for a row that did not ask.

Shapes: H = hidden size, V = vocabulary, S sampled rows, T targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

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
            if len(rows):
                entries.add(EntryColumns.of(rows, positions, score(logits, ids, num_top)))
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
            scores = score(x, tokens[chosen], num_top, listed)
            entries.add(EntryColumns.of(rows[chosen], positions[chosen], scores))
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
        product = self._model.logits(hidden[torch.from_numpy(padded).to(hidden.device)])
        logits: Floats = product[: len(rows)].float().cpu().numpy()
        return logits


def _good_rows(logits: Floats, rows: Ints, errors: dict[int, Failure]) -> Ints:
    """Indices of usable logits; the plan's rows of the others get an error."""
    unusable = unusable_rows(logits)
    errors.update((row, BAD_LOGITS) for row in rows[unusable].tolist())
    return np.flatnonzero(~unusable)


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """Scores of entries as columns [m], and flat what each has so many of: best ids, and listed ones."""

    row: Ints
    position: Ints
    chosen: Floats
    rank: Ints
    num_top: Ints
    top_ids: Ints
    top_scores: Floats
    num_listed: Ints
    listed_ranks: Ints
    listed_scores: Floats

    @staticmethod
    def of(rows: Ints, positions: Ints, scores: Scores) -> EntryColumns:
        return EntryColumns(
            rows,
            positions,
            scores.chosen,
            scores.rank,
            *_joined(scores.top_ids),
            _joined(scores.top_scores)[1],
            *_joined(scores.listed_ranks),
            _joined(scores.listed_scores)[1],
        )


def _joined(parts: Sequence[np.ndarray]) -> tuple[Ints, np.ndarray]:
    return np.array([len(part) for part in parts], np.int64), np.concatenate(parts)


@dataclass(slots=True)
class ScoreEntries:
    """Scores collected in parts, any order of rows; in order of position within a row.

    A row's entries end before its first position without usable logits: what comes before is the same wherever a step
    ends. ends: that position, by row.
    """

    parts: list[EntryColumns] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)

    def add(self, part: EntryColumns) -> None:
        self.parts.append(part)

    def end(self, rows: Ints, positions: Ints) -> None:
        """The logits of these are not usable."""
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            self.ends[row] = min(position, self.ends.get(row, position))

    def columns(self, without: Iterable[int] = ()) -> ScoreColumns:
        """In the plan's order of rows and in order of position. without: rows that have none."""
        if not self.parts:
            return ScoreColumns.empty()
        names = [field_.name for field_ in fields(EntryColumns)]
        of = EntryColumns(*(np.concatenate([getattr(part, name) for part in self.parts]) for name in names))
        kept_rows = ~np.isin(of.row, list(without))
        for ended, end in self.ends.items():
            kept_rows &= (of.row != ended) | (of.position < end)
        order = np.argsort(of.row, kind="stable")
        order = order[kept_rows[order]]
        top, listed = _places(of.num_top, order), _places(of.num_listed, order)
        return ScoreColumns(
            row=of.row[order].tolist(),
            position=of.position[order].tolist(),
            chosen=of.chosen[order].tolist(),
            rank=of.rank[order].tolist(),
            num_top=of.num_top[order].tolist(),
            top_ids=of.top_ids[top].astype("<i4").tobytes(),
            top_scores=of.top_scores[top].astype("<f4").tobytes(),
            num_listed=of.num_listed[order].tolist(),
            listed_ranks=of.listed_ranks[listed].astype("<i4").tobytes(),
            listed_scores=of.listed_scores[listed].astype("<f4").tobytes(),
        )


def _places(counts: Ints, order: Ints) -> Ints:
    """Where, in a flat column of so many an entry, those of some entries stand."""
    first, taken = np.cumsum(counts) - counts, counts[order]
    found: Ints = np.repeat(first[order] - (np.cumsum(taken) - taken), taken) + np.arange(taken.sum())
    return found
