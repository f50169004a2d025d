"""What a streamed chunk costs a front end, by CPU time of its process: in the best of several turns."""

from __future__ import annotations

import pytest
from benchmarks.front_end import CHAT, COMPLETIONS, front_end, measure_beside, plain_server

from tests.witness import witness

pytestmark = pytest.mark.alone

MOST_TIMES_PLAIN = 3.0
"""What uvicorn and starlette alone take for a chunk, so many times."""
TURNS = 4


def test_what_a_streamed_chunk_costs() -> None:
    """Against a server that only streams, measured in the same moments: machines differ, and one does by the minute."""
    tried = []
    with front_end(num_tokens=64, interval_s=0.02) as server, plain_server(64, 0.02) as plain:
        while len(tried) < TURNS and (not tried or _times_plain(tried[-1]) >= MOST_TIMES_PLAIN):
            tried.append(measure_beside(server, plain, streams=32, num_requests=64))
    best = min(tried, key=_times_plain)
    assert _times_plain(best) < MOST_TIMES_PLAIN, tried
    witness(
        "front-end-cost",
        times_plain=round(_times_plain(best), 2),
        us_a_chunk=round(best[COMPLETIONS]["us_a_chunk"]),
        us_a_chunk_of_a_chat=round(best[CHAT]["us_a_chunk"]),
    )


def _times_plain(found: dict[str, dict[str, float]]) -> float:
    return max(one["times_plain"] for one in found.values())
