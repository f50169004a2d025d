"""`Trace`: a run read from its journal, and the forms in which it can be shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perdure.api.errors import JournalError
from perdure.core.journal import Entries, Entry, read
from perdure.trace.chrome import chrome_trace
from perdure.trace.picture import picture
from perdure.trace.timeline import Timeline


class Trace:
    """num_torn_bytes: what the journal has of a last entry that was cut short; it is left out. damage: what is wrong
    with a journal that shows only the run before it."""

    def __init__(self, timeline: Timeline, num_torn_bytes: int, damage: str | None = None) -> None:
        self.timeline = timeline
        self.num_torn_bytes = num_torn_bytes
        self.damage = damage

    @staticmethod
    def read(path: str | Path) -> Trace:
        """The run, or what comes before the first damaged entry. Raises `JournalError` where the file is no journal of
        this version, and `OSError`."""
        damage: str | None = None

        def whole(entries: Entries) -> Iterator[Entry]:
            nonlocal damage
            try:
                yield from entries
            except JournalError as error:
                damage = str(error)

        with Path(path).open("rb") as file:
            try:
                config, entries = read(file)
            except JournalError as error:
                raise JournalError(f"{path}: {error}") from None
            timeline = Timeline(config, whole(entries))
        return Trace(timeline, entries.num_torn_bytes, damage)

    def chrome(self) -> dict[str, Any]:
        """A Chrome trace, for `json.dump`."""
        return chrome_trace(self.timeline)

    def svg(self) -> str:
        """One picture: time across, requests down, and the pool's pages below."""
        return picture(self.timeline)
