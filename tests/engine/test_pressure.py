"""Trained weights under pressure: in a fifth of the pages every text is that of the roomy pool. The README shows it."""

from __future__ import annotations

from pathlib import Path

from docs.pressure import SHARE, num_pages_needed, run_twice

from perdure import Trace
from tests.engine.helpers import check_equal, pressure
from tests.witness import witness


def test_smollm2_in_a_fifth_of_the_pages_gives_the_same_texts(
    smollm2_path: Path, soak_factor: int, tmp_path: Path
) -> None:
    """8 requests of 60 new tokens, in a soak 32 of 200: ids, texts and scores bit for bit. The trace of the run says
    what the results do."""
    count, max_tokens = (8, 60) if soak_factor == 1 else (32, 200)
    roomy, tight, stats = run_twice(count, max_tokens, tmp_path / "run")
    num_evictions, num_pauses = (sum(column) for column in zip(*map(pressure, tight)))
    num_pages_of_all = num_pages_needed(roomy)
    witness(
        "smollm2-pressure",
        num_requests=len(tight),
        num_pages=stats.num_pages,
        num_pages_of_all=num_pages_of_all,
        num_evictions=num_evictions,
        num_pauses=num_pauses,
    )
    assert stats.num_pages == num_pages_of_all // SHARE
    assert sum(sum(pressure(output)) for output in roomy) == 0
    assert len({output.outputs[0].text for output in roomy}) == count
    for output, other in zip(tight, roomy, strict=True):
        assert len(output.outputs[0].token_ids) == max_tokens
        check_equal(output, other)
    tracks = Trace.read(tmp_path / "run").timeline.tracks
    assert [(track.num_evictions, track.num_pauses) for track in tracks] == [pressure(output) for output in tight]
