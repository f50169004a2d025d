"""From a step's flat score columns to the records of its requests."""

from __future__ import annotations

from typing import NamedTuple

from perdure.api.plan import ScoreColumns
from perdure.api.scores import TokenScores


class RowEntries(NamedTuple):
    """One row's entries first .. end - 1, and the first of its top pairs and of its listed ones."""

    first: int
    end: int
    first_top: int
    first_listed: int


def rows_with_scores(columns: ScoreColumns) -> dict[int, RowEntries]:
    """Where each row's scores stand."""
    found: dict[int, RowEntries] = {}
    top = listed = 0
    for entry, row in enumerate(columns.row):
        before = found.get(row)
        first, first_top, first_listed = (
            (entry, top, listed) if before is None else (before.first, before.first_top, before.first_listed)
        )
        found[row] = RowEntries(first, entry + 1, first_top, first_listed)
        top += columns.num_top[entry]
        listed += columns.num_listed[entry] if columns.num_listed else 0
    return found


def append_scores(into: TokenScores, columns: ScoreColumns, where: RowEntries, tokens: list[int]) -> None:
    """Append one row's entries; tokens is the request's whole list, read at the entries' positions."""
    top_ids, top_scores = memoryview(columns.top_ids).cast("i"), memoryview(columns.top_scores).cast("f")
    ranks, scores = memoryview(columns.listed_ranks).cast("i"), memoryview(columns.listed_scores).cast("f")
    top, listed = where.first_top, where.first_listed
    for entry in range(where.first, where.end):
        top_end = top + columns.num_top[entry]
        listed_end = listed + (columns.num_listed[entry] if columns.num_listed else 0)
        into.append(
            tokens[columns.position[entry]],
            columns.chosen[entry],
            columns.rank[entry],
            top_ids[top:top_end],
            top_scores[top:top_end],
            ranks[listed:listed_end],
            scores[listed:listed_end],
        )
        top, listed = top_end, listed_end
