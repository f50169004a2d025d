"""From a step's flat score columns to the records of its requests."""

from __future__ import annotations

from perdure.api.plan import ScoreColumns
from perdure.api.scores import TokenScores


class StepScores:
    """A step's columns, gone through once, in the plan's order of rows."""

    def __init__(self, columns: ScoreColumns) -> None:
        self._columns = columns
        self._rows = columns.row
        self._top_ids, self._ranks = (memoryview(ids).cast("i") for ids in (columns.top_ids, columns.listed_ranks))
        self._top_scores, self._scores = (
            memoryview(scores).cast("f") for scores in (columns.top_scores, columns.listed_scores)
        )
        self._entry = self._top = self._listed = 0  # the next entry, and the first of its best and of its listed ones

    def append(self, row: int, into: TokenScores | None, tokens: list[int]) -> None:
        """This row's entries, if there are any; those of rows before it are passed over. tokens is the request's whole
        list, read at the entries' positions."""
        rows, columns, entry = self._rows, self._columns, self._entry
        while entry < len(rows) and rows[entry] <= row:
            top, listed = self._top, self._listed
            self._top = top_end = top + columns.num_top[entry]
            self._listed = listed_end = listed + (columns.num_listed[entry] if columns.num_listed else 0)
            if rows[entry] == row:
                assert into is not None
                into.append(
                    tokens[columns.position[entry]],
                    columns.chosen[entry],
                    columns.rank[entry],
                    self._top_ids[top:top_end],
                    self._top_scores[top:top_end],
                    self._ranks[listed:listed_end],
                    self._scores[listed:listed_end],
                )
            entry += 1
        self._entry = entry
