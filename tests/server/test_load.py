"""200 clients at once who stream, leave, send rubbish and read slowly, while replicas are killed: see `load.py`."""

from __future__ import annotations

from pathlib import Path

from tests.server.load import load
from tests.witness import witness


def test_no_answer_is_wrong_or_missing_under_load(tiny: Path, soak_factor: int) -> None:
    """Of the tiny model for a moment; in a soak of the default model for ten minutes, in which memory must not grow."""
    if soak_factor == 1:
        report, state = load(str(tiny), 3.5, 200, 60, 0, "--num-pages", "1024", "--max-model-len", "256")
    else:
        report, state = load(None, 60.0 * soak_factor, 200, 24)
    figures = report.figures()
    assert not report.wrong, figures
    assert report.num_kills == soak_factor
    if len(minutes := report.rss_of_minutes()) > 4:
        assert minutes[-1] <= 1.02 * minutes[2], figures
    witness(
        "load",
        requests=dict(report.counts),
        tokens=report.num_tokens,
        killed=report.num_kills,
        free_pages=state["num_free_pages"],
    )
