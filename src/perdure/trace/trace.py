"""`Trace`: a run read from its journal, and the forms in which it can be shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.api.errors import JournalError
from perdure.core.journal import read
from perdure.trace.chrome import chrome_trace
from perdure.trace.picture import picture
from perdure.trace.timeline import Timeline


class Trace:
    """num_torn_bytes: what the journal has of a last entry that was cut short; it is left out."""

    def __init__(self, timeline: Timeline, num_torn_bytes: int) -> None:
        self.timeline = timeline
        self.num_torn_bytes = num_torn_bytes

    @staticmethod
    def read(path: str | Path) -> Trace:
        """Raises `JournalError` where the file is no journal, or a damaged one, and `OSError`."""
        with Path(path).open("rb") as file:
            try:
                config, entries = read(file)
                timeline = Timeline(config, entries)
            except JournalError as error:
                raise JournalError(f"{path}: {error}") from None
        return Trace(timeline, entries.num_torn_bytes)

    def chrome(self) -> dict[str, Any]:
        """A Chrome trace, for `json.dump`."""
        return chrome_trace(self.timeline)

    def svg(self) -> str:
        """One picture: time across, requests down, and the pool's pages below."""
        return picture(self.timeline)
