"""From a step's flat score columns to the records of its requests."""

from __future__ import annotations

from perdure.api.plan import ScoreColumns
from perdure.api.scores import TokenScores


def rows_with_scores(columns: ScoreColumns) -> dict[int, tuple[int, int, int]]:
    """Of each row with scores: its first entry, the end of its entries, and its first top pair."""
    found: dict[int, tuple[int, int, int]] = {}
    top = 0
    for entry, row in enumerate(columns.row):
        first, _, first_top = found.get(row, (entry, 0, top))
        found[row] = (first, entry + 1, first_top)
        top += columns.num_top[entry]
    return found


def append_scores(into: TokenScores, columns: ScoreColumns, where: tuple[int, int, int], tokens: list[int]) -> None:
    """Append one row's entries; tokens is the request's whole list, read at the entries' positions."""
    first, end, top = where
    top_ids, top_scores = memoryview(columns.top_ids).cast("i"), memoryview(columns.top_scores).cast("f")
    for entry in range(first, end):
        top_end = top + columns.num_top[entry]
        into.append(
            tokens[columns.position[entry]],
            columns.chosen[entry],
            columns.rank[entry],
            top_ids[top:top_end],
            top_scores[top:top_end],
        )
        top = top_end
