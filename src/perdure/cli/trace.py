"""`perdure trace`: a recorded run as a Chrome trace and a picture, and a table of its requests.

A run is recorded by `journal=PATH` in Python or `--journal PATH` of the other commands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from perdure import Trace
from perdure.api.units import in_units
from perdure.cli.output import remark, write_table

MOST_ROWS = 100
HEAD = ("request", "queued", "first token", "pauses", "evictions", "tokens", "end")


def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="What journal=PATH has written.")],
    chrome: Annotated[
        Path | None,
        typer.Option(help="The trace for ui.perfetto.dev; without it RUN.json.", metavar="FILE", show_default=False),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="The picture; without it RUN.svg.", metavar="FILE", show_default=False)
    ] = None,
) -> None:
    """Show a recorded run: a Chrome trace, a picture, and a table of its requests."""
    found = Trace.read(run)
    chrome = run.with_name(f"{run.name}.json") if chrome is None else chrome
    picture = run.with_name(f"{run.name}.svg") if picture is None else picture
    chrome.write_text(json.dumps(found.chrome(), separators=(",", ":")), encoding="utf-8")
    picture.write_text(found.svg(), encoding="utf-8")

    timeline = found.timeline
    rows = [
        (
            track.label,
            _seconds(track.time_in_queue),
            _seconds(track.time_to_first_token),
            str(track.num_pauses),
            str(track.num_evictions),
            "-" if track.end_reason is None else str(track.num_output),
            track.end_reason or "-",
        )
        for track in timeline.tracks[:MOST_ROWS]
    ]
    write_table(HEAD, rows)
    if len(timeline.tracks) > MOST_ROWS:
        remark(f"and {len(timeline.tracks) - MOST_ROWS:,} more requests, which the trace shows")
    if found.damage is not None:
        remark(f"{found.damage}; only the run before it is shown")
    if found.num_torn_bytes:
        remark(f"the journal was cut short: its last {in_units(found.num_torn_bytes)} are no whole entry and left out")
    remark(f"{chrome} opens in https://ui.perfetto.dev, {picture} in a browser")


def _seconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.3f} s"
