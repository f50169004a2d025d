"""Scores as rows that JSON and tables show."""

from __future__ import annotations

from typing import Any

from perdure.api.scores import TokenScores
from perdure.cli.output import json_number


def rows_of(scores: TokenScores, *, with_best: bool = False) -> list[dict[str, Any]]:
    """One row a scored token; with_best: the best ids of each position stand in `top`."""
    rows = []
    for i in range(scores.num_scored):
        entry = scores[i + scores.leading_none]
        assert entry is not None
        found = [
            {"token_id": token_id, "token": one.decoded_token, "logprob": json_number(one.logprob), "rank": one.rank}
            for token_id, one in entry.items()
        ]
        row = next(one for one in found if one["token_id"] == scores.token_ids[i])
        rows.append({**row, "top": found[: scores.num_top[i]]} if with_best else row)
    return rows
